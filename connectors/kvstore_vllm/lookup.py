"""Which blocks of a prompt the store has, for all groups of layers and all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from kvstore import Client, Layout, StoredPrefix
from kvstore.errors import DeniedError, UnavailableError
from kvstore_vllm.budget import estimates, seconds_left
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.groups import Found, Group, PrefixFinder, in_parts
from kvstore_vllm.metrics import UNANSWERED
from kvstore_vllm.options import OWN, Scope
from kvstore_vllm.prefill_rate import PrefillRate
from kvstore_vllm.tenants import Tenants, namespace

_Shard: TypeAlias = "tuple[list[Any], list[Any]]"


class Lookup:
    """Asks for the blocks of prompts. Every lookup is a miss until the workers' layouts are known.

    Blocks of full attention that would load slower than the engine computes them, at `rate`, are not loaded.
    `deadline_s`: bounds a lookup; the scheduler, and so every request, waits for it. `drops`: vLLM drops the
    last block of a hit. Answers are those of `scope`, whose clients are `daemons`.
    """

    def __init__(
        self,
        daemons: Daemons,
        groups: Sequence[Group],
        rate: PrefillRate,
        deadline_s: float,
        drops: bool = False,
        scope: Scope = OWN,
    ) -> None:
        self._daemons = daemons
        self._rate = rate
        self._deadline_s = deadline_s
        self._scope = scope
        self._groups = list(groups)
        self._full = [group for group in groups if group.full]
        self._others = [group for group in groups if not group.full]
        self._all_usable = in_parts(groups) and not drops
        self._layouts: list[list[Layout]] = []
        self._by_daemon: dict[Client, list[int]] = {}
        self._namespaces: list[list[Any]] = []
        self._finder: PrefixFinder

    def meet(self, layouts: list[list[Layout]], epoch: str) -> None:
        """Takes the block layouts of each worker, by group."""
        self._layouts, self._by_daemon = layouts, {}
        for n, shard in enumerate(layouts):
            self._by_daemon.setdefault(self._daemons.of(shard[0]), []).append(n)
        self.open(epoch)

    def open(self, epoch: str) -> None:
        """Asks from now on for blocks since the reset named `epoch`."""
        self._namespaces = [
            [namespace(self._daemons, self._scope, epoch, layout) for layout in shard]
            for shard in self._layouts
        ]

    def bind(self, coordinator: Any) -> None:
        """Takes vLLM's coordinator of block tables."""
        self._finder = PrefixFinder(coordinator)

    def __bool__(self) -> bool:
        """Whether the workers' layouts are known."""
        return bool(self._layouts)

    def find(self, request: Any, salt: bytes, first: bool, computed_tokens: int = 0) -> Found:
        """Returns which blocks of a prompt all workers can load. `first`: counts the prompt.

        The engine has the first `computed_tokens` tokens. Raises UNANSWERED if the daemon is away, late or
        refuses.
        """
        keys = [group.keys(request.block_hashes, salt) for group in self._groups]
        alone = len(self._groups) == 1
        stored, worth = self._stored(keys, first and alone, computed_tokens)
        found = self._longest(request, stored, request.num_tokens - 1)
        if first and not alone:
            self._count(keys, found.tokens, computed_tokens)
        tokens = found.tokens if worth >= found.tokens else self._longest(request, stored, worth).tokens
        unworthy = max(0, found.tokens - max(tokens, computed_tokens))
        return replace(found, tokens=tokens, unworthy_tokens=unworthy)

    def _count(self, keys: list[list[bytes]], tokens: int, computed_tokens: int) -> None:
        """Counts a prompt in the daemon's hit ratio. Of several groups, `tokens` that all have are found."""
        for group in self._full[:1] if self._namespaces else ():
            chain, n = keys[group.number], tokens // group.block_tokens
            with suppress(*UNANSWERED):
                for daemon, shards, deadline_s in self._asked(computed_tokens, tokens):
                    daemon.lookup(
                        [
                            (shard[group.number], chain[:n], len(chain), estimate[group.number])
                            for shard, estimate in shards
                        ],
                        deadline_s=deadline_s,
                    )

    def _asked(self, computed_tokens: int, tokens: int) -> Iterator[tuple[Client, list[_Shard], float]]:
        """Yields each daemon, the shards that it has, and the deadline of its answer in s.

        A shard is the namespaces of a worker's groups, and what a lookup says of loading these tokens. Raises
        TimeoutError at the deadline of all answers.
        """
        compute_s, load_s = self._rate.seconds(computed_tokens, tokens), self._daemons.deadline_s
        made = estimates(compute_s, self._groups, self._layouts, computed_tokens, tokens, load_s)
        ends = time.monotonic() + self._deadline_s
        for daemon, shards in self._by_daemon.items():
            yield daemon, [(self._namespaces[n], made[n]) for n in shards], seconds_left(ends)

    def _longest(self, request: Any, stored: list[set[int]], most: int) -> Found:
        """Returns the longest stored prefix of at most `most` tokens."""
        if not self._all_usable:
            return self._finder.find(self._groups, request.block_hashes, stored, most)
        [group] = self._groups
        usable = most // group.page_tokens * group.page_tokens
        return Found(min(len(stored[0]) * group.block_tokens, usable), stored)

    def _stored(
        self, keys: list[list[bytes]], first: bool, computed_tokens: int
    ) -> tuple[list[set[int]], int]:
        """Returns the indices of stored blocks by group: those of full attention bound the others.

        Also returns how many leading tokens are worth loading, as far as groups of full attention show.
        """
        stored = [set[int]() for _ in self._groups]
        tokens = max((len(keys[group.number]) * group.block_tokens for group in self._groups), default=0)
        prefixes, masks = self._answers(keys, first, computed_tokens, tokens)
        worth = tokens
        for group, prefix in zip(self._full, prefixes, strict=True):
            tokens = min(tokens, prefix.blocks * group.block_tokens)
            worth = min(worth, prefix.worth_loading * group.block_tokens)
            stored[group.number] = set(range(tokens // group.block_tokens))
        for group, mask in zip(self._others, masks, strict=True):
            stored[group.number] = set(np.flatnonzero(mask[: tokens // group.block_tokens]).tolist())
        return stored, worth

    def _answers(
        self, keys: list[list[bytes]], first: bool, computed_tokens: int, tokens: int
    ) -> tuple[list[StoredPrefix], list[Any]]:
        """Returns what every worker can load: the prefixes of groups of full attention, and which blocks of
        the others. One round trip to each daemon for all groups and workers.
        """
        # Every shard counts the prompt, so that the hit ratio is that of one shard.
        prompt = {group.number: len(keys[group.number]) for group in self._full[:1] if first}
        if not self._namespaces:
            return [StoredPrefix() for _ in self._full], [np.empty(0, np.bool_) for _ in self._others]
        prefixes, masks = list[StoredPrefix](), list[Any]()
        for daemon, shards, deadline_s in self._asked(computed_tokens, tokens):
            found = daemon.lookup(
                [
                    (shard[n], keys[n], prompt.get(n, 0), estimate[n])
                    for shard, estimate in shards
                    for n in (group.number for group in self._full)
                ],
                [(shard[group.number], keys[group.number]) for shard, _ in shards for group in self._others],
                deadline_s,
            )
            prefixes += found[0]
            masks += found[1]
        full, others = len(self._full), len(self._others)
        return (
            [StoredPrefix.shortest(prefixes[i::full]) for i in range(full)],
            [np.logical_and.reduce(masks[i::others]) for i in range(others)],
        )


class ScopeLookups:
    """The lookups of scopes other than the engine's own, as `make` makes them.

    `deadline_s`: bounds the first call to the daemon with a token.
    """

    def __init__(self, daemons: Daemons, make: Callable[[Daemons, Scope], Lookup], deadline_s: float) -> None:
        self._make = make
        self._tenants = Tenants(daemons, deadline_s, tries=True)
        self._layouts: list[list[Layout]] = []
        self._epoch = ""
        self._coordinator: Any = None

    def meet(self, layouts: list[list[Layout]]) -> None:
        """Takes the block layouts of each worker, by group."""
        self._layouts = layouts

    def open(self, epoch: str) -> None:
        """Asks from now on for blocks since the reset named `epoch`."""
        self._epoch = epoch

    def bind(self, coordinator: Any) -> None:
        """Takes vLLM's coordinator of block tables."""
        self._coordinator = coordinator

    def find(self, scope: Scope, request: Any, salt: bytes, first: bool, computed_tokens: int) -> Found:
        """Returns which blocks of a scope all workers can load, see `Lookup.find`. Call `meet` before.

        Raises RefusedError for a token that the daemon refuses, and UNANSWERED.
        """
        try:
            lookup = self._tenants.opened(
                scope, self._epoch, None, lambda daemons: self._made(daemons, scope)
            )
            return lookup.find(request, salt, first, computed_tokens)
        except (UnavailableError, DeniedError) as error:
            self._tenants.check(scope, error)
            raise

    def close(self) -> None:
        """Closes the clients of tenants."""
        self._tenants.close()

    def _made(self, daemons: Daemons, scope: Scope) -> Lookup:
        lookup = self._make(daemons, scope)
        lookup.bind(self._coordinator)
        lookup.meet(self._layouts, self._epoch)
        return lookup
