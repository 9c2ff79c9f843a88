"""The seam between the daemon and systems that hold blocks for many nodes.

What they hold is not ours alone: others write and delete there, and it may be cut, swapped or foreign. So an
object is what its header and its checksum prove (`objects`), and anything else is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kvstore.errors import TierError, printable

_MOST_CHARS = 400


class NetworkError(TierError):
    """A backend as a whole can't be used now. `fatal`: not before somebody changes something.

    `message` may have what another machine says: it is cut, and what a terminal obeys in it is escaped.
    """

    def __init__(self, message: str, hint: str = "", fatal: bool = False) -> None:
        super().__init__(f"{printable(message[:_MOST_CHARS]):.{_MOST_CHARS}}", hint)
        self.fatal = fatal


class Outcome(IntEnum):
    """How one object of a call ended."""

    OK = 0
    """Done; what was read is what was put under its name."""
    MISSING = 1
    """There is none."""
    TORN = 2
    """There is something, and not what its name says: foreign, cut short, altered, another's."""
    FULL = 3
    """The backend has no room for it, or lets nothing be written."""
    FAILED = 4
    """The backend did not answer in time, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Name:
    """Whose bytes an object has: the namespace's fingerprint (16 bytes) and a key."""

    namespace: bytes
    key: bytes


@dataclass(slots=True)
class Object:
    """One block to be read or written, and the memory that it is read into or written from.

    `memory` begins at a multiple of `ALIGN`, is as long as one, and has `length` bytes of payload at its
    head; a read may leave anything behind these. `checksum` (of the payload, as in `arena`) and the key of
    the `parent` (none: a root) are given for a write, and filled in by a read that ends with OK.
    """

    name: Name
    length: int
    memory: memoryview
    checksum: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object that a backend has under one of our names: bytes with its header, and how long it has been
    there (s, by the backend's own clock)."""

    name: Name
    nbytes: int
    age_s: float


class Backend(Protocol):
    """Objects by name, in some system. Calls block, and any number of threads may make them at once.

    All end by `ends` (`time.monotonic`, s), some 50 ms later at worst, whatever the system does: what is not
    known by then is FAILED, and no memory is touched once a call has returned. They answer in the order
    they were asked, and raise nothing but NetworkError, where the system as a whole refuses (`fatal`: wrong
    credentials, no such bucket) or nothing at all came from it.
    """

    kind: str

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Which objects there seem to be: OK, MISSING or FAILED. Reads no payload, so proves nothing."""

    def read(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Reads payloads into memory, and verifies them there. Unless OK, memory may have anything."""

    def write(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Puts objects, each as a whole or not at all. One that is there already stays, or is replaced.

        The checksum given is the payload's: the caller has verified it.
        """

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Takes objects away; OK also where there was none."""

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        """What there is of a namespace, or of all of them, in no order. What is foreign is left out."""

    def health(self, ends: float) -> None:
        """Writes, reads and deletes something small. Raises NetworkError that says what is wrong."""

    def close(self) -> None:
        """Lets go of connections; calls under way end soon, with FAILED. Closing twice does nothing."""
