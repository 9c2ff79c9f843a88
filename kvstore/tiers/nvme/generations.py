"""Generations: decides which devices have missed deletions, from what each has on record. Pure.

A generation is a set of devices that deletions are made durable on. It has a random name. A device that shows
the name as *prepared* was present, and no deletion was answered in this generation by then. *Committed* means
that all of its devices show the name, and that deletions may have been answered. Hence:

- A device that has not seen a name that another device shows as committed was absent: it missed deletions.
- Of two devices, one descends from the other if it has seen the other's newest committed name. It has seen
  all older ones too, because each name is recorded with the whole history. The older one forgets its blocks.
- Two devices that have not seen each other's newest name have diverged: each has missed deletions, and no
  record says of which blocks. Both forget all blocks, because each block of either may be a deleted one. A
  device that descends from both keeps its blocks.
- A device that has forgotten its blocks has missed nothing, so it takes over the history. If no device keeps
  its blocks, the history gets a new name: a device that is away and descends from one of them forgets too.

A history is bounded. A device that returns after more than `MOST_COMMITTED` generations is not recognized as
the older one: all devices count as diverged. Nor is one that alone has committed a name of which the others
have lost sight beyond `MOST_PREPARED`. Devices of different nodes never had a name in common, and count as
diverged. All of this loses blocks, and never restores one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAME_BYTES = 16
MOST_COMMITTED = 1024
MOST_PREPARED = 16

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class History:
    """Names of the generations that a device has seen, oldest first. Committed ones precede prepared ones."""

    committed: tuple[bytes, ...] = ()
    prepared: tuple[bytes, ...] = ()

    @property
    def names(self) -> tuple[bytes, ...]:
        """All names, oldest first."""
        return self.committed + self.prepared

    def prepare(self, name: bytes) -> History:
        """Returns the history with one more prepared name."""
        return _history(self.committed, (*self.prepared, name))

    def commit(self) -> History:
        """Returns the history with all prepared names committed."""
        return _history(self.names, ())

    def pack(self) -> bytes:
        """Returns the value of the record: number of committed names (u64), names."""
        return len(self.committed).to_bytes(_COUNT_BYTES, "little") + b"".join(self.names)


@dataclass(frozen=True, slots=True)
class Resolution:
    """What devices start with. `current` has for each whether it keeps its blocks; `history` is for all."""

    history: History
    current: tuple[bool, ...]


def resolve(histories: Sequence[History], name: bytes) -> Resolution:
    """Decides which of the devices with these histories keep their blocks. `name` is a new one."""
    newest = {history.committed[-1] for history in histories if history.committed}
    current = tuple(newest <= set(history.names) for history in histories)
    if not any(current):
        everything = dict.fromkeys(each for history in histories for each in history.names)
        return Resolution(_history((*everything, name), ()), current)
    names = histories[current.index(True)].names
    committed = names[: max((names.index(each) + 1 for each in newest), default=0)]
    prepared = dict.fromkeys(each for history in histories for each in history.prepared)
    return Resolution(_history(committed, tuple(each for each in prepared if each not in committed)), current)


def unpack(value: bytes) -> History:
    """Returns the history in a record. ValueError if it is damaged."""
    committed = int.from_bytes(value[:_COUNT_BYTES], "little")
    names = tuple(value[at : at + NAME_BYTES] for at in range(_COUNT_BYTES, len(value), NAME_BYTES))
    if (len(value) - _COUNT_BYTES) % NAME_BYTES or committed > len(names):
        raise ValueError(f"a history of generations with {len(value)} bytes makes no sense")
    return History(names[:committed], names[committed:])


def from_number(generation: int) -> History:
    """Returns the history of a folder of format 2 or 3, which has a number: it has seen all lower numbers."""
    first = max(1, generation - MOST_COMMITTED + 1)
    return History(tuple(number.to_bytes(NAME_BYTES, "big") for number in range(first, generation + 1)))


def _history(committed: tuple[bytes, ...], prepared: tuple[bytes, ...]) -> History:
    return History(committed[-MOST_COMMITTED:], prepared[-MOST_PREPARED:])
