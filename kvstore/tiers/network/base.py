"""The protocol between the daemon and systems that hold blocks for many nodes.

Other parties write and delete there, so an object may be cut, swapped or foreign. An object counts only if
its header and checksum prove it (`objects`). All others are misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore import arena
from kvstore.errors import TierError, printable

_MOST_CHARS = 400


class NetworkError(TierError):
    """A backend as a whole cannot be used. `fatal`: until its configuration or the system is changed.

    `message` may quote another machine. It is cut to 400 characters, and control characters are escaped.
    """

    def __init__(self, message: str, hint: str = "", fatal: bool = False) -> None:
        super().__init__(f"{printable(message[:_MOST_CHARS]):.{_MOST_CHARS}}", hint)
        self.fatal = fatal


class Outcome(IntEnum):
    """The result for one object of a call."""

    OK = 0
    """Done. A read object is verified."""
    MISSING = 1
    """There is no such object."""
    TORN = 2
    """The object is corrupt: foreign, cut short, altered, or another object."""
    FULL = 3
    """The backend has no space, or does not allow writes."""
    FAILED = 4
    """The backend did not answer in time, or answered with an error."""


class Name(NamedTuple):
    """The name of an object: 16 bytes for its namespace, and its key.

    The 16 bytes are the namespace's fingerprint, or a digest of it (see `kvstore.daemon.network.names`).
    """

    namespace: bytes
    key: bytes


@dataclass(slots=True)
class Object:
    """One block to read or write, and its memory.

    `memory` starts at a multiple of `ALIGN`, and its size is a multiple of it. It begins with `length` bytes
    of payload. A read may overwrite the rest. A write takes the payload's `checksum` (see `arena`) and the
    key of the `parent` (empty: a root). A read that ends with OK sets both. The checksum is seeded with the
    namespace's `fingerprint` (empty: the name has it).
    """

    name: Name
    length: int
    memory: memoryview
    checksum: int = 0
    parent: bytes = b""
    fingerprint: bytes = b""

    def seed(self) -> int:
        """Returns the seed of the payload's checksum."""
        return arena.seed(self.fingerprint or self.name.namespace, self.name.key, self.length)


def named_by_outcome(objects: Sequence[Object], outcomes: Sequence[Outcome]) -> dict[Outcome, list[Name]]:
    """Returns the names of the objects with each outcome that occurs."""
    named: dict[Outcome, list[Name]] = {}
    for thing, outcome in zip(objects, outcomes, strict=True):
        named.setdefault(outcome, []).append(thing.name)
    return named


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a list: its size with header (bytes), and its age (s) by the backend's clock."""

    name: Name
    nbytes: int
    age_s: float


class Backend(Protocol):
    """Objects by name in one system. Calls block. Any number of threads may call concurrently.

    A call ends by `ends` (`time.monotonic`, s), at most 50 ms later, whatever the system does. Objects
    without a result by then are FAILED. No memory is touched after a call. Results are in the order of the
    arguments. Calls raise only NetworkError: if the system as a whole refuses (`fatal`: wrong credentials, no
    such bucket) or does not answer at all.
    """

    kind: str

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Checks which objects exist: OK, MISSING or FAILED. Reads and verifies no payload."""

    def read(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Reads payloads into memory and verifies them. Memory is undefined unless the outcome is OK."""

    def write(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Writes objects, each atomically. An existing object is kept or replaced.

        The caller has verified the payload's checksum.
        """

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Deletes objects. OK also for missing objects."""

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        """Yields the objects of a namespace, or of all, in no order. Skips foreign objects.

        Raises NetworkError if the list does not end by `ends`.
        """

    def health(self, ends: float) -> None:
        """Writes, reads and deletes a small object. Raises NetworkError with the problem."""

    def close(self) -> None:
        """Closes connections. Calls under way end soon, with FAILED. Closing twice does nothing."""
