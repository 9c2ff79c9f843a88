"""What a get may answer: the bytes of a put that may have been stored, and was not invalidated since.

Times are numbers that count up, one a call or answer, so that no two are the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

Who = tuple[int, bytes]
"""(number of the layout, key)."""


@lru_cache(4096)
def payload(space: int, key: bytes, salt: int, nbytes: int) -> bytes:
    """The bytes that a put with this salt stores under this key."""
    return bytes(blake3(b"%d/%d/" % (space, salt) + key).digest(length=nbytes))


@dataclass
class _Put:
    salt: int
    ended: int = 0
    removed: int = 0


class Oracle:
    """All puts of a run."""

    def __init__(self) -> None:
        self._now = 0
        self._puts: defaultdict[Who, list[_Put]] = defaultdict(list)

    def tick(self) -> int:
        """The time; it is another one from now on."""
        self._now += 1
        return self._now

    def put_begins(self, space: int, keys: list[bytes], salt: int) -> list[_Put]:
        puts = [_Put(salt) for _ in keys]
        for key, put in zip(keys, puts, strict=True):
            self._puts[space, key].append(put)
        return puts

    def put_ends(self, puts: list[_Put]) -> None:
        now = self.tick()
        for put in puts:
            put.ended = now

    def invalidated(self, space: int, keys: list[bytes], began: int) -> None:
        """An invalidate that began then has been answered."""
        now = self.tick()
        for key in keys:
            for put in self._puts[space, key]:
                if put.ended and put.ended < began and not put.removed:
                    put.removed = now

    def may_be(self, space: int, key: bytes, data: bytes, began: int) -> bool:
        """Whether a get that began then, and ends now, may answer these bytes."""
        return any(
            data == payload(space, key, put.salt, len(data))
            for put in self._puts[space, key]
            if not put.removed or put.removed > began
        )

    def is_forgotten(self, space: int, key: bytes, data: bytes) -> bool:
        """Whether these are the bytes of a put that was invalidated, which has been answered."""
        return any(
            data == payload(space, key, put.salt, len(data)) for put in self._puts[space, key] if put.removed
        )
