"""The queue of one device: the order of its copies, its measured bandwidth, and whether it can be used.

Copies wait by class and tenant. The bytes under way are bounded: enough to keep the device busy, few enough
that a new request does not wait long behind copies that cannot be reordered any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.core.policy.admission import Rule
from kvstore.core.queues.fair_queue import FairQueue
from kvstore.types import Tier

DEMAND, PREFETCH, WRITE_BACK, SCRUB = range(4)
"""Classes of work: reads that a request waits for, prefetches, writes to lower tiers, probes."""

SERVING, DRAINING, FENCED = "serving", "draining", "fenced"
"""States that an operator sets: all work; no writes; no work."""

_WEIGHTS = (16.0, 4.0, 4.0, 1.0)
_QUANTUM_BYTES = 4 << 20
_SAVED_BYTES = 64 << 20
_WAITING_BYTES = 512 << 20
_READING_BYTES = 8 << 20
_READING_ALONE_BYTES = 32 << 20
_ALONE_AFTER_S = 1.0
_WRITING_BYTES = 8 << 20
_WRITING_ALONE_BYTES = 64 << 20
_ASIDE_BYTES = 4 << 20
_FAILURES_TO_OPEN = 8
_OPEN_FOR_S = 30.0
_FENCED_AFTER_S = 5.0
_MEMORY_S = 1.0
_FORGIVEN_S = 5.0
_TRIED_S = 60.0
_FIRST_GUESS = 1e9
MEASURED_BYTES = 4 << 20


@dataclass(slots=True)
class TierSpec:
    """One device of a tier, as configured. The default name is that of the tier.

    `table`: its extents start with slot headers (shared memory). `admission`: the rule for writes to it.
    """

    tier: Tier
    limit_bytes: int
    extent_bytes: int
    table: bool
    admission: Rule = field(default_factory=Rule)
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.tier.name.lower()


class Breaker:
    """Stops reads or writes of a device for 30 s after 8 failures in a row."""

    def __init__(self) -> None:
        self.opened_until = 0.0
        self.failures = 0

    def ended(self, now: float, failed: int, total: int) -> bool:
        """Counts the result of a copy. Returns whether the breaker opens."""
        self.failures = self.failures + failed if failed == total else 0
        if self.failures < _FAILURES_TO_OPEN:
            return False
        self.failures, self.opened_until = 0, now + _OPEN_FOR_S
        return True

    def step(self, now: float) -> None:
        """Closes the breaker after its time. One more failure opens it again."""
        if self.opened_until and self.opened_until <= now:
            self.opened_until, self.failures = 0.0, _FAILURES_TO_OPEN - 1


class DeviceQueue:
    """One device. `moving` copies are under way, with `bytes_moving` by class.

    `fenced`: no copy has ended for too long, and none starts until one ends. `state` is set by an operator.
    `turn`: the bytes written to the device, as a multiple of its size. The device of a tier with the lowest
    `turn` is written next.
    """

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue(_WEIGHTS, _QUANTUM_BYTES, _WAITING_BYTES, _SAVED_BYTES)
        self.moving = 0
        self.bytes_moving = [0, 0, 0, 0]
        self.fenced = False
        self.state = SERVING
        self.turn = 0.0
        self.idle_since = 0.0
        self._asker = -1
        self._shared_until = self._asked_until = 0.0
        self.writes, self.reads = Breaker(), Breaker()
        self._bandwidth = self._best = _FIRST_GUESS
        self._measured_at = -math.inf
        self._forgiven_s = _FORGIVEN_S
        self._busy_since = 0.0
        self._bytes_done = 0

    # -- state

    @property
    def takes_writes(self) -> bool:
        """Whether copies to the device may start."""
        return not self.writes.opened_until and not self.fenced and self.state == SERVING

    @property
    def readable(self) -> bool:
        """Whether copies from the device may start."""
        return not self.reads.opened_until and not self.fenced and self.state != FENCED

    # -- the order of copies

    def room(self, tenant: int, kind: int) -> int:
        """Returns the bytes that a tenant may still queue in a class."""
        return max(0, _WAITING_BYTES - self.queue.waiting(kind, tenant))

    def put(self, now: float, tenant: int, kind: int, nbytes: int, number: int) -> bool:
        """Queues a copy. Returns False if its tenant has too many bytes queued in this class."""
        if kind == DEMAND:
            self._asked_until = now + _ALONE_AFTER_S
            if tenant != self._asker:
                self._asker, self._shared_until = tenant, now + _ALONE_AFTER_S
        return self.queue.put(tenant, kind, nbytes, number)

    def next(self, now: float) -> Iterator[tuple[int, int, int]]:
        """Yields the copies that may start now, as (number, class, bytes), and counts them as under way."""
        if self.fenced or self.state == FENCED:
            return
        while (kinds := self._open_kinds(now)) and (chosen := self._take(now, kinds)):
            yield chosen

    def called_off(self, now: float) -> Iterator[tuple[int, int, int]]:
        """Yields the copies that wait for a device that an operator has fenced, as `next` does."""
        while self.state == FENCED and (chosen := self._take(now, None)):
            yield chosen

    def _take(self, now: float, kinds: list[int] | None) -> tuple[int, int, int] | None:
        chosen = self.queue.take(now, kinds)
        if chosen is None:
            return None
        _, kind, nbytes, number = chosen
        if not self.moving:
            self.idle_since = self._busy_since = now
            self._bytes_done = 0
        self.moving += 1
        self.bytes_moving[kind] += nbytes
        return number, kind, nbytes

    def _open_kinds(self, now: float) -> list[int]:
        """Returns the classes of which more may start. Writes and probes hold back while reads wait."""
        demand, prefetch, writing, scrub = self.bytes_moving
        kinds = []
        # A tenant that reads alone gets longer batches.
        if demand + prefetch < (_READING_BYTES if now < self._shared_until else _READING_ALONE_BYTES):
            kinds = [DEMAND, PREFETCH]
        if demand or self.queue.waiting(DEMAND):
            most_aside = _ASIDE_BYTES
        else:
            # The next read waits for all of these bytes.
            most_aside = _WRITING_BYTES if now < self._asked_until else _WRITING_ALONE_BYTES
        if writing + scrub < most_aside:
            kinds += [WRITE_BACK, SCRUB]
        return kinds

    def ended(self, now: float, kind: int, nbytes: int, moved_bytes: int) -> None:
        """Ends a copy. `moved_bytes` of it were copied."""
        self.moving -= 1
        self.bytes_moving[kind] -= nbytes
        self.idle_since, self.fenced = now, False
        self._measure(now, moved_bytes)

    def bandwidth(self, now: float) -> float:
        """Returns the measured bandwidth in bytes/s. A slow measurement recovers as it gets older.

        It doubles every 5 s up to the best one, more slowly if a device that was tried again was slow again,
        and every 60 s up to the initial guess: a device that was never fast is tried now and then.
        """
        age = max(0.0, now - self._measured_at)
        again = min(self._best, self._bandwidth * 2.0 ** min(age / self._forgiven_s, 60.0))
        return float(max(again, min(_FIRST_GUESS, self._bandwidth * 2.0 ** min(age / _TRIED_S, 60.0))))

    def _measure(self, now: float, nbytes: int) -> None:
        """Measures the bandwidth while the device is busy. The last second has the largest weight."""
        self._bytes_done += nbytes
        took = now - self._busy_since
        enough = took > 0 and self._bytes_done >= MEASURED_BYTES
        if (took >= 0.005 and enough) or not self.moving:
            # A few small blocks show the latency of the device, not its bandwidth.
            if enough:
                # Short measurements have little weight, but the first one replaces the initial guess.
                first = self._measured_at == -math.inf
                share = 1.0 if first else min(1.0, took / _MEMORY_S)
                expected, measured = self.bandwidth(self._busy_since), self._bytes_done / took
                self._forgiven_s = self._patience_after(expected, measured)
                self._bandwidth = expected + share * (measured - expected)
                self._best = self._bandwidth if first else max(self._best, self._bandwidth)
                self._measured_at = now
            self._busy_since, self._bytes_done = now, 0

    def _patience_after(self, expected: float, measured: float) -> float:
        """Returns in what time (s) a slow measurement doubles: longer after each vain try."""
        if measured >= expected:
            return _FORGIVEN_S
        tried_in_vain = max(self._bandwidth, measured) < expected / 2
        return min(_TRIED_S, 2 * self._forgiven_s) if tried_in_vain else self._forgiven_s

    def wait_s(self, now: float, tenant: int, nbytes: int) -> float:
        """Returns the time (s) to read more bytes on demand for a tenant, with the turns of other tenants."""
        queue = self.queue
        mine = queue.waiting(DEMAND, tenant) + nbytes
        others = queue.waiting(DEMAND) - queue.waiting(DEMAND, tenant)
        share = self._part_of(tenant)
        ahead = min(others, mine * (1 / share - 1)) + sum(self.bytes_moving[:2])
        return (mine + ahead) / self.bandwidth(now)

    def share_of(self, now: float, tenant: int) -> float:
        """Returns the bytes/s that a tenant gets beside the other waiting tenants."""
        return self.bandwidth(now) * self._part_of(tenant)

    def _part_of(self, tenant: int) -> float:
        queue = self.queue
        weights = queue.active(DEMAND) + (0 if queue.waiting(DEMAND, tenant) else queue.weight(tenant))
        return queue.weight(tenant) / weights

    # -- time

    def fences_at(self) -> float:
        """Returns when the device is fenced if no copy ends before; infinity if none is under way."""
        return self.idle_since + _FENCED_AFTER_S if self.moving and not self.fenced else math.inf

    def wakes_at(self, now: float) -> float:
        """Returns when time alone changes the state."""
        wake = min(self.fences_at(), self.queue.ready_at(now))
        for breaker in (self.writes, self.reads):
            wake = min(wake, breaker.opened_until or math.inf)
        return wake

    def step(self, now: float) -> bool:
        """Updates breakers and fence. Returns whether the device becomes fenced."""
        self.writes.step(now)
        self.reads.step(now)
        if now < self.fences_at():
            return False
        self.fenced = True
        return True
