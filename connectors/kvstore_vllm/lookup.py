"""Which blocks of a prompt the store has, for all groups of layers and all workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore import Client, Layout, StoredPrefix
from kvstore_vllm.budget import Budget, budget
from kvstore_vllm.groups import Found, Group, PrefixFinder, in_parts
from kvstore_vllm.identity import in_epoch
from kvstore_vllm.prefill_rate import PrefillRate

LOOKUP_DEADLINE_S = 0.05
"""The deadline of a lookup, in seconds: the scheduler, and so every request, waits for it."""


class Lookup:
    """Asks for the blocks of prompts. Every lookup is a miss until the workers' layouts are known.

    Blocks of full attention that would load slower than the engine computes them, at `rate`, are not loaded.
    `drops`: vLLM drops the last block of a hit.
    """

    def __init__(
        self, client: Client, groups: Sequence[Group], rate: PrefillRate, drops: bool = False
    ) -> None:
        self._client = client
        self._rate = rate
        self._groups = list(groups)
        self._all_usable = in_parts(groups) and not drops
        self._layouts: list[list[Layout]] = []
        self._namespaces: list[list[Any]] = []
        self._finder: PrefixFinder

    def meet(self, layouts: list[list[Layout]], epoch: str) -> None:
        """Takes the block layouts of each worker, by group."""
        self._layouts = layouts
        self.open(epoch)

    def open(self, epoch: str) -> None:
        """Asks from now on for blocks since the reset named `epoch`."""
        self._namespaces = [
            [self._client.namespace(in_epoch(layout, epoch)) for layout in shard] for shard in self._layouts
        ]

    def bind(self, coordinator: Any) -> None:
        """Takes vLLM's coordinator of block tables."""
        self._finder = PrefixFinder(coordinator)

    def __bool__(self) -> bool:
        """Whether the workers' layouts are known."""
        return bool(self._layouts)

    def find(self, request: Any, salt: bytes, first: bool, computed_tokens: int = 0) -> Found:
        """Returns which blocks of a prompt all workers can load. `first`: counts the prompt.

        The engine has the first `computed_tokens` tokens.
        """
        keys = [group.keys(request.block_hashes, salt) for group in self._groups]
        ends = time.monotonic() + LOOKUP_DEADLINE_S
        stored, worth = self._stored(keys, first, computed_tokens, ends)
        most = request.num_tokens - 1
        if self._all_usable:
            [group] = self._groups
            usable = most // group.page_tokens * group.page_tokens
            found = Found(min(len(stored[0]) * group.block_tokens, usable), stored)
            tokens = min(found.tokens, worth)
        else:
            found = self._finder.find(self._groups, request.block_hashes, stored, most)
            tokens = found.tokens
            if worth < tokens:
                shorter = self._finder.find(self._groups, request.block_hashes, stored, worth).tokens
                tokens = shorter if self._is_worth(keys, shorter, computed_tokens, ends) else 0
        unworthy = found.tokens - max(tokens, computed_tokens)
        return replace(found, tokens=tokens, unworthy_tokens=max(0, unworthy))

    def _stored(
        self, keys: list[list[bytes]], first: bool, computed_tokens: int, ends: float
    ) -> tuple[list[set[int]], int]:
        """Returns the indices of stored blocks by group: those of full attention bound the others.

        Also returns how many leading tokens are worth loading, as far as groups of full attention show.
        """
        stored = [set[int]() for _ in self._groups]
        tokens = max((len(keys[group.number]) * group.block_tokens for group in self._groups), default=0)
        worth, may_take = tokens, self._budget(computed_tokens, tokens)
        for group in self._groups:
            if group.full:
                asked = keys[group.number][: tokens // group.block_tokens]
                found = self._count(group, asked, ends, len(asked) if first else 0, may_take)
                first, tokens = False, min(tokens, found.blocks * group.block_tokens)
                worth = min(worth, found.worth_loading * group.block_tokens)
                stored[group.number] = set(range(found.blocks))
        others = [group for group in self._groups if not group.full]
        for group, indices in zip(others, self._contained(others, keys, tokens, ends), strict=True):
            stored[group.number] = indices
        return stored, worth

    def _budget(self, computed_tokens: int, tokens: int) -> Budget | None:
        """Returns what the blocks of these tokens may take to load; None if that is unknown."""
        compute_s = self._rate.seconds(computed_tokens, tokens)
        return budget(compute_s, self._groups, self._layouts, computed_tokens, tokens)

    def _is_worth(self, keys: list[list[bytes]], tokens: int, computed_tokens: int, ends: float) -> bool:
        """Returns whether a prefix of this length is worth loading as a whole."""
        may_take = self._budget(computed_tokens, tokens)
        for group in self._groups:
            if group.full:
                asked = keys[group.number][: tokens // group.block_tokens]
                if self._count(group, asked, ends, 0, may_take).worth_loading < len(asked):
                    return False
        return True

    def _count(
        self, group: Group, keys: list[bytes], ends: float, prompt: int, may_take: Budget | None
    ) -> StoredPrefix:
        """Returns how many leading blocks every worker can load, and how many of them are worth it.

        `prompt`: see `Namespace.lookup`. `may_take`: the time to load them; None: all are worth it.
        """
        found = StoredPrefix(len(keys), len(keys)) if self._namespaces else StoredPrefix()
        for shard, layouts in zip(self._namespaces, self._layouts, strict=True):
            # Every shard counts the prompt, so that the hit ratio is that of one shard.
            if found.blocks or prompt:
                left_s = ends - time.monotonic()
                if left_s <= 0:
                    return StoredPrefix()
                namespace, some = shard[group.number], keys[: found.blocks]
                if may_take is None:
                    more = StoredPrefix(*[namespace.lookup(some, left_s, prompt=prompt)] * 2)
                else:
                    block_s = may_take.block_s(layouts[group.number])
                    have = may_take.computed_tokens // group.block_tokens
                    load_s = self._client.deadline_s
                    more = namespace.worth_loading(some, block_s, load_s, have, left_s, prompt)
                found = StoredPrefix(more.blocks, min(found.worth_loading, more.worth_loading))
        return found

    def _contained(
        self, groups: list[Group], keys: list[list[bytes]], tokens: int, ends: float
    ) -> list[set[int]]:
        """Returns which blocks of the first `tokens` every worker can load: one question for all groups."""
        left_s = ends - time.monotonic()
        if not (groups and tokens and self._namespaces) or left_s <= 0:
            return [set() for _ in groups]
        asked = [keys[group.number][: tokens // group.block_tokens] for group in groups]
        masks = self._client.contains(
            [
                (shard[group.number], some)
                for shard in self._namespaces
                for group, some in zip(groups, asked, strict=True)
            ],
            left_s,
        )
        return [
            set(np.flatnonzero(np.logical_and.reduce(masks[i :: len(groups)])).tolist())
            for i in range(len(groups))
        ]
