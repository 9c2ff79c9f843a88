"""The groups of an engine's layers, and the longest prefix that the store has for all of them.

A group has one block table for all its layers. A prefix needs all its blocks of full attention, but only the
last of its blocks of a sliding window or of an attention chunk, and one state of a recurrent layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class Group:
    """A group of layers with one block table.

    `pages_per_key`: pages (vLLM's blocks) of a stored block. `block_tokens`: tokens of a stored block.
    `hashes_per_key`: vLLM's block hashes of a stored block. `window_blocks`: the blocks before a token that
    its sliding window reaches, and one more where vLLM drops the last block of a hit. `chunk_tokens`: the
    tokens of an attention chunk. `state`: a block is the state of recurrent layers at its end. None of these:
    full attention.
    """

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    pages_per_key: int
    hashes_per_key: int
    window_blocks: int = 0
    chunk_tokens: int = 0
    state: bool = False

    @property
    def full(self) -> bool:
        """Whether a prefix needs all blocks from its start on."""
        return not (self.window_blocks or self.chunk_tokens or self.state)

    def first_needed(self, end: int) -> int:
        """Returns the index of the first block that a prefix with `end` tokens needs."""
        if self.state:
            return max(0, end // self.block_tokens - 1)
        if self.chunk_tokens:
            return end // self.chunk_tokens * self.chunk_tokens // self.block_tokens
        return max(0, end // self.block_tokens - self.window_blocks) if self.window_blocks else 0

    def needed(self, end: int) -> range:
        """Returns the indices of the blocks that a prefix with `end` tokens needs."""
        return range(self.first_needed(end), end // self.block_tokens)

    @property
    def page_tokens(self) -> int:
        """The tokens of one page."""
        return self.block_tokens // self.pages_per_key

    def keys(self, hashes: Sequence[bytes], salt: bytes = b"") -> list[bytes]:
        """Returns the keys of a request's full blocks: vLLM's hash of the last tokens of each, and `salt`."""
        return [key + salt for key in hashes[self.hashes_per_key - 1 :: self.hashes_per_key]]


def groups_of(kv_cache_config: Any, pages_per_key: int = 1, drops: bool = False) -> list[Group]:
    """Returns the groups of an engine. `pages_per_key` is 1 if there are several groups or windows.

    `drops`: vLLM drops the last block of a hit, in the groups with a draft, or in all if none is marked.
    """
    specs = [each.kv_cache_spec for each in kv_cache_config.kv_cache_groups]
    # vLLM sets it for engines with several block sizes only.
    hash_tokens = kv_cache_config.hash_block_size or specs[0].block_size
    marked = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    return [
        Group(
            number,
            tuple(group.layer_names),
            group.kv_cache_spec.block_size * pages_per_key,
            pages_per_key,
            group.kv_cache_spec.block_size * pages_per_key // hash_tokens,
            **_reach(group.kv_cache_spec, drops and (group.is_eagle_group or not marked)),
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def in_parts(groups: Sequence[Group]) -> bool:
    """Returns whether a request can be resumed behind each leading block: one group of full attention."""
    return len(groups) == 1 and groups[0].full


def prompt_ends(tokens: int, alignment: int) -> set[int]:
    """Returns where a later prompt resumes behind a prompt of `tokens` tokens; 0: nowhere.

    These are the last multiples of `alignment` in the prompt, for a longer prompt, and before its last token,
    for the same prompt, whose last token is computed again.
    """
    return {tokens // alignment * alignment, (tokens - 1) // alignment * alignment}


def stored_blocks(groups: Sequence[Group], tokens: int, alignment: int) -> list[int]:
    """Returns the number of blocks by group that are stored of a prompt which shares nothing with others."""
    ends = prompt_ends(tokens, alignment) - {0}
    return [
        tokens // group.block_tokens if group.full else len(set().union(*(group.needed(end) for end in ends)))
        for group in groups
    ]


def _reach(spec: Any, drops: bool) -> dict[str, Any]:
    if isinstance(spec, MambaSpec):
        return {"state": True}
    if isinstance(spec, SlidingWindowSpec):
        return {"window_blocks": -(-(spec.sliding_window - 1) // spec.block_size) + drops}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return {"chunk_tokens": spec.attention_chunk_size}
    return {}


@dataclass(frozen=True, slots=True)
class Found:
    """The stored blocks of a prompt.

    `tokens`: the length of the longest prefix that all groups have and that is worth loading. `stored`: the
    indices of stored blocks by group. `junction`: the end of the longest prefix that some group has; another
    prompt parts from this one there, or later. `unworthy_tokens`: those behind `tokens` that all groups have,
    but that load slower than they are computed. `why`: the reason if the daemon has not answered; its blocks
    count as not stored.
    """

    tokens: int
    stored: list[set[int]]
    junction: int = 0
    unworthy_tokens: int = 0
    why: str = ""


class PrefixFinder:
    """Finds prefixes by vLLM's own rules for windows, alignment and speculative decoding.

    It is a copy of vLLM's coordinator of block tables, whose block pool is the set of stored blocks.
    """

    def __init__(self, coordinator: Any) -> None:
        self._pool = _StoredBlocks(coordinator.block_pool)
        self._coordinator = copy.copy(coordinator)
        self._coordinator.block_pool = self._pool
        # A stored block is whole: prefixes end where blocks of all groups end.
        self._coordinator.enable_partial_hash_hits = False
        managers = [copy.copy(each) for each in coordinator.single_type_managers]
        for each in managers:
            each.block_pool = self._pool
        self._coordinator.single_type_managers = tuple(managers)

    def find(
        self, groups: Sequence[Group], hashes: Sequence[bytes], stored: list[set[int]], most: int
    ) -> Found:
        """Returns what is found of a prompt with these block hashes; of its first `most` tokens."""
        self._pool.stored = {
            (group.number, hashes[(index + 1) * group.hashes_per_key - 1])
            for group, indices in zip(groups, stored, strict=True)
            for index in indices
        }
        _, tokens, more = self._coordinator.find_longest_cache_hit(hashes, most)
        return Found(tokens, stored, tokens + more if more else 0)


class _StoredBlocks:
    """What the search for a prefix reads of vLLM's BlockPool."""

    def __init__(self, pool: Any) -> None:
        self.hash_block_size = pool.hash_block_size
        self.null_block = pool.null_block
        self.stored: set[tuple[int, bytes]] = set()

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[Any] | None:
        """Returns a block for each group if all of them have it; otherwise None."""
        if all((number, block_hash) in self.stored for number in group_ids):
            return [_STORED] * len(group_ids)
        return None


_STORED = object()
"""Stands for a stored block in lists that only their length matters of."""
