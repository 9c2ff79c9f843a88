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
from kvstore_llamacpp.blocks import load_blocks, store_blocks
from kvstore_llamacpp.slot_file import Tokens
from kvstore_llamacpp.state import Bytes, NewState, State, StateError, StateForm

_logger = logging.getLogger(__name__)

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
        arrived = load_blocks(self._ns, keys, state, lambda: _left_s(ends_s))
        if 0 < arrived < len(keys):
            self._shorten(state, tokens, arrived, path)
        return arrived * self.block_tokens

    def _new(self, tokens: Sequence[int], path: Path) -> NewState:
        head = slot_file.head_of(tokens)
        return NewState(self._form, len(tokens), head, lambda nbytes: _new_file(path, nbytes))

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
        ends_s, keys = time.monotonic() + self._deadline_s, self.keys(stored.tokens)
        at = self._ns.lookup(keys, _left_s(ends_s), prompt=0)
        result = store_blocks(self._ns, keys, at, state, stored.tokens.tolist(), lambda: _left_s(ends_s))
        stored.stored, stored.present, stored.denied = result.stored, at + result.present, result.denied


def _new_file(path: Path, nbytes: int) -> Bytes:
    """Returns the memory of a new file. Raises OSError if the file system has no room for it."""
    with path.open("xb") as file:
        # A write to a page without room would be SIGBUS.
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return np.memmap(path, np.uint8, "r+", shape=(nbytes,))


def _left_s(ends_s: float) -> float:
    # A deadline of 0 would be misuse.
    return max(0.001, ends_s - time.monotonic())
