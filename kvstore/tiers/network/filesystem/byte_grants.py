"""Byte grants: how much a daemon may still write to a shared folder, and the files that tell it.

The capacity manager grants bytes. Each granted byte is written at most once. `granted` is the sum of all
grants of one manager. Of these bytes, `left` are not yet begun, `in_flight` belong to writes that have not
ended, and the rest is *used*. With the next manager (*generation*) all counts restart at 0. Bytes in flight
still count until their writes end.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.tiers.network.filesystem.safe_paths import CONTROL

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A daemon's report to the manager.

    `used` (bytes) is negative while writes of an earlier generation are in flight. `wants`: the daemon has
    something to write.
    """

    beat: int
    generation: int
    used: int
    wants: bool


@dataclass(frozen=True, slots=True)
class ManagerFile:
    """The manager's lease file.

    `nbytes`: upper bound of the bytes in the folder. `full`: the limit is reached. `grants`: the sum of
    granted bytes by daemon.
    """

    beat: int
    nbytes: int = 0
    full: bool = False
    grants: dict[str, int] = field(default_factory=dict)


def encode(content: MemberFile | ManagerFile) -> bytes:
    """Returns a file's bytes."""
    return json.dumps(asdict(content)).encode()


def parse_report(raw: bytes) -> MemberFile | None:
    """Returns a report, None if the bytes are not a valid one."""
    fields = _fields(raw)
    values = fields.get("beat"), fields.get("generation"), fields.get("used"), fields.get("wants")
    return MemberFile(*values) if all(isinstance(value, int) for value in values) else None  # type: ignore[arg-type]


def parse_lease(raw: bytes) -> ManagerFile:
    """Returns `full` and the grants of a lease. Bytes that are not a valid lease grant nothing."""
    fields = _fields(raw)
    grants = fields.get("grants")
    if not isinstance(grants, dict) or not all(isinstance(value, int) for value in grants.values()):
        grants = {}
    return ManagerFile(0, 0, fields.get("full") is True, grants)


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


class ByteGrants:
    """The grants of one member name. A daemon that joins again has a new name and new grants.

    Without `counted` the folder has no limit, and every write is allowed. Any thread may call.
    """

    def __init__(self, name: str, counted: bool) -> None:
        self.name = name
        self.folder = f"{CONTROL}/{name}"
        self.counted = counted
        self.generation = 0
        self.left = 0
        self._granted = 0
        self._in_flight = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Takes bytes for a write. Returns False if too few are left. After True, `settle` must follow."""
        with self._lock:
            if self.counted and self.left < nbytes:
                return False
            if self.counted:
                self.left -= nbytes
            self._in_flight += nbytes
            return True

    def settle(self, nbytes: int) -> None:
        """Ends a write, successful or not. It must not change the folder afterwards."""
        with self._lock:
            self._in_flight -= nbytes

    def update(self, generation: int, granted: int) -> None:
        """Applies what the manager's lease says."""
        with self._lock:
            if generation != self.generation:
                self.generation, self._granted, self.left = generation, 0, 0
            more = max(0, granted - self._granted)
            self._granted += more
            self.left += more

    def report(self, beat: int, wants: bool) -> MemberFile:
        """Returns the report to the manager. Without `wants`, gives back the bytes that are left."""
        with self._lock:
            if not wants:
                self.left = 0
            return MemberFile(beat, self.generation, self._granted - self.left - self._in_flight, wants)
