"""A device under a tier: who may use it next, how fast it is, and whether it can be used at all.

Copies wait here, by class and tenant, and start while few enough bytes are under way: enough to keep the
device busy, few enough that whoever comes next does not wait behind what nobody can reorder any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.core.transfers.admission import Rule
from kvstore.core.transfers.fair_queue import FairQueue
from kvstore.types import Tier

DEMAND, PREFETCH, WRITE_BACK, SCRUB = range(4)
"""Classes of work: somebody waits; somebody will; what is stored goes down; what is stored is looked at."""

SERVING, DRAINING, FENCED = "serving", "draining", "fenced"
"""What an operator has it do: all; no more writes; nothing at all."""

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
_QUIET_FOR_S = 5.0
_MEMORY_S = 1.0
_FORGIVEN_S = 5.0
_FIRST_GUESS = 1e9
MEASURED_BYTES = 4 << 20


@dataclass(slots=True)
class TierSpec:
    """One device of a tier, as configured: called by its tier's name if it has no other.

    `table`: its extents start with slot headers (shared memory). `admission`: what of above is written to it.
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
    """Whether one kind of work at a device is worth trying: not for a while after it only failed."""

    def __init__(self) -> None:
        self.opened_until = 0.0
        self.failures = 0

    def ended(self, now: float, failed: int, total: int) -> bool:
        """Takes in how a copy ended; whether the breaker opens because of it."""
        self.failures = self.failures + failed if failed == total else 0
        if self.failures < _FAILURES_TO_OPEN:
            return False
        self.failures, self.opened_until = 0, now + _OPEN_FOR_S
        return True

    def step(self, now: float) -> None:
        """It is `now`: after its time, the next copy is tried, and a failure counts as many."""
        if self.opened_until and self.opened_until <= now:
            self.opened_until, self.failures = 0.0, _FAILURES_TO_OPEN - 1


class DeviceQueue:
    """One device. So many copies are under way (`moving`), of so many bytes by class (`bytes_moving`).

    `fenced`: something has been under way for too long, and until it ends nothing else is tried. `state` is
    what an operator wants. `turn`: what was written to it, in times its size; beside others of its tier, the
    one with the least is next.
    """

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue(_WEIGHTS, _QUANTUM_BYTES, _WAITING_BYTES, _SAVED_BYTES)
        self.moving = 0
        self.bytes_moving = [0, 0, 0, 0]
        self.fenced = False
        self.state = SERVING
        self.turn = 0.0
        self.quiet_since = 0.0
        self._asker = -1
        self._shared_until = self._asked_until = 0.0
        self.writes, self.reads = Breaker(), Breaker()
        self._bandwidth = self._best = _FIRST_GUESS
        self._measured_at = -math.inf
        self._busy_since = 0.0
        self._bytes_done = 0

    # -- whether

    @property
    def takes_writes(self) -> bool:
        """Whether copies to it may start."""
        return not self.writes.opened_until and not self.fenced and self.state == SERVING

    @property
    def readable(self) -> bool:
        """Whether copies from it may start."""
        return not self.reads.opened_until and not self.fenced and self.state != FENCED

    # -- who is next

    def room(self, tenant: int, kind: int) -> int:
        """Bytes that may still be queued by a tenant in a class."""
        return max(0, _WAITING_BYTES - self.queue.waiting(kind, tenant))

    def put(self, now: float, tenant: int, kind: int, nbytes: int, number: int) -> bool:
        """Queues a copy; False if its tenant has too many bytes queued in this class."""
        if kind == DEMAND:
            self._asked_until = now + _ALONE_AFTER_S
            if tenant != self._asker:
                self._asker, self._shared_until = tenant, now + _ALONE_AFTER_S
        return self.queue.put(tenant, kind, nbytes, number)

    def next(self, now: float) -> Iterator[tuple[int, int, int]]:
        """What may start now: (number, class, bytes), counted as under way."""
        if self.fenced or self.state == FENCED:
            return
        while (kinds := self._open_kinds(now)) and (chosen := self._take(now, kinds)):
            yield chosen

    def called_off(self, now: float) -> Iterator[tuple[int, int, int]]:
        """What waits for a device that an operator has fenced, as `next` gives it: none of it will start."""
        while self.state == FENCED and (chosen := self._take(now, None)):
            yield chosen

    def _take(self, now: float, kinds: list[int] | None) -> tuple[int, int, int] | None:
        chosen = self.queue.take(now, kinds)
        if chosen is None:
            return None
        _, kind, nbytes, number = chosen
        if not self.moving:
            self.quiet_since = self._busy_since = now
            self._bytes_done = 0
        self.moving += 1
        self.bytes_moving[kind] += nbytes
        return number, kind, nbytes

    def _open_kinds(self, now: float) -> list[int]:
        """Classes of which more may be under way; the others hold back while somebody waits."""
        demand, prefetch, writing, scrub = self.bytes_moving
        kinds = []
        # Who reads alone need not come back here after every few pieces.
        if demand + prefetch < (_READING_BYTES if now < self._shared_until else _READING_ALONE_BYTES):
            kinds = [DEMAND, PREFETCH]
        if demand or self.queue.waiting(DEMAND):
            most_aside = _ASIDE_BYTES
        else:
            # Whoever asks next waits for all of it.
            most_aside = _WRITING_BYTES if now < self._asked_until else _WRITING_ALONE_BYTES
        if writing + scrub < most_aside:
            kinds += [WRITE_BACK, SCRUB]
        return kinds

    def ended(self, now: float, kind: int, nbytes: int, moved_bytes: int) -> None:
        """Something that was under way is over, and this much of it went through."""
        self.moving -= 1
        self.bytes_moving[kind] -= nbytes
        self.quiet_since, self.fenced = now, False
        self._measure(now, moved_bytes)

    def bandwidth(self, now: float) -> float:
        """Bytes/s, measured; what was slow some time ago is thought to have got better since."""
        age = max(0.0, now - self._measured_at)
        return float(min(self._best, self._bandwidth * 2.0 ** min(age / _FORGIVEN_S, 60.0)))

    def _measure(self, now: float, nbytes: int) -> None:
        """What went through while the device was busy, the last second counting most."""
        self._bytes_done += nbytes
        took = now - self._busy_since
        enough = took > 0 and self._bytes_done >= MEASURED_BYTES
        if (took >= 0.005 and enough) or not self.moving:
            # Of a few small blocks one learns how long a start takes, not how fast the device is.
            if enough:
                # Short times say little, and count for little; a first one is better than a guess.
                first = self._measured_at == -math.inf
                share = 1.0 if first else min(1.0, took / _MEMORY_S)
                self._bandwidth += share * (self._bytes_done / took - self._bandwidth)
                self._best = self._bandwidth if first else max(self._best, self._bandwidth)
                self._measured_at = now
            self._busy_since, self._bytes_done = now, 0

    def wait_s(self, now: float, tenant: int, nbytes: int) -> float:
        """How long so many bytes more on demand of a tenant would take, its turns among others' included."""
        queue = self.queue
        mine = queue.waiting(DEMAND, tenant) + nbytes
        others = queue.waiting(DEMAND) - queue.waiting(DEMAND, tenant)
        share = self._part_of(tenant)
        ahead = min(others, mine * (1 / share - 1)) + sum(self.bytes_moving[:2])
        return (mine + ahead) / self.bandwidth(now)

    def share_of(self, now: float, tenant: int) -> float:
        """Bytes/s that a tenant gets beside those who wait for the same."""
        return self.bandwidth(now) * self._part_of(tenant)

    def _part_of(self, tenant: int) -> float:
        queue = self.queue
        weights = queue.active(DEMAND) + (0 if queue.waiting(DEMAND, tenant) else queue.weight(tenant))
        return queue.weight(tenant) / weights

    # -- time

    def fences_at(self) -> float:
        """When it is fenced if it stays quiet from now on; infinity if it is not at work."""
        return self.quiet_since + _QUIET_FOR_S if self.moving and not self.fenced else math.inf

    def wakes_at(self, now: float) -> float:
        """When time alone changes something."""
        wake = min(self.fences_at(), self.queue.ready_at(now))
        for breaker in (self.writes, self.reads):
            wake = min(wake, breaker.opened_until or math.inf)
        return wake

    def step(self, now: float) -> bool:
        """It is `now`; whether the device is fenced because of that."""
        self.writes.step(now)
        self.reads.step(now)
        if now < self.fences_at():
            return False
        self.fenced = True
        return True
