"""The network tier beside the core: blocks that other nodes may have, and that they may want.

A block from the network comes in as a put does, through a reservation, verified before it is committed; a
block goes out from a quiet lease. So the core needs to know of neither, and nothing that the network does
can hold up what this node has. What is there is asked, and believed for a moment (`presence`); objects that
are not what their name says are taken away.

Namespaces whose blocks end by themselves or are encrypted stay on the node: an object has no end, and no key.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.config import Network
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.hit_counters import NETWORK
from kvstore.core.transfers.admission import Rule
from kvstore.core.transfers.devices import DEMAND, PREFETCH
from kvstore.daemon.network.downloads import Download, Downloads
from kvstore.daemon.network.executor import LOOK_EVERY_S, BackendExecutor
from kvstore.daemon.network.existence_cache import ExistenceCache
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Backend, Name, Outcome
from kvstore.types import slot_bytes

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Asker, Shell

_log = logging.getLogger(__name__)

_PROBE_FIRST, _PROBE_MORE = 4, 8
_FLOWS_OF_ONE = 256
_LEFT_S = 0.002
_OBJECTS_AT_ONCE = 1000
_LIST_WITHIN_S = 60.0


class NetworkTier:
    """What one daemon has to do with its network tier."""

    def __init__(self, shell: Shell, backend: Backend, config: Network) -> None:
        self.counters: Counter[str] = Counter()
        self.carrier = BackendExecutor(shell.loop, shell.soon, backend, config.threads, self._changed)
        self.shell = shell
        self.config = config
        self.presence = ExistenceCache(shell.now)
        self.arrivals = Downloads(self)
        self.departures = Uploads(self)
        self._banned: Counter[Name | bytes] = Counter()
        self._owed: set[Name | bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks_of: dict[Asker, set[asyncio.Task[None]]] = {}
        self._shared: Rule | None = None

    def start(self) -> None:
        """From now on it is asked, as soon as it is known to be well."""
        self.carrier.start()

    async def close(self, within_s: float) -> None:
        """Nothing is asked any more; no memory is touched after this, unless a backend breaks its word."""
        for task in list(self._tasks):
            task.cancel()
        await self.carrier.close(within_s)

    def reconfigure(self, config: Network) -> None:
        """Takes over what can change at run time."""
        self.config = config
        self._share()

    def set_tenant(self, event: ev.SetTenant) -> None:
        """A tenant's weight and cap hold here too."""
        self.carrier.device.queue.set(event.tenant, event.weight, event.rate, event.burst)

    def _changed(self, problem: str) -> None:
        """The backend is well again, or is not."""
        self.shell.chronicle.add("network", detail=problem or "is asked from now on")
        self.presence.clear()
        self._share()

    def _share(self) -> None:
        """Has the core offer blocks; after a time without, all that are used from now on."""
        config = self.config
        rule = Rule(config.admission, config.admission_threshold) if self.carrier.usable else None
        if rule != self._shared:
            self._shared = rule
            self.shell.handle(ev.SetSharing(rule))

    # -- whether

    def serves(self, space: NamespaceEntry) -> bool:
        """Whether blocks of a namespace go to the network, and come from there."""
        usable = self.carrier.usable and space.number > 0
        return usable and not self.is_banned(space.fingerprint) and self._shares(space)

    def _shares(self, space: NamespaceEntry) -> bool:
        return not space.ttl_s and not self.shell.tenancy.encrypts(space.tenant)

    def is_banned(self, what: Name | bytes) -> bool:
        """Whether an object, or all of a namespace, is being forgotten, or could not be yet."""
        return self._banned[what] > 0 or what in self._owed

    # -- requests

    def lookup(
        self, asker: Asker, request: int, event: ev.Lookup, space: NamespaceEntry, until: float
    ) -> None:
        """Like `Shell.ask`; blocks on the network count too, as far as they are known in time."""

        def further() -> bool:
            return self.serves(space) and self._may_ask(asker)

        def more(action: Any) -> None:
            if isinstance(action, ac.Found) and action.value < event.keys.n and further():
                flow = self._look_further(asker, request, event, space, action, until)
                self._begin(asker, flow, space)
            else:
                asker.answer(request, action)

        self.shell.ask(_Then(more), request, event)

    async def _look_further(
        self,
        asker: Asker,
        request: int,
        event: ev.Lookup,
        space: NamespaceEntry,
        found: ac.Found,
        until: float,
    ) -> None:
        keys = [event.keys[i] for i in range(found.value, event.keys.n)]
        there = await self._find(space, keys, until)
        n = self._worth(space, there, event.tenant, until, event.recompute_s)
        _add_network(found.stored, found.value + there)
        found.stored.unworthy = found.stored.blocks - found.value - n
        asker.answer(request, ac.Found(request, found.value + n, found.gaps or n > 0, found.stored))

    def acquire(self, asker: Asker, request: int, event: ev.Acquire, space: NamespaceEntry) -> None:
        """Like `Shell.ask`; what only the network has is brought here first, as far as there is time."""
        view, keys = self.shell.placement.view, event.keys
        # Of what is all in memory nothing more need be known.
        if not view.in_memory(event.namespace, keys, event.tier):
            here = view.stored(event.namespace, keys)
            if here < keys.n and self.serves(space) and self._may_ask(asker):
                self._begin(asker, self._acquire(asker, request, event, space, here), space)
                return
        self.shell.ask(asker, request, event)

    async def _acquire(
        self, asker: Asker, request: int, event: ev.Acquire, space: NamespaceEntry, here: int
    ) -> None:
        keys, until = event.keys, event.deadline
        wanted = [keys[i] for i in range(here, keys.n)]
        there = await self._find(space, wanted, until)
        n = self._worth(space, there, event.tenant, until, event.recompute_s)
        before = keys[here - 1] if here else b""
        coming = self.arrivals.fetch(space, wanted[:n], before, event.tenant, DEMAND, until)
        await self._wait(coming, until)
        came, late = _leading(coming), sum(not each.done() for each in coming)
        self.counters["hit_blocks"] += came

        def granted(action: Any) -> None:
            if isinstance(action, ac.Grant):
                _add_network(action.stored, here + there, came)
                action.stored.unworthy += there - n
                action.stored.late += late
                action.sources[here : here + came] = NETWORK
            asker.answer(request, action)

        event.namespace = space.number  # it may have been forgotten meanwhile
        self.shell.ask(_Then(granted), request, event)

    async def has(self, blocks: Sequence[tuple[NamespaceEntry, bytes]]) -> list[bool]:
        """Which blocks the network has by now, that it perhaps had not a moment ago."""
        names = [Name(space.fingerprint, key) for space, key in blocks]
        return await self.probe(names, self.shell.now() + self.config.timeout, fresh=True)

    def prefetch(self, asker: Asker, request: int, event: ev.Prefetch, space: NamespaceEntry) -> None:
        """Like `Shell.ask`; what only the network has starts to come too."""

        def more(action: Any) -> None:
            if isinstance(action, ac.Answer) and action.value < event.keys.n and self.serves(space):
                self._begin(asker, self._prefetch(asker, request, event, space, action.value), space)
            else:
                asker.answer(request, action)

        self.shell.ask(_Then(more), request, event)

    async def _prefetch(
        self, asker: Asker, request: int, event: ev.Prefetch, space: NamespaceEntry, here: int
    ) -> None:
        keys = [event.keys[i] for i in range(here, event.keys.n)]
        n = await self._find(space, keys, self.shell.now() + self.config.timeout)
        before = event.keys[here - 1] if here else b""
        self.arrivals.fetch(space, keys[:n], before, event.tenant, PREFETCH, 0.0)
        asker.answer(request, ac.Answer(request, here + n))

    def hand_off(
        self, asker: Asker, request: int, space: NamespaceEntry, keys: Keys, tenant: int, until: float
    ) -> None:
        """Answers how many leading blocks the network has, when all of those here are there, or in time."""
        if self.serves(space):
            self._begin(asker, self._hand_off(asker, request, space, keys, tenant, until), space)
        else:
            why = self.carrier.problem or "this namespace's blocks stay on the node"
            hint = "see network in `kvstore status`" if self.carrier.problem else "they end, or are encrypted"
            asker.answer(request, ac.Deny(request, f"nothing is handed off: {why}", hint))

    async def _hand_off(
        self, asker: Asker, request: int, space: NamespaceEntry, keys: Keys, tenant: int, until: float
    ) -> None:
        here = self.shell.placement.view.stored(space.number, keys)
        going = self.departures.send(space, [keys[i] for i in range(here)], tenant, DEMAND)
        await self._wait(going, until)
        asker.answer(request, ac.Answer(request, _leading(going)))

    def _may_ask(self, asker: Asker) -> bool:
        """Whether one asker may have one flow more: who asks for too much gets what is here."""
        return len(self._tasks_of.get(asker, ())) < _FLOWS_OF_ONE

    def leave(self, asker: Asker) -> None:
        """Answers to this asker are no longer wanted; what is on its way for it goes on."""
        for task in self._tasks_of.pop(asker, ()):
            task.cancel()

    def begin(self, flow: Coroutine[Any, Any, None], space: NamespaceEntry | None = None) -> None:
        """Lets something go on by itself; a namespace that it is about is not closed before its end."""
        self._begin(None, flow, space)

    def _begin(
        self, asker: Asker | None, flow: Coroutine[Any, Any, None], space: NamespaceEntry | None = None
    ) -> None:
        if space is not None:
            self.shell.namespaces.use(space)
        task = self.shell.loop.create_task(flow)
        self._tasks.add(task)
        if asker is not None:
            self._tasks_of.setdefault(asker, set()).add(task)
        task.add_done_callback(partial(self._ended, asker, space))

    def _ended(self, asker: Asker | None, space: NamespaceEntry | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if space is not None:
            self.shell.namespaces.drop(space)
        if asker is not None and asker in self._tasks_of:
            self._tasks_of[asker].discard(task)
            if not self._tasks_of[asker]:
                del self._tasks_of[asker]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request to the network tier failed", exc_info=error)

    async def core(self, event: Any) -> Any:
        """The core's answer to an event of one's own."""
        answer: asyncio.Future[Any] = self.shell.loop.create_future()

        def answered(action: Any) -> None:
            if not answer.done():  # the flow may have been cancelled
                answer.set_result(action)

        self.shell.ask(_Then(answered), 0, event)
        return await answer

    async def _wait(self, coming: Sequence[Download], until: float) -> None:
        left = until - _LEFT_S - self.shell.now()
        if coming and left > 0:
            await asyncio.wait(set(coming), timeout=left)

    # -- what is there, and what that is worth

    async def _find(self, space: NamespaceEntry, keys: Sequence[bytes], until: float) -> int:
        """How many leading blocks the network seems to have: a few are asked, then more, then many."""
        n, step = 0, _PROBE_FIRST
        while n < len(keys):
            some = [Name(space.fingerprint, key) for key in keys[n : n + step]]
            there = await self.probe(some, until)
            n += there.index(False) if False in there else len(there)
            if False in there:
                break
            step *= _PROBE_MORE
        return n

    async def probe(self, names: Sequence[Name], until: float, fresh: bool = False) -> list[bool]:
        """Which of these seem to be there. `fresh`: what was not there a moment ago may be now."""
        known = (True,) if fresh else (True, False)
        unknown = [name for name in dict.fromkeys(names) if self.presence.of(name) not in known]
        within_s = min(until - _LEFT_S - self.shell.now(), self.config.timeout)
        if unknown and within_s > 0 and self.carrier.usable:
            outcomes = await self.carrier.ask(partial(self.carrier.backend.probe, unknown), within_s)
            for name, outcome in zip(unknown, outcomes, strict=False):
                if outcome in (Outcome.OK, Outcome.MISSING):
                    self.presence.note(name, outcome == Outcome.OK)
        return [bool(self.presence.of(name)) and not self.is_banned(name) for name in names]

    def _worth(self, space: NamespaceEntry, n: int, tenant: int, until: float, recompute_s: float) -> int:
        """How many of so many blocks are worth loading: in time, and sooner than they are computed."""
        now, device = self.shell.now(), self.carrier.device
        one_s = slot_bytes(space.block_bytes) / device.share_of(now, tenant)
        numbers = np.arange(1, n + 1)
        load_s = device.wait_s(now, tenant, 0) + numbers * one_s
        good = load_s <= max(0.0, until - now)
        if recompute_s:
            good &= load_s <= numbers * recompute_s
        last = np.flatnonzero(good)
        return int(last[-1]) + 1 if len(last) else 0

    # -- forgetting

    def forget(
        self,
        asker: Asker,
        request: int,
        spaces: Sequence[NamespaceEntry],
        keys: Sequence[bytes] | None,
        here: Callable[[Asker], None],
    ) -> None:
        """Has `here` forget blocks on this node, and takes them off the network before that is answered.

        All blocks of these namespaces, or `keys` of the one. Until then none of them comes from there.
        """
        shared = [space for space in spaces if self._shares(space)]
        if not shared:
            here(asker)
            return
        banned: list[Name | bytes] = [space.fingerprint for space in shared]
        if keys is not None:
            banned = [Name(shared[0].fingerprint, key) for key in keys]
        self._banned.update(banned)
        # What is on its way there now must be there before it is taken away.
        going = self.departures.of(set(banned))

        def then(action: Any) -> None:
            if isinstance(action, ac.Deny):
                self._banned -= Counter(banned)
                asker.answer(request, action)
            else:
                self.begin(self._forget(asker, request, action, banned, going))

        here(_Then(then))

    async def _forget(
        self, asker: Asker, request: int, answer: Any, banned: list[Name | bytes], going: list[Download]
    ) -> None:
        if going:
            await asyncio.wait(going)
        if await self._remove(banned):
            self._owed.difference_update(banned)
        else:
            self._owe(banned)
            why = f"forgotten here, but not on the network: {self.carrier.problem or 'it did not answer'}"
            answer = ac.Deny(request, why, "this node tries again, and serves nothing of it meanwhile")
        self._banned -= Counter(banned)
        asker.answer(request, answer)

    def _owe(self, what: Sequence[Name | bytes]) -> None:
        """Takes away later what could not be when it was forgotten."""
        if not self._owed:
            self.begin(self._make_good())
        self._owed.update(what)

    async def _make_good(self) -> None:
        while self._owed:
            await asyncio.sleep(LOOK_EVERY_S)
            owed = list(self._owed)
            if self.carrier.usable and await self._remove(owed):
                self._owed.difference_update(owed)

    async def _remove(self, what: Sequence[Name | bytes]) -> bool:
        """Whether none of these objects, and nothing of these namespaces, is there any more."""
        gone = await self._delete([each for each in what if isinstance(each, Name)])
        for each in what:
            if isinstance(each, bytes):
                gone = await self._empty(each) and gone
        return gone

    async def _delete(self, names: Sequence[Name]) -> bool:
        """Whether none of these is there any more."""
        for at in range(0, len(names), _OBJECTS_AT_ONCE):
            some = names[at : at + _OBJECTS_AT_ONCE]
            outcomes = await self.carrier.ask(partial(self.carrier.backend.delete, some), self.config.timeout)
            if list(outcomes) != [Outcome.OK] * len(some):
                return False
            for name in some:
                self.presence.note(name, there=False)
        return True

    async def _empty(self, fingerprint: bytes) -> bool:
        """Whether nothing of a namespace is there any more."""

        def listed(ends: float) -> list[Name]:
            return [each.name for each in self.carrier.backend.list(fingerprint, ends)]

        try:
            names = await self.carrier.walk(listed, _LIST_WITHIN_S)
        except Exception as error:
            _log.warning("a namespace could not be taken off the network: %s", error)
            return False
        return await self._delete(names)

    # -- status

    def status(self) -> dict[str, Any]:
        """What `kvstore status` shows: plain values only."""
        carrier = self.carrier
        return {
            "kind": carrier.backend.kind,
            "usable": carrier.usable,
            "problem": carrier.problem,
            "bandwidth_bytes_per_s": round(carrier.device.bandwidth(self.shell.now())),
            "coming_blocks": len(self.arrivals),
            "going_blocks": len(self.departures),
            "owed_removals": len(self._owed),
            "counters": dict(self.counters),
        }


class _Then:
    """An asker of one's own."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def answer(self, request: int, action: Any) -> None:
        """See Asker."""
        self._then(action)


def _add_network(stored: ac.Stored, known: int, came: int = 0) -> None:
    """Adds what the network has of `known` leading blocks; `came` of these are in DRAM by now."""
    by_tier = stored.by_tier
    only_there = max(0, known - stored.blocks)
    came = min(came, by_tier.get(0, 0))
    if came:
        by_tier[0] -= came
    if came + only_there:
        by_tier[NETWORK] = came + only_there


def _leading(coming: Sequence[Download]) -> int:
    n = 0
    for each in coming:
        if not (each.done() and not each.cancelled() and each.result()):
            break
        n += 1
    return n
