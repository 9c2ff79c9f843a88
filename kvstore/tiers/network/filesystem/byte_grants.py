"""What a daemon may still write to a folder that several share, and what it tells the others of that.

The janitor grants bytes, each of which is written once at most. `granted` is the sum of all grants of one
janitor; `left` are those not yet begun, `flying` those whose write is not settled, and the others are *used*.
Under the next janitor (*generation*) all begins at 0, but what flies still counts, until it has settled.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.tiers.network.filesystem.safe_paths import CONTROL

MAX_NOTE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A daemon's file for the janitor. `used` is below 0 while writes of an earlier generation fly."""

    beat: int
    generation: int
    used: int
    wants: bool


@dataclass(frozen=True, slots=True)
class ManagerFile:
    """The janitor's file: at most how many bytes there are, whether that is all, sums of grants by daemon."""

    beat: int
    nbytes: int = 0
    full: bool = False
    grants: dict[str, int] = field(default_factory=dict)


def to_note(said: MemberFile | ManagerFile) -> bytes:
    """A file's bytes."""
    return json.dumps(asdict(said)).encode()


def report_of(raw: bytes) -> MemberFile | None:
    """A report, None if that is none."""
    said = _fields(raw)
    values = said.get("beat"), said.get("generation"), said.get("used"), said.get("wants")
    return MemberFile(*values) if all(isinstance(value, int) for value in values) else None  # type: ignore[arg-type]


def lease_of(raw: bytes) -> ManagerFile:
    """A lease; of anything else, one that grants nothing."""
    said = _fields(raw)
    grants = said.get("grants")
    if not isinstance(grants, dict) or not all(isinstance(value, int) for value in grants.values()):
        grants = {}
    return ManagerFile(0, 0, said.get("full") is True, grants)


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


class ByteGrants:
    """A daemon under the name that it has in the folder: a new name gets a new account.

    Not `counted`: there is no limit, and all may be written.
    """

    def __init__(self, name: str, counted: bool) -> None:
        self.name = name
        self.folder = f"{CONTROL}/{name}"
        self.counted = counted
        self.generation = 0
        self.left = 0
        self._granted = 0
        self._flying = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes may be written now; then `settle` must follow."""
        with self._lock:
            if self.counted and self.left < nbytes:
                return False
            if self.counted:
                self.left -= nbytes
            self._flying += nbytes
            return True

    def settle(self, nbytes: int) -> None:
        """Such a write has ended, well or not, and nothing more will come of it."""
        with self._lock:
            self._flying -= nbytes

    def hear(self, generation: int, granted: int) -> None:
        """What the janitor says."""
        with self._lock:
            if generation != self.generation:
                self.generation, self._granted, self.left = generation, 0, 0
            more = max(0, granted - self._granted)
            self._granted += more
            self.left += more

    def report(self, beat: int, wants: bool) -> MemberFile:
        """What to tell the janitor. Who wants nothing gives back what is left."""
        with self._lock:
            if not wants:
                self.left = 0
            return MemberFile(beat, self.generation, self._granted - self.left - self._flying, wants)
