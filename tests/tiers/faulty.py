"""An I/O engine that fails on purpose, by a seeded dice."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.errors import TierError
from kvstore.tiers.base import BlockIO, IOEngine
from kvstore.types import ALIGN

_log = logging.getLogger(__name__)

Done = Callable[[list[OSError | None]], None]


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong, each 0 to 1. `delay_s` is the longest that a delayed batch is put off."""

    error: float = 0.0  # a block does not move, EIO
    short: float = 0.0  # a block moves in part, EIO
    corrupt: float = 0.0  # a read answers success and one wrong byte
    reorder: float = 0.0  # a batch's blocks start in another order
    delay: float = 0.0  # a batch ends late, passed by those behind it
    broken: float = 0.0  # submit raises what no engine should raise
    delay_s: float = 0.01


class FaultyEngine:
    """Any engine, with faults. One seed and one order of submits give the same faults again."""

    def __init__(self, inner: IOEngine, faults: Faults, seed: int = 0) -> None:
        self.name = f"faulty {inner.name}"
        self.device_memory = inner.device_memory
        self.release, self.register, self.unregister = inner.release, inner.register, inner.unregister
        self.faults = faults
        self.injected = dict.fromkeys(("error", "short", "corrupt", "reorder", "delay", "broken"), 0)
        self._inner = inner
        self._dice = random.Random(seed)
        self._lock = threading.Condition()
        self._under_way = 0
        self._closed = False

    def submit(self, ios: Sequence[BlockIO], done: Done, urgent: bool = False) -> None:
        for io in ios:
            io.check()
        with self._lock:
            if self._closed:
                raise TierError("the I/O engine is closed")
            if self.faults.broken and self._hits("broken"):
                raise RuntimeError("injected: the engine is broken")
            plan = [self._draw(io) for io in ios]
            order = list(range(len(ios)))
            if self._hits("reorder"):
                self._dice.shuffle(order)
            delay_s = self._dice.uniform(0, self.faults.delay_s) if self._hits("delay") else 0.0
            self._under_way += 1
        moving = [i for i in order if plan[i][0] != "error"]

        def ended(outcomes: list[OSError | None]) -> None:
            answer: list[OSError | None] = [OSError(errno.EIO, "injected: block failed")] * len(ios)
            for i, outcome in zip(moving, outcomes, strict=True):
                fault, where = plan[i]
                answer[i] = outcome
                if outcome is None and fault == "short":
                    answer[i] = OSError(errno.EIO, "injected: moved in part")
                if outcome is None and fault == "corrupt":
                    ios[i].buffer[where] ^= 1 << where % 8
            if delay_s:
                threading.Timer(delay_s, self._finish, (done, answer)).start()
            else:
                self._finish(done, answer)

        self._inner.submit([self._cut(ios[i], plan[i][0]) for i in moving], ended, urgent)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: self._under_way == 0)
        self._inner.close()

    def _finish(self, done: Done, answer: list[OSError | None]) -> None:
        try:
            done(answer)
        except Exception:
            _log.exception("a completion callback failed")
        with self._lock:
            self._under_way -= 1
            self._lock.notify_all()

    def _draw(self, io: BlockIO) -> tuple[str, int]:
        where = self._dice.randrange(max(1, len(io.buffer)))
        for fault in ("error", "short", "corrupt"):
            if self._hits(fault, possible=fault != "corrupt" or not io.write):
                return fault, where
        return "", where

    def _hits(self, fault: str, possible: bool = True) -> bool:
        hit = self._dice.random() < getattr(self.faults, fault) and possible
        self.injected[fault] += hit
        return hit

    def _cut(self, io: BlockIO, fault: str) -> BlockIO:
        if fault != "short":
            return io
        return replace(io, buffer=io.buffer[: len(io.buffer) // 2 // ALIGN * ALIGN])
