"""Writes slot files from stored blocks, and stores the blocks of slot files. Blocking: for threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import Client, ExceptionBarrier, Key, Layout, chain_keys
from kvstore_llamacpp import slot_file
from kvstore_llamacpp.slot_file import Tokens
from kvstore_llamacpp.state import Bytes, NewState, State, StateError, StateForm

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
"""The most bytes in transit between a file and the store."""

_PAUSE_S = 2.0
"""The time without stores after one that was denied: each would cost a copy of the whole slot."""

_AWAY_S = 5.0
"""The time without calls after a lookup that took its deadline."""


@dataclass(slots=True)
class Stored:
    """The blocks of a slot file: stored now, stored before, and not stored. `tokens`: those of the slot."""

    tokens: Tokens
    stored: int = 0
    present: int = 0
    denied: int = 0


class SlotStore:
    """The blocks of one namespace. Every failure is a miss, counted in `failures`. Thread-safe.

    Each method takes at most one deadline of the client for its calls to the daemon.
    """

    def __init__(self, client: Client, layout: Layout, form: StateForm) -> None:
        self.block_tokens = layout.block_tokens
        self.block_bytes = layout.block_bytes
        self._form = form
        self._deadline_s = client.deadline_s
        self._ns = client.namespace(layout)
        self._guard = ExceptionBarrier(_logger)
        self._paused_until_s = self._away_until_s = 0.0

    @property
    def failures(self) -> int:
        """The number of internal failures. Each counts as a miss."""
        return sum(self._guard.failures.values())

    @property
    def paused(self) -> bool:
        """Whether a store was denied a moment ago, or the daemon is away."""
        return self.away or time.monotonic() < self._paused_until_s

    @property
    def away(self) -> bool:
        """Whether the daemon has let a lookup wait for its deadline a moment ago."""
        return time.monotonic() < self._away_until_s

    def keys(self, tokens: Sequence[int] | Tokens) -> list[Key]:
        """Returns the keys of the whole blocks of a prompt."""
        return chain_keys(np.asarray(tokens).tolist(), self.block_tokens)

    def find(self, keys: Sequence[Key], prompt: int = 0) -> int:
        """Returns how many leading blocks are stored. `prompt`: see `Namespace.lookup`."""
        started_s = time.monotonic()
        with self._guard("lookup"):
            found = self._ns.lookup(keys, prompt=prompt)
            if not found and time.monotonic() - started_s >= self._deadline_s:
                self._away_until_s = time.monotonic() + _AWAY_S
            return found
        return 0

    def load(self, keys: Sequence[Key], tokens: Sequence[int], path: Path) -> int:
        """Writes the file of the leading tokens whose blocks arrive. Returns their number.

        If it is 0, there may be a part of a file.
        """
        with self._guard("load"):
            try:
                return self._load(keys, tokens, path)
            except OSError as error:
                _logger.warning("a prefix was not loaded: no room for its slot file: %s", error)
        return 0

    def _load(self, keys: Sequence[Key], tokens: Sequence[int], path: Path) -> int:
        ends_s = time.monotonic() + self._deadline_s
        state = self._new(tokens[: len(keys) * self.block_tokens], path)
        arrived = self._fetch(keys, state, ends_s)
        if 0 < arrived < len(keys):
            self._shorten(state, tokens, arrived, path)
        return arrived * self.block_tokens

    def _new(self, tokens: Sequence[int], path: Path) -> NewState:
        head = slot_file.head_of(tokens)
        return NewState(self._form, len(tokens), head, lambda nbytes: _new_file(path, nbytes))

    def _fetch(self, keys: Sequence[Key], state: NewState, ends_s: float) -> int:
        """Fills a state. Returns how many of its blocks have arrived."""
        step = self._piece_blocks()
        blocks = np.empty((min(step, len(keys)), self.block_bytes), np.uint8)
        for at in range(0, len(keys), step):
            piece = keys[at : at + step]
            n = self._ns.get(piece, blocks[: len(piece)], deadline_s=_left_s(ends_s), prompt=0)
            state.fill(self.block_tokens, at, blocks[:n])
            if n < len(piece):
                return at + n
        return len(keys)

    def _shorten(self, state: NewState, tokens: Sequence[int], arrived: int, path: Path) -> None:
        """Replaces a file by that of its first blocks."""
        _, longer = slot_file.read(state.raw, 0)
        other = path.with_suffix(".shorter")
        try:
            shorter = self._new(tokens[: arrived * self.block_tokens], other)
            shorter.fill(self.block_tokens, 0, longer.blocks(self.block_tokens, 0, arrived))
            other.replace(path)
        finally:
            other.unlink(missing_ok=True)

    def save(self, path: Path, slot: int) -> Stored:
        """Stores the blocks of a slot's file that are not stored yet. A file that is not served has none."""
        stored = Stored(np.zeros(0, np.int32))
        with self._guard("store"):
            tokens, state = slot_file.read(np.memmap(path, np.uint8, "r"), slot)
            if state.form != self._form:
                raise StateError("a slot file has another form than at the start")
            stored.tokens = np.array(tokens)  # the file is removed
            self._put_all(stored, state)
        if stored.denied:
            self._paused_until_s = time.monotonic() + _PAUSE_S
        return stored

    def _put_all(self, stored: Stored, state: State) -> None:
        ends_s, size = time.monotonic() + self._deadline_s, self.block_tokens
        keys = self.keys(stored.tokens)
        at = stored.present = self._ns.lookup(keys, _left_s(ends_s), prompt=0)
        while at < len(keys) and not stored.denied:
            piece = keys[at : at + self._piece_blocks()]
            blocks = state.blocks(size, at, len(piece))
            said = stored.tokens[at * size : (at + len(piece)) * size].tolist()
            result = self._ns.put(piece, blocks, keys[at - 1] if at else None, _left_s(ends_s), said)
            stored.stored += result.stored
            stored.present += result.present
            stored.denied += result.denied
            at += len(piece)
        stored.denied += len(keys) - at

    def _piece_blocks(self) -> int:
        return max(1, _PIECE_BYTES // self.block_bytes)


def _new_file(path: Path, nbytes: int) -> Bytes:
    """Returns the memory of a new file. Raises OSError if the file system has no room for it."""
    with path.open("xb") as file:
        # A write to a page without room would be SIGBUS.
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return np.memmap(path, np.uint8, "r+", shape=(nbytes,))


def _left_s(ends_s: float) -> float:
    # A deadline of 0 would be misuse.
    return max(0.001, ends_s - time.monotonic())
