"""Processes that a test stops for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

WAIT_S = 10.0


def stop(pid: int) -> None:
    """Stops a process as SIGSTOP does, and returns when each of its threads has stopped.

    A thread that runs on another processor may answer for some time after the signal was sent.
    """
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + WAIT_S
    while not all(_state(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < ends, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
