"""Moves blocks between a namespace and states, in pieces of bounded size; common prefixes of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore import Key, Namespace, PutResult
from kvstore_llamacpp.state import NewState, State

_PIECE_BYTES = 64 << 20
"""The most bytes in transit between a state and the store."""


def load_blocks(ns: Namespace, keys: Sequence[Key], state: NewState, left_s: Callable[[], float]) -> int:
    """Fills a state. Returns how many of its blocks have arrived. `left_s`: seconds for the next call."""
    size, step = ns.layout.block_tokens, _piece_blocks(ns)
    blocks = np.empty((min(step, len(keys)), ns.layout.block_bytes), np.uint8)
    for at in range(0, len(keys), step):
        piece = keys[at : at + step]
        n = ns.get(piece, blocks[: len(piece)], deadline_s=left_s(), prompt=0)
        state.fill(size, at, blocks[:n])
        if n < len(piece):
            return at + n
    return len(keys)


def store_blocks(
    ns: Namespace,
    keys: Sequence[Key],
    at: int,
    state: State,
    tokens: list[int] | None,
    left_s: Callable[[], float],
) -> PutResult:
    """Stores the blocks of a state from `at` on, up to a denied piece. Returns the counts of all of them.

    `tokens`: those of all blocks, for KV events; None: no events. `left_s`: seconds for the next call.
    """
    size, step, total = ns.layout.block_tokens, _piece_blocks(ns), PutResult()
    while at < len(keys) and not total.denied:
        piece = keys[at : at + step]
        blocks = state.blocks(size, at, len(piece))
        said = None if tokens is None else tokens[at * size : (at + len(piece)) * size]
        result = ns.put(piece, blocks, keys[at - 1] if at else None, left_s(), said)
        total.stored += result.stored
        total.present += result.present
        total.denied += result.denied
        total.why = result.why
        at += len(piece)
    total.denied += len(keys) - at
    return total


def common_prefix(held: Any, tokens: Any) -> int:
    """Returns the number of leading tokens that two sequences share."""
    n = min(len(held), len(tokens))
    differ = np.flatnonzero(np.asarray(held[:n]) != np.asarray(tokens[:n]))
    return int(differ[0]) if len(differ) else n


def _piece_blocks(ns: Namespace) -> int:
    return max(1, _PIECE_BYTES // ns.layout.block_bytes)
