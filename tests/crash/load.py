"""Clients that put, read, hold and invalidate chains until their daemon is gone, and compare every byte."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore import Client, Layout, Lease
from kvstore.client.sync import Namespace
from kvstore.errors import DeniedError, UnavailableError
from tests.crash.book import NEVER, Book
from tests.daemons import names, payload, room_for

THREADS = 3
SIZES = (16 << 10, 80 << 10, 300 << 10)
CHAINS = 24
LONGEST = 8
LAYOUTS = {size: Layout(model="crash", block_bytes=size) for size in SIZES}
"""Equal in every process, so that what one run stored the next one finds."""


@dataclass(slots=True)
class Tally:
    """What happened, summed over all threads and runs, and every violation in words."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Worker:
    """One thread of load, writer of `CHAINS` chains of its own, reader of everybody's."""

    def __init__(self, number: int, seed: str, book: Book, tally: Tally) -> None:
        self.answered: set[bytes] = set()
        self.chains = [names(LONGEST, f"{seed}/{number}/{i}") for i in range(CHAINS)]
        self.others: Sequence[Worker] = ()
        self._dice = random.Random(f"{seed}/{number}")
        self._sizes = [self._dice.choice(SIZES) for _ in self.chains]
        self._book = book
        self._tally = tally
        self._held: list[tuple[list[bytes], int, list[int], Lease]] = []

    def fill(self, client: Client) -> None:
        """Puts all chains whole."""
        for size, keys in zip(self._sizes, self.chains, strict=True):
            client.namespace(LAYOUTS[size]).put(keys, [self._book.put(key, size) for key in keys])

    def run(self, client: Client, killed: threading.Event) -> None:
        """Works until the daemon does not answer. `killed` is set before it is killed on purpose."""
        spaces = {size: client.namespace(layout) for size, layout in LAYOUTS.items()}
        steps = (self._put, self._get, self._hold, self._let_go, self._abandon, self._invalidate)
        self._held.clear()
        while not killed.is_set():
            step = self._dice.choices(steps, (10, 5, 2, 2, 1, 2))[0]
            try:
                step(spaces)
            except DeniedError:
                self._tally.counts["denied"] += 1
            except UnavailableError as error:
                if not killed.is_set():
                    self._tally.violations.append(f"a daemon that nobody killed: {error}")
                break
        self._let_all_go()

    def _pick(self, owner: Worker) -> tuple[int, list[bytes]]:
        """The size of a chain's blocks and its first few keys."""
        number = self._dice.randrange(CHAINS)
        return owner._sizes[number], owner.chains[number][: self._dice.randint(1, LONGEST)]

    def _put(self, spaces: dict[int, Namespace]) -> None:
        size, keys = self._pick(self)
        result = spaces[size].put(keys, [self._book.put(key, size) for key in keys])
        self._tally.counts["put"] += result.stored
        if not result.denied:
            self.answered.update(keys)

    def _get(self, spaces: dict[int, Namespace]) -> None:
        size, keys = self._pick(self._dice.choice(self.others))
        floors = [self._book.floor(key) for key in keys]
        out = room_for(len(keys), size)
        n = spaces[size].get(keys, out)
        self._compare(keys[:n], floors, out)

    def _hold(self, spaces: dict[int, Namespace]) -> None:
        size, keys = self._pick(self._dice.choice(self.others))
        floors = [self._book.floor(key) for key in keys]
        self._held.append((keys, size, floors, spaces[size].acquire(keys)))
        if len(self._held) > 4:
            self._let_go(spaces)

    def _let_go(self, _: dict[int, Namespace]) -> None:
        if self._held:
            keys, size, floors, lease = self._held.pop(self._dice.randrange(len(self._held)))
            with lease:
                # Also after the daemon has ended: what is copied then is right, or does not count.
                out = room_for(len(keys), size)
                n = lease.copy_into(out)
                self._compare(keys[:n], floors, out)

    def _let_all_go(self) -> None:
        while self._held:
            self._let_go({})

    def _abandon(self, spaces: dict[int, Namespace]) -> None:
        size, keys = self._pick(self)
        with spaces[size].reserve(keys) as room:
            for wanted, view in zip(room.wanted, room.blocks, strict=True):
                view[:] = payload(keys[wanted], size, NEVER)

    def _invalidate(self, spaces: dict[int, Namespace]) -> None:
        size, keys = self._pick(self)
        keys = keys[self._dice.randrange(len(keys)) :]
        for key in keys:
            self._book.invalidate(key)
        self.answered.difference_update(keys)
        self._tally.counts["invalidated"] += spaces[size].invalidate(keys)
        for key in keys:
            self._book.invalidated(key)

    def _compare(self, keys: list[bytes], floors: list[int], out: np.ndarray) -> None:
        for key, floor, row in zip(keys, floors, out, strict=False):
            self._tally.counts["compared"] += 1
            wrong = self._book.wrong(key, floor, row.data)
            if wrong:
                self._tally.counts["wrong"] += 1
                self._tally.violations.append(f"under load: {wrong}")
