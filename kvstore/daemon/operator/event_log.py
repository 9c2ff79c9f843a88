"""The event log for operators: eviction decisions, and entries about the daemon, read in pages.

Events are numbered from the start of the daemon. The core has a ring of decisions. Entries about the daemon
are rare, so they outlast decisions of the same time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.residency.decision_log import EVERY_TIER, DecisionKind, Noted
from kvstore.core.view import Health
from kvstore.daemon.operator.command import command
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.errors import MisuseError

_log = logging.getLogger(__name__)

MOST_EVENTS = 64
"""Events on one page. A longer page would delay other requests."""

MOST_ENTRIES = 4096
"""The latest entries, which are never overwritten."""
_MOST_CLOSED = 4096

KINDS = tuple(dict.fromkeys([*(kind.name.lower() for kind in DecisionKind), *map(str, EntryKind)]))
"""All kinds of events."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry about the daemon. `decisions`: number of earlier decisions."""

    number: int
    decisions: int
    at: float
    what: EntryKind
    tier: str
    tenant: str
    namespace: str
    detail: str


@dataclass(slots=True, eq=False)
class EventLog:
    """The event log of the daemon with the id `_instance`. `_clock` returns Unix time in s."""

    _core: Executor
    _namespaces: Namespaces
    _authenticator: Authenticator
    _instance: bytes
    _clock: Callable[[], float]
    _max_entries: int = MOST_ENTRIES
    _entries: list[LogEntry] = field(default_factory=list, init=False)
    _dropped: int = field(default=0, init=False)
    _lost_up_to: int = field(default=0, init=False)
    _closed: dict[int, tuple[str, str]] = field(default_factory=dict, init=False)
    _devices: list[tuple[bool, bool, bool]] = field(default_factory=list, init=False)

    # -- writing

    def add(
        self, what: EntryKind, *, tier: str = "", tenant: str = "", namespace: str = "", detail: str = ""
    ) -> None:
        """Adds an entry with the current time."""
        decisions = self._core.view.decisions.written
        number = decisions + self._dropped + len(self._entries) + 1
        entry = LogEntry(number, decisions, self._core.now(), what, tier, tenant, namespace, detail)
        self._entries.append(entry)
        if len(self._entries) > 2 * self._max_entries:
            self._lost_up_to = self._entries[self._max_entries - 1].number
            self._dropped += self._max_entries
            del self._entries[: self._max_entries]

    def closed(self, number: int, tenant: str, namespace: str) -> None:
        """Keeps the names of a closed namespace for decisions about its number."""
        self._closed.pop(number, None)
        self._closed[number] = tenant, namespace
        if len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def opened(self, number: int) -> None:
        """Forgets the closed namespace of a number that is reused."""
        self._closed.pop(number, None)

    def look_at_devices(self) -> bool:
        """Adds an entry for each device with a changed state. Returns whether it added any."""
        tiers = self._core.view.tiers
        seen = [_states(tier.health()) for tier in tiers]
        if seen == self._devices:
            return False
        for tier, now, before in zip(tiers, seen, self._devices, strict=False):
            for kinds, is_so, was_so in zip(_CHANGES, now, before, strict=True):
                if is_so != was_so:
                    self.add(kinds[is_so], tier=tier.name)
                    _log.warning("%s: %s", tier.name, kinds[is_so].meaning)
        self._devices = seen
        return True

    # -- reading

    @command
    def events(
        self, after: int = 0, limit: int = MOST_EVENTS, tenant: str = "", what: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Returns events after the event of number `after`, the oldest first. See `page`."""
        if not 1 <= limit <= MOST_EVENTS:
            raise MisuseError(f"limit is {limit}", f"1 to {MOST_EVENTS}")
        return self.page(after, limit, self._authenticator.existing(tenant) if tenant else None, what)

    def page(self, after: int, limit: int, tenant: int | None, what: Sequence[str]) -> dict[str, Any]:
        """Returns at most `limit` events with numbers above `after`. A negative `after`: the latest `-after`.

        `tenant` None: of all tenants; `what` empty: of all kinds. `next` is the `after` of the next page. A
        page may be empty before the end of the log: at the end, `next` stays the same. `lost` counts events
        above `after` that were overwritten. Raises MisuseError for an unknown kind.
        """
        for kind in what:
            if kind not in KINDS:
                raise MisuseError(f"there is no event {kind!r:.80}", f"there are {', '.join(KINDS)}")
        decisions = self._core.view.decisions
        newest = decisions.written + self._dropped + len(self._entries)
        after = min(after, newest) if after >= 0 else max(0, newest + after)
        begin = max(after, self._lost_up_to)
        passed = bisect_right(self._entries, begin, key=lambda entry: entry.number)
        place = begin - self._dropped - passed
        lost = begin - after + max(0, decisions.written - len(decisions) - place)
        kinds = [int(one) for one in DecisionKind if one.name.lower() in what]
        noted: list[Noted] = []
        end = decisions.written
        if kinds or not what:
            noted, end = decisions.after(place, limit, kinds, self._numbers(tenant))
        upto = newest if end >= decisions.written else self._number(end - 1)
        events = [self._from_decision(one) for one in noted]
        events += [self._from_entry(entry) for entry in self._between(passed, upto, tenant, what)]
        events.sort(key=lambda event: int(event["number"]))
        if len(events) > limit:
            del events[limit:]
            upto = events[-1]["number"]
        return {"events": events, "next": upto, "lost": lost, "instance": self._instance.hex()}

    def _between(self, passed: int, upto: int, tenant: int | None, what: Sequence[str]) -> Iterable[LogEntry]:
        name = None if tenant is None else self._authenticator.name(tenant)
        for entry in self._entries[passed:]:
            if entry.number > upto:
                return
            if (not what or entry.what in what) and name in (None, entry.tenant):
                yield entry

    def _numbers(self, tenant: int | None) -> list[int] | None:
        """Returns the numbers that a tenant's namespaces have or had. None: all numbers."""
        if tenant is None:
            return None
        name = self._authenticator.name(tenant)
        had = [number for number, (owner, _) in self._closed.items() if owner == name]
        return had + [namespace.number for namespace in self._namespaces.of(tenant)]

    def _names(self, number: int) -> tuple[str, str]:
        """Returns the tenant and the id of a namespace, open or closed."""
        found = self._namespaces.at(number)
        if found is None:
            return self._closed.get(number, ("", ""))
        return self._authenticator.name(found.tenant), found.fingerprint.hex()

    def _number(self, place: int) -> int:
        """Returns the event number of the decision at `place`, the number of earlier decisions."""
        before = bisect_right(self._entries, place, key=lambda entry: entry.decisions)
        return place + self._dropped + before + 1

    def _from_decision(self, noted: Noted) -> dict[str, Any]:
        decision = noted.decision
        tenant, namespace = self._names(noted.namespace)
        tier = EVERY_TIER if decision.tier is None else decision.tier
        tiers = self._core.view.tiers
        return {
            "number": self._number(noted.place),
            "at_s": self._unix_s(decision.at),
            "what": decision.what.name.lower(),
            "tier": "" if tier == EVERY_TIER else tiers[tier].name,
            "tenant": tenant,
            "namespace": namespace,
            "key": noted.key.hex(),
            "score": decision.score,
            "detail": "",
        }

    def _from_entry(self, entry: LogEntry) -> dict[str, Any]:
        rest = {"key": "", "score": None, "detail": entry.detail}
        names = {"tier": entry.tier, "tenant": entry.tenant, "namespace": entry.namespace}
        at_s = self._unix_s(entry.at)
        return {"number": entry.number, "at_s": at_s, "what": entry.what.value, **names, **rest}

    def _unix_s(self, at: float) -> float:
        return round(self._clock() - (self._core.now() - at), 3)


_CHANGES = (
    (EntryKind.UNFENCED, EntryKind.FENCED),
    (EntryKind.UNREADABLE, EntryKind.READABLE),
    (EntryKind.UNWRITABLE, EntryKind.WRITABLE),
)
"""The kind of entry for each of a device's states, by the new value."""


def _states(health: Health) -> tuple[bool, bool, bool]:
    return health.fenced, health.readable, health.writable
