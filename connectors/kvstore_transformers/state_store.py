"""Stored states: which prefixes of a prompt have one, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore import Key, Namespace, PutResult
from kvstore_transformers.states import State, StateShape


class StateStore:
    """The states of one model in an independent namespace, by the key of the block before them."""

    def __init__(self, ns: Namespace, shape: StateShape) -> None:
        self._ns, self._shape = ns, shape

    def latest(self, keys: Sequence[Key], deadline_s: float) -> tuple[int, State | None]:
        """Returns the blocks before the last stored state of a chain, and the state; 0, None without one."""
        # The first piece stands for the state: `get` has the last word.
        stored = self._ns.contains([self._shape.keys(key)[0] for key in keys], deadline_s) if keys else ()
        for blocks in range(len(keys), 0, -1):
            if stored[blocks - 1]:
                pieces = self._shape.keys(keys[blocks - 1])
                state = np.empty((len(pieces), self._shape.block_bytes), np.uint8)
                if self._ns.get(pieces, state, deadline_s=deadline_s, prompt=0) == len(pieces):
                    return blocks, state
        return 0, None

    def put(self, key: Key, state: State, deadline_s: float) -> PutResult:
        """Stores the state behind the block `key`."""
        return self._ns.put(self._shape.keys(key), state, None, deadline_s)
