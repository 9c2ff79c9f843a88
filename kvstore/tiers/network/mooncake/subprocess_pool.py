"""Calls of Mooncake that end in time, and can't take the daemon with them.

Its client is C++ that waits long for a master or a peer that hangs, and that takes its process with it when
it is closed, or left, with a call under way. So it runs in a process of its own (`helper`), and is
asked over lanes: a connection each, and memory that both sides map. Who asks waits no longer than he wants
to, and nobody else here touches that memory; a lane whose answer is late is set aside until it comes. Other
nodes, too, reach what its client has registered: lanes, and nothing of the daemon's.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

from kvstore.tiers.network.base import NetworkError
from kvstore.tiers.network.mooncake.client_process import Answer, Request

LANE_BYTES = 16 << 20
"""What a lane's memory holds at first; it grows to the largest object. Only what was used takes memory."""

_GIVE_UP_S = 60.0
"""An answer that is as late as this does not come: the process is ended."""

_AGAIN_S = 1.0
"""Least time between two processes."""

_LOOK_S = 0.05
"""Late answers are looked for so often while no lane is free."""

_LEAVE_S = 3.0
_KILLED_S = 0.5

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "5000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}
"""Mooncake's own settings where the daemon's environment says nothing else: so lanes are back after 5 s."""


class Worker:
    """A connection to the helper, and memory. One thread's at a time."""

    def __init__(self) -> None:
        self.connection, self.theirs = Pipe()
        self.descriptor = os.memfd_create("kvstore-mooncake")
        self.asked_at: float | None = None
        """When a request was sent whose answer has not come."""
        self._nbytes = 0
        self.fit(LANE_BYTES)

    def fit(self, nbytes: int) -> None:
        """Has the lane's memory hold that much."""
        if nbytes > self._nbytes:
            os.ftruncate(self.descriptor, nbytes)
            self.memory = memoryview(mmap.mmap(self.descriptor, nbytes))
            self._nbytes = nbytes

    def answered(self) -> bool:
        """Whether nothing is awaited any more. Raises EOFError or OSError if the helper is gone."""
        if self.asked_at is not None and self.connection.poll(0):
            self.connection.recv()
            self.asked_at = None
        return self.asked_at is None

    def close(self) -> None:
        """Lets go of everything; nobody may have the lane."""
        self.connection.close()
        self.theirs.close()
        os.close(self.descriptor)


class _Helper:
    """A process and its lanes."""

    def __init__(self, plan: Mapping[str, object], lanes: int) -> None:
        self.free = [Worker() for _ in range(lanes)]
        self.late: list[Worker] = []
        ends = [(lane.theirs.fileno(), lane.descriptor) for lane in self.free]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.client_process",
                json.dumps({**plan, "lanes": ends}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**_ENVIRONMENT, **os.environ},
            pass_fds=[fd for pair in ends for fd in pair],
            start_new_session=True,
        )
        for lane in self.free:
            lane.theirs.close()

    def hopeless(self) -> bool:
        """Whether it has ended, or hangs for good. Takes back lanes whose answers came late."""
        now = time.monotonic()
        try:
            back = [lane for lane in self.late if lane.answered()]
        except (EOFError, OSError):
            return True
        self.late = [lane for lane in self.late if lane not in back]
        self.free += back
        overdue = any(lane.asked_at is not None and now - lane.asked_at > _GIVE_UP_S for lane in self.late)
        return overdue or self._process.poll() is not None

    def leave(self, within_s: float) -> None:
        """Ends it; kills it if it does not end by itself in time. Closes the lanes that nobody has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # whatever holds it in the kernel, holds nobody here
                self._process.wait(_KILLED_S)
        for lane in [*self.free, *self.late]:
            lane.close()
        self.free, self.late = [], []


class SubprocessPool:
    """So many lanes to Mooncake, and a process behind them, started when it is needed."""

    def __init__(self, plan: Mapping[str, object], count: int) -> None:
        self._plan = plan
        self._count = count
        self._changed = threading.Condition()
        self._helper: _Helper | None = None
        self._again_at = 0.0
        self._closed = False

    @contextmanager
    def one(self, ends: float) -> Iterator[Worker | None]:
        """A lane for the caller; None if none was free in time."""
        with self._changed:
            helper = self._with_a_lane(ends)
            lane = helper.free.pop() if helper else None
        try:
            yield lane
        finally:
            if helper is not None and lane is not None:
                self._back(helper, lane)

    def _with_a_lane(self, ends: float) -> _Helper | None:
        while not self._closed:
            now = time.monotonic()
            if self._helper is not None and self._helper.hopeless():
                self._helper.leave(0)
                self._helper = None
            if now >= ends:
                return None
            if self._helper is None and now >= self._again_at:
                self._again_at = now + _AGAIN_S
                self._helper = _Helper(self._plan, self._count)
            if self._helper is not None and self._helper.free:
                return self._helper
            self._changed.wait(min(_LOOK_S, ends - now))
        return None

    def _back(self, helper: _Helper, lane: Worker) -> None:
        with self._changed:
            if helper is not self._helper:
                lane.close()
            elif lane.asked_at is None:
                helper.free.append(lane)
            else:
                helper.late.append(lane)
            self._changed.notify()

    def close(self) -> None:
        """Ends the process; calls under way end with it. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            helper, self._helper = self._helper, None
            self._changed.notify_all()
        if helper is not None:
            helper.leave(_LEAVE_S)


def ask(lane: Worker, request: Request, ends: float) -> list[int] | None:
    """What Mooncake says of each key; None if that does not come in time. Raises NetworkError."""
    try:
        lane.asked_at = time.monotonic()
        lane.connection.send(request)
        if not lane.connection.poll(max(0.0, ends - time.monotonic())):
            return None
        answer: Answer = lane.connection.recv()
    except (EOFError, OSError):
        return None  # the helper is gone: whoever wants a lane next sees it
    lane.asked_at = None
    if isinstance(answer, tuple):
        why, for_good = answer
        raise NetworkError(why, _HINT if for_good else "is the master there?", for_good)
    return answer


_HINT = "apt install libibverbs1, or what the message names"
