"""What may come back under a key: the oracle of the crash tests.

A payload follows from key and salt. A key that an invalidation was sent for is put again with the next salt,
so that bytes from before can be told from those after. Each key is written by one thread; any may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.daemons import payload

NEVER = 255
"""A salt of bytes that are written into rooms and never committed."""


@dataclass(slots=True)
class Entry:
    """One key. Salts from `floor`, what an answered invalidation has left, to `top`, what was ever sent."""

    block_bytes: int
    floor: int = 0
    top: int = -1
    invalidating: bool = False


class Book:
    """All keys that were ever put."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}

    def put(self, key: bytes, block_bytes: int) -> bytes:
        """The bytes to put now."""
        entry = self.entries.setdefault(key, Entry(block_bytes))
        if entry.top < 0 or entry.invalidating:
            entry.top += 1
            assert entry.top < NEVER, "too many salts"
            entry.invalidating = False
        return payload(key, block_bytes, entry.top)

    def invalidate(self, key: bytes) -> None:
        """An invalidation is about to be sent."""
        if key in self.entries:
            self.entries[key].invalidating = True

    def invalidated(self, key: bytes) -> None:
        """It was answered: what was put before must never be seen again."""
        if key in self.entries:
            self.entries[key].floor = self.entries[key].top + 1

    def floor(self, key: bytes) -> int:
        """The lowest salt that a read which starts now may bring."""
        return self.entries[key].floor if key in self.entries else 0

    def wrong(self, key: bytes, floor: int, found: bytes | memoryview) -> str:
        """What is wrong with bytes that a read brought which started at `floor`; empty if nothing is."""
        entry = self.entries.get(key)
        name = key.hex()[:12]
        if entry is None:
            return f"{name}: bytes under a key that was never put"
        for salt in [*range(entry.top, -1, -1), NEVER]:
            if found == payload(key, entry.block_bytes, salt):
                if floor <= salt <= entry.top:
                    return ""
                return f"{name}: bytes of salt {salt}, possible were {floor} to {entry.top}"
        return f"{name}: bytes that were never put"
