"""Replays prompts of hybrid models: sliding windows or states of recurrent layers beside full attention.

A prompt can be resumed where all groups of layers have their blocks: full attention all before the position,
the others those that it reaches back to. These are stored where a prompt ends, and where it parts from stored
prompts (a junction), as the vLLM connector does.

Not covered: the ends of answers, whose blocks the traces do not name; groups with blocks of different sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.errors import MisuseError
from kvstore.lab.capacity import Capacities
from kvstore.lab.simulated_node import CHAIN, SimulatedNode
from kvstore.lab.workload import Workload


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The `groups` of layers beside full attention. Blocks of all groups have the same number of bytes.

    `window_tokens`: the tokens that a position of a group reaches back to. 0: one state of recurrent layers.
    """

    groups: int
    window_tokens: int = 0

    def reach(self, block_tokens: int) -> int:
        """Returns how many blocks before a position each group needs there."""
        return max(1, -(-(self.window_tokens - 1) // block_tokens))


MODELS = {"gpt-oss": Hybrid(1, 128), "gemma-3": Hybrid(5, 1024), "qwen3-next": Hybrid(3)}
"""Models by name. vLLM gives all groups of a model as many layers, and so blocks of the same size."""


def parse_model(text: str) -> Hybrid:
    """Parses a name of `MODELS`, `3xstate`, or `5x1024`: groups and window tokens. Raises MisuseError."""
    if text in MODELS:
        return MODELS[text]
    match = re.fullmatch(r"([1-9][0-9]?)x(state|[1-9][0-9]{0,6})", text)
    if match is None:
        hint = f"one of {', '.join(MODELS)}, or groups and window tokens such as 5x1024, or 3xstate"
        raise MisuseError(f"no hybrid model {text!r:.80}", hint)
    return Hybrid(int(match[1]), 0 if match[2] == "state" else int(match[2]))


def resumable(stored: npt.NDArray[np.bool_], reach: int) -> int:
    """Returns the longest prefix whose last `reach` blocks (all, if it has fewer) are stored."""
    at = np.arange(len(stored))
    missing = np.maximum.accumulate(np.where(stored, -1, at))
    good = np.flatnonzero(at - missing >= np.minimum(reach, at + 1))
    return int(good[-1]) + 1 if len(good) else 0


def best_hits(workload: Workload, model: Hybrid) -> int:
    """Returns the blocks that a node with room for everything serves."""
    reach, hits = model.reach(workload.block_tokens), 0
    chain, others = np.zeros((2, workload.unique_blocks), np.bool_)
    starts = workload.starts.tolist()
    for first, end in pairwise(starts):
        blocks = workload.blocks[first:end]
        known = chain[blocks]
        found = len(blocks) if known.all() else int(known.argmin())
        hits += resumable(others[blocks[:found]], reach)
        chain[blocks] = True
        for position in (found, len(blocks)):
            others[blocks[max(0, position - reach) : position]] = True
    return hits


class HybridNode(SimulatedNode):
    """A node that serves prompts of a hybrid model. `hits` counts the blocks of full attention."""

    def __init__(
        self,
        capacities: Capacities,
        block_bytes: int,
        model: Hybrid,
        block_tokens: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(capacities, block_bytes, options)
        self._reach = model.reach(block_tokens)
        self._groups = range(CHAIN + 1, CHAIN + 1 + model.groups)
        for group in self._groups:
            self._ask(ev.OpenNamespace(0, group, block_bytes, independent=True))

    def prompt(self, keys: Keys, now: float) -> int:
        self.pass_time(now)
        found = self._lookup(keys)
        start = resumable(self._stored(keys, found), self._reach)
        served = self._load(keys, start)
        if found < keys.n:
            self._put(CHAIN, keys, found)
        for position in sorted({found, keys.n} - {0, start}):
            tail = keys.take(max(0, position - self._reach), position)
            for group in self._groups:
                # Blocks of a chain that was refused, or evicted for these, would be refused.
                if self.placement.view.stored(CHAIN, tail.take(tail.n - 1, tail.n)):
                    self._put(group, tail, 0, tail[tail.n - 1])
        return served

    def _stored(self, keys: Keys, n: int) -> npt.NDArray[np.bool_]:
        """Returns which of the first n blocks all groups have."""
        stored = np.ones(n, np.bool_)
        batch = self.placement.view.limits.batch_keys
        for group in self._groups:
            for at in range(0, n, batch):
                part = keys.take(at, min(at + batch, n))
                stored[at : at + part.n] &= self._ask(ev.Contains(0, group, part)).mask
        return stored

    def _load(self, keys: Keys, start: int) -> int:
        """Reads the blocks of a prefix. Returns its length, 0 if a block could not be read."""
        tail = keys.take(max(0, start - self._reach), start)
        if not start:
            return 0
        before = self.hits.copy()
        whole = self._get(CHAIN, keys.take(0, start)) == start
        hits = self.hits.copy()
        for group in self._groups:
            whole &= self._get(group, tail) == tail.n
        self.hits[:] = hits if whole else before
        return start if whole else 0
