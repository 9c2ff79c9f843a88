"""Tracks the processes that were given an extent, and whether all of them have ended.

A pidfd becomes readable when its process ends, and never refers to a later process of the same number. What
happens to the extent then is not covered here.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


class IpcExports:
    """Pidfds of the processes that may map an extent, by extent number. One thread at a time may call."""

    def __init__(self) -> None:
        self._pidfds: dict[int, dict[int, int]] = {}

    def add(self, number: int, pidfd: int) -> None:
        """Records that a process was given an extent. Takes over the descriptor and keeps one a process."""
        self.unused(number)
        pid = _process(pidfd)
        known = self._pidfds.setdefault(number, {})
        if pid in known:
            os.close(pidfd)
        else:
            known[pid] = pidfd

    def unused(self, number: int) -> bool:
        """Returns whether all processes that were given this extent have ended."""
        known = self._pidfds.get(number, {})
        for pid, pidfd in list(known.items()):
            if _ended(pidfd):
                os.close(pidfd)
                del known[pid]
        if not known:
            self._pidfds.pop(number, None)
        return not known

    def close(self) -> None:
        """Closes all descriptors."""
        for known in self._pidfds.values():
            for pidfd in known.values():
                os.close(pidfd)
        self._pidfds.clear()


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _process(pidfd: int) -> int:
    """Returns the process id, -1 if the process has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise OSError(f"descriptor {pidfd} is not a pidfd")
