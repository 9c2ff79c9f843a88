"""Which processes were given an extent, and whether all of them have ended.

A pidfd polls readable from the end of its process on, whoever has its number by then. Not here: what an
extent is, and what waits for it.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


class IpcExports:
    """By number of extent, descriptors of the processes that may map it. One thread at a time may call."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[int, int]] = {}

    def add(self, number: int, pidfd: int) -> None:
        """A process has an extent from now on. Takes the descriptor over, and keeps one a process."""
        self.free(number)
        pid = _process(pidfd)
        holders = self._holders.setdefault(number, {})
        if pid in holders:
            os.close(pidfd)
        else:
            holders[pid] = pidfd

    def free(self, number: int) -> bool:
        """Whether no process that is still there was given this extent."""
        holders = self._holders.get(number, {})
        for pid, pidfd in list(holders.items()):
            if _ended(pidfd):
                os.close(pidfd)
                del holders[pid]
        if not holders:
            self._holders.pop(number, None)
        return not holders

    def close(self) -> None:
        """Closes all descriptors."""
        for holders in self._holders.values():
            for pidfd in holders.values():
                os.close(pidfd)
        self._holders.clear()


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _process(pidfd: int) -> int:
    """Its process as a number, -1 if that has ended; of one that is there, nobody else has it."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise OSError(f"descriptor {pidfd} is of no process")
