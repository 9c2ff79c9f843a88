"""What happened, in order and a page at a time: decisions about blocks, and what became of the daemon itself.

An event's number is its place among all since the start. Of the daemon itself there are few events: they stay
long after decisions of the same time have been overwritten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.core.blocks.topology import TierState
from kvstore.core.insight.decision_log import EVERY_TIER, DecisionKind, Noted
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

MOST_EVENTS = 64
"""On one page: more would hold up everybody else's requests."""

_MOST_HAPPENINGS = 4096
_MOST_CLOSED = 4096

HAPPENINGS = (
    *("started", "reloaded", "published", "forgotten", "deleted", "renewed", "removed", "lost"),
    *("fenced", "unfenced", "unreadable", "readable", "unwritable", "writable", "joined", "leaving", "left"),
)
"""What may become of the daemon, its devices, namespaces and tenants."""

KINDS = (*(what.name.lower() for what in DecisionKind), *HAPPENINGS)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something that happened to the daemon. `place`: how many decisions had been made by then."""

    number: int
    place: int
    at: float
    what: str
    tier: str
    tenant: str
    namespace: str
    detail: str


class EventLog:
    """What one daemon tells of its past. `shell` has the decisions, and names for their numbers."""

    def __init__(self, shell: Shell, most: int = _MOST_HAPPENINGS) -> None:
        self._shell = shell
        self._most = most
        self._happenings: list[LogEntry] = []
        self._dropped = 0
        self._lost_up_to = 0
        self._closed: dict[int, tuple[str, str]] = {}
        self._devices: list[tuple[bool, bool, bool]] = []

    # -- what is written

    def add(
        self, what: str, *, tier: str = "", tenant: str = "", namespace: str = "", detail: str = ""
    ) -> None:
        """This happened now."""
        place, now = self._shell.placement.residency.decisions.written, self._shell.now()
        number = place + self._dropped + len(self._happenings) + 1
        self._happenings.append(LogEntry(number, place, now, what, tier, tenant, namespace, detail))
        if len(self._happenings) > 2 * self._most:
            self._lost_up_to = self._happenings[self._most - 1].number
            self._dropped += self._most
            del self._happenings[: self._most]

    def closed(self, number: int, tenant: str, namespace: str) -> None:
        """A namespace has this number no more: what was decided about it keeps its name."""
        self._closed.pop(number, None)
        self._closed[number] = tenant, namespace
        if len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def opened(self, number: int) -> None:
        """Another namespace gets this number: who had it before is forgotten."""
        self._closed.pop(number, None)

    def look(self, tiers: Sequence[TierState]) -> bool:
        """Adds what has changed about devices since the look before; whether anything has."""
        seen = [(t.device.fenced, t.device.readable, t.device.takes_writes) for t in tiers]
        if seen == self._devices:
            return False
        for state, now, before in zip(tiers, seen, self._devices, strict=False):
            words = ("unfenced", "fenced"), ("unreadable", "readable"), ("unwritable", "writable")
            for said, is_so, was_so in zip(words, now, before, strict=True):
                if is_so != was_so:
                    self.add(said[is_so], tier=state.spec.name)
        self._devices = seen
        return True

    # -- what is read

    def page(self, after: int, limit: int, tenant: int | None, what: Sequence[str]) -> dict[str, Any]:
        """Up to `limit` events with numbers above `after`, or the latest `-after`; `next` goes on from there.

        Only of a tenant (None: all), and of these kinds (none: all). A page may be empty before the end: the
        end is where `next` stays. `lost`: how many above `after` were overwritten. Raises MisuseError.
        """
        for kind in what:
            if kind not in KINDS:
                raise MisuseError(f"there is no event {kind!r:.80}", f"there are {', '.join(KINDS)}")
        decisions = self._shell.placement.residency.decisions
        newest = decisions.written + self._dropped + len(self._happenings)
        after = min(after, newest) if after >= 0 else max(0, newest + after)
        begin = max(after, self._lost_up_to)
        passed = bisect_right(self._happenings, begin, key=lambda h: h.number)
        place = begin - self._dropped - passed
        lost = begin - after + max(0, decisions.written - len(decisions) - place)
        kinds = [int(one) for one in DecisionKind if one.name.lower() in what]
        noted: list[Noted] = []
        end = decisions.written
        if kinds or not what:
            noted, end = decisions.after(place, limit, kinds, self._numbers(tenant))
        upto = newest if end >= decisions.written else self._number(end - 1)
        events = [self._decided(one) for one in noted]
        events += [self._told(h) for h in self._between(passed, upto, tenant, what)]
        events.sort(key=lambda event: int(event["number"]))
        if len(events) > limit:
            del events[limit:]
            upto = events[-1]["number"]
        return {"events": events, "next": upto, "lost": lost, "instance": self._shell.instance.hex()}

    def _between(self, passed: int, upto: int, tenant: int | None, what: Sequence[str]) -> Iterable[LogEntry]:
        name = None if tenant is None else self._shell.tenancy.registry.name(tenant)
        for happening in self._happenings[passed:]:
            if happening.number > upto:
                return
            if (not what or happening.what in what) and name in (None, happening.tenant):
                yield happening

    def _numbers(self, tenant: int | None) -> list[int] | None:
        """The numbers that a tenant's namespaces have, or had."""
        if tenant is None:
            return None
        name = self._shell.tenancy.registry.name(tenant)
        had = [number for number, (owner, _) in self._closed.items() if owner == name]
        return had + [space.number for space in self._shell.namespaces.of(tenant)]

    def _names(self, number: int) -> tuple[str, str]:
        """Whose a namespace is or was, and its id."""
        space = self._shell.namespaces.at(number)
        if space is None:
            return self._closed.get(number, ("", ""))
        return self._shell.tenancy.registry.name(space.tenant), space.fingerprint.hex()

    def _number(self, place: int) -> int:
        """The number of the decision before which there were so many."""
        before = bisect_right(self._happenings, place, key=lambda h: h.place)
        return place + self._dropped + before + 1

    def _decided(self, noted: Noted) -> dict[str, Any]:
        decision, shell = noted.decision, self._shell
        tenant, namespace = self._names(noted.namespace)
        tier = EVERY_TIER if decision.tier is None else decision.tier
        tiers = shell.placement.residency.tiers
        return {
            "number": self._number(noted.place),
            "at_s": self._unix_s(decision.at),
            "what": decision.what.name.lower(),
            "tier": "" if tier == EVERY_TIER else tiers[tier].spec.name,
            "tenant": tenant,
            "namespace": namespace,
            "key": noted.key.hex(),
            "score": decision.score,
            "detail": "",
        }

    def _told(self, happening: LogEntry) -> dict[str, Any]:
        rest = {"key": "", "score": None, "detail": happening.detail}
        names = {"tier": happening.tier, "tenant": happening.tenant, "namespace": happening.namespace}
        at_s = self._unix_s(happening.at)
        return {"number": happening.number, "at_s": at_s, "what": happening.what, **names, **rest}

    def _unix_s(self, at: float) -> float:
        return round(self._shell.clock() - (self._shell.now() - at), 3)
