"""Which blocks of a prompt the store has, for all groups of layers and all workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore import Client, Layout
from kvstore_vllm.groups import Found, Group, PrefixFinder, in_parts
from kvstore_vllm.identity import in_epoch
from kvstore_vllm.metrics import UNANSWERED, reason_of

LOOKUP_DEADLINE_S = 0.05
"""The deadline of a lookup, in seconds: the scheduler, and so every request, waits for it."""


class Lookup:
    """Asks for the blocks of prompts. Every lookup is a miss until the workers' layouts are known.

    `drops`: vLLM drops the last block of a hit.
    """

    def __init__(self, client: Client, groups: Sequence[Group], drops: bool = False) -> None:
        self._client = client
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

    def find(self, request: Any, salt: bytes, first: bool) -> Found:
        """Returns which blocks of a prompt all workers can load. `first`: counts the prompt."""
        keys = [group.keys(request.block_hashes, salt) for group in self._groups]
        stored = [set[int]() for _ in self._groups]
        why = self._ask(keys, first, stored)
        most = request.num_tokens - 1
        if self._all_usable:
            [group] = self._groups
            usable = most // group.page_tokens * group.page_tokens
            return Found(min(len(stored[0]) * group.block_tokens, usable), stored, why=why)
        return replace(self._finder.find(self._groups, request.block_hashes, stored, most), why=why)

    def _ask(self, keys: list[list[bytes]], first: bool, stored: list[set[int]]) -> str:
        """Fills `stored` with the indices of stored blocks by group.

        Returns why the daemon has not answered all of it; an empty string if it has.
        """
        try:
            self._fill(keys, first, stored, time.monotonic() + LOOKUP_DEADLINE_S)
        except UNANSWERED as error:
            return reason_of(error)
        return ""

    def _fill(self, keys: list[list[bytes]], first: bool, stored: list[set[int]], ends: float) -> None:
        """Fills `stored`: the blocks of full attention bound the others. Raises UNANSWERED."""
        tokens = max((len(keys[group.number]) * group.block_tokens for group in self._groups), default=0)
        for group in self._groups:
            if group.full:
                asked = keys[group.number][: tokens // group.block_tokens]
                count = self._count(group, asked, ends, len(asked) if first else 0)
                first, tokens = False, min(tokens, count * group.block_tokens)
                stored[group.number] = set(range(count))
        others = [group for group in self._groups if not group.full]
        for group, indices in zip(others, self._contained(others, keys, tokens, ends), strict=True):
            stored[group.number] = indices

    def _count(self, group: Group, keys: list[bytes], ends: float, prompt: int) -> int:
        """Returns how many leading blocks every worker can load. `prompt`: see `Namespace.lookup`."""
        count = len(keys) if self._namespaces else 0
        for shard in self._namespaces:
            # Every shard counts the prompt, so that the hit ratio is that of one shard.
            if count or prompt:
                count = shard[group.number].lookup(keys[:count], _left_s(ends), prompt=prompt)
        return count

    def _contained(
        self, groups: list[Group], keys: list[list[bytes]], tokens: int, ends: float
    ) -> list[set[int]]:
        """Returns which blocks of the first `tokens` every worker can load: one question for all groups."""
        if not (groups and tokens and self._namespaces):
            return [set() for _ in groups]
        asked = [keys[group.number][: tokens // group.block_tokens] for group in groups]
        masks = self._client.contains(
            [
                (shard[group.number], some)
                for shard in self._namespaces
                for group, some in zip(groups, asked, strict=True)
            ],
            _left_s(ends),
        )
        return [
            set(np.flatnonzero(np.logical_and.reduce(masks[i :: len(groups)])).tolist())
            for i in range(len(groups))
        ]


def _left_s(ends: float) -> float:
    """Returns the seconds until `ends`. Raises TimeoutError if there are none."""
    left_s = ends - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline of the lookup has passed")
    return left_s
