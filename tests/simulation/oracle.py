"""What a get may answer: the bytes of a put that may have been stored, and was not invalidated since.

Times are numbers that count up, one a call or answer, so that no two are the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

Who = tuple[int, bytes]
"""(number of the namespace in `spaces`, key)."""


@lru_cache(4096)
def payload(space: int, key: bytes, salt: int, nbytes: int) -> bytes:
    """The bytes that a put with this salt stores under this key."""
    return bytes(blake3(b"%d/%d/" % (space, salt) + key).digest(length=nbytes))


@dataclass
class _Put:
    salt: int
    ended: int = 0
    removed: int = 0
    over_at: float = math.inf


@dataclass
class _Grant:
    """A publication, or with `given` False that it is taken back. `ended`: it was answered."""

    given: bool
    began: int
    ended: float = math.inf


class Oracle:
    """All puts of a run."""

    def __init__(self) -> None:
        self._now = 0
        self._without_witness = False
        self._without_witness_until = 0
        self._puts: defaultdict[Who, list[_Put]] = defaultdict(list)
        self._grants: defaultdict[int, list[_Grant]] = defaultdict(list)

    def tick(self) -> int:
        """The time; it is another one from now on."""
        self._now += 1
        return self._now

    def starts(self, without_witness: bool) -> None:
        """A daemon starts. `without_witness`: what was deleted may be back until the next one starts.

        No device that is there has been there when it was deleted.
        """
        if self._without_witness:
            self._without_witness_until = self.tick()
        self._without_witness = without_witness

    def _may_be_back(self, began: int) -> bool:
        return self._without_witness or began < self._without_witness_until

    def put_begins(self, space: int, keys: list[bytes], salt: int) -> list[_Put]:
        puts = [_Put(salt) for _ in keys]
        for key, put in zip(keys, puts, strict=True):
            self._puts[space, key].append(put)
        return puts

    def put_ends(self, puts: list[_Put], over_at: float = math.inf) -> None:
        """It is answered, or given up; `over_at`: from then on (simulated time) its blocks are misses."""
        now = self.tick()
        for put in puts:
            put.ended, put.over_at = now, over_at

    def forgotten(self, spaces: Collection[int], began: int) -> None:
        """That all of these namespaces are forgotten, which began then, has been answered."""
        for space in spaces:
            self.invalidated(space, [key for number, key in self._puts if number == space], began)

    def publishes(self, space: int, given: bool) -> _Grant:
        """A namespace is about to be published to the other tenant, or to be taken back."""
        grant = _Grant(given, self.tick())
        self._grants[space].append(grant)
        return grant

    def may_read(self, space: int, began: int) -> bool:
        """Whether the other tenant's get that began then, and ends now, may have been let in."""
        given = [g for g in self._grants[space] if g.given]
        taken = [g for g in self._grants[space] if not g.given and g.ended < began]
        revoked = any(all(g.ended < t.began for g in given) for t in taken)
        return bool(given) and (not revoked or self._may_be_back(began))

    def invalidated(self, space: int, keys: list[bytes], began: int) -> None:
        """An invalidate that began then has been answered."""
        now = self.tick()
        for key in keys:
            for put in self._puts[space, key]:
                if put.ended and put.ended < began and not put.removed:
                    put.removed = now

    def may_be(self, space: int, key: bytes, data: bytes, began: int, at: float = -math.inf) -> bool:
        """Whether a get that began then (`at` in simulated time), and ends now, may answer these bytes."""
        return any(
            data == payload(space, key, put.salt, len(data))
            for put in self._puts[space, key]
            if (not put.removed or put.removed > began or self._may_be_back(began)) and put.over_at >= at
        )

    def may_be_stored(self, space: int, key: bytes, began: int, at: float) -> bool:
        """Whether a question that began then (`at` in simulated time) may be told that this key is stored."""
        return any(
            (not put.removed or put.removed > began or self._may_be_back(began)) and put.over_at >= at
            for put in self._puts[space, key]
        )

    def is_forgotten(self, space: int, key: bytes, data: bytes) -> bool:
        """Whether these are the bytes of a put that was invalidated, which has been answered."""
        return any(
            data == payload(space, key, put.salt, len(data)) for put in self._puts[space, key] if put.removed
        )
