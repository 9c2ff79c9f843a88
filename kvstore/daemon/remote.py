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

from kvstore import arena
from kvstore.config import Network
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.admission import Rule
from kvstore.core.devices import DEMAND, PREFETCH, WRITE_BACK
from kvstore.core.keys import Keys
from kvstore.daemon.carrier import LOOK_EVERY_S, Carrier
from kvstore.daemon.namespaces import Space
from kvstore.daemon.presence import Presence
from kvstore.tiers.network.base import Backend, Name, Object, Outcome
from kvstore.types import slot_bytes

if TYPE_CHECKING:
    from kvstore.daemon.shell import Asker, Shell

_log = logging.getLogger(__name__)

CLIENT = -1
"""Who the core takes this for: no connection has this number."""

_BATCH_BYTES = 4 << 20
_BATCH_BLOCKS = 32
_PROBE_FIRST, _PROBE_MORE = 4, 8
_OFFERS_WAITING = 1 << 14
_FLOWS_OF_ONE = 256
_LEFT_S = 0.002
_OBJECTS_AT_ONCE = 1000
_LIST_WITHIN_S = 60.0

Coming = asyncio.Future[bool]


class Remote:
    """What one daemon has to do with its network tier."""

    def __init__(self, shell: Shell, backend: Backend, config: Network) -> None:
        self.counters: Counter[str] = Counter()
        self.carrier = Carrier(shell.loop, backend, config.threads, self._changed)
        self._shell = shell
        self._config = config
        self._presence = Presence(shell.now)
        self._coming: dict[Name, Coming] = {}
        self._going: dict[Name, Coming] = {}
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
        self._config = config
        self._share()

    def set_tenant(self, event: ev.SetTenant) -> None:
        """A tenant's weight and cap hold here too."""
        self.carrier.device.queue.set(event.tenant, event.weight, event.rate, event.burst)

    def _changed(self, problem: str) -> None:
        """The backend is well again, or is not."""
        self._shell.chronicle.add("network", detail=problem or "is asked from now on")
        self._presence.clear()
        self._share()

    def _share(self) -> None:
        """Has the core offer blocks; after a time without, all that are used from now on."""
        config = self._config
        rule = Rule(config.admission, config.admission_threshold) if self.carrier.usable else None
        if rule != self._shared:
            self._shared = rule
            self._shell.handle(ev.SetSharing(rule))

    # -- whether

    def serves(self, space: Space) -> bool:
        """Whether blocks of a namespace go to the network, and come from there."""
        usable = self.carrier.usable and space.number > 0
        return usable and not self._is_banned(space.fingerprint) and self._shares(space)

    def _shares(self, space: Space) -> bool:
        return not space.ttl_s and not self._shell.tenancy.encrypts(space.tenant)

    def _is_banned(self, what: Name | bytes) -> bool:
        """Whether an object, or all of a namespace, is being forgotten, or could not be yet."""
        return self._banned[what] > 0 or what in self._owed

    def _name(self, space: Space, key: bytes) -> Name:
        return Name(space.fingerprint, key)

    # -- requests

    def lookup(self, asker: Asker, request: int, event: ev.Lookup, space: Space, until: float) -> None:
        """Like `Shell.ask`; blocks on the network count too, as far as they are known in time."""

        def further() -> bool:
            return self.serves(space) and self._may_ask(asker)

        def more(action: Any) -> None:
            if isinstance(action, ac.Found) and action.value < event.keys.n and further():
                self._begin(asker, self._look_further(asker, request, event, space, action, until))
            else:
                asker.answer(request, action)

        self._shell.ask(_Then(more), request, event)

    async def _look_further(
        self, asker: Asker, request: int, event: ev.Lookup, space: Space, found: ac.Found, until: float
    ) -> None:
        keys = [event.keys[i] for i in range(found.value, event.keys.n)]
        n = await self._find(space, keys, until)
        n = self._worth(space, n, event.tenant, until, event.recompute_s)
        asker.answer(request, ac.Found(request, found.value + n, gaps=found.gaps or n > 0))

    def acquire(self, asker: Asker, request: int, event: ev.Acquire, space: Space) -> None:
        """Like `Shell.ask`; what only the network has is brought here first, as far as there is time."""
        here = self._shell.placement.stored(event.namespace, event.keys)
        if here < event.keys.n and self.serves(space) and self._may_ask(asker):
            self._begin(asker, self._acquire(asker, request, event, space, here))
        else:
            self._shell.ask(asker, request, event)

    async def _acquire(self, asker: Asker, request: int, event: ev.Acquire, space: Space, here: int) -> None:
        keys, until = event.keys, event.deadline
        wanted = [keys[i] for i in range(here, keys.n)]
        n = await self._find(space, wanted, until)
        n = self._worth(space, n, event.tenant, until, event.recompute_s)
        before = keys[here - 1] if here else b""
        coming = self._fetch(space, wanted[:n], before, event.tenant, DEMAND, until)
        await self._wait(coming, until)
        self.counters["hit_blocks"] += _leading(coming)
        self._shell.ask(asker, request, event)

    async def has(self, space: Space, key: bytes, until: float) -> bool:
        """Whether the network has a block by now, that it perhaps had not a moment ago."""
        if not self.serves(space):
            return False
        [there] = await self._probe([self._name(space, key)], until, fresh=True)
        return there

    def prefetch(self, asker: Asker, request: int, event: ev.Prefetch, space: Space) -> None:
        """Like `Shell.ask`; what only the network has starts to come too."""

        def more(action: Any) -> None:
            if isinstance(action, ac.Answer) and action.value < event.keys.n and self.serves(space):
                self._begin(asker, self._prefetch(asker, request, event, space, action.value))
            else:
                asker.answer(request, action)

        self._shell.ask(_Then(more), request, event)

    async def _prefetch(
        self, asker: Asker, request: int, event: ev.Prefetch, space: Space, here: int
    ) -> None:
        keys = [event.keys[i] for i in range(here, event.keys.n)]
        n = await self._find(space, keys, self._shell.now() + self._config.timeout)
        before = event.keys[here - 1] if here else b""
        self._fetch(space, keys[:n], before, event.tenant, PREFETCH, 0.0)
        asker.answer(request, ac.Answer(request, here + n))

    def hand_off(
        self, asker: Asker, request: int, space: Space, keys: Keys, tenant: int, until: float
    ) -> None:
        """Answers how many leading blocks the network has, when all of those here are there, or in time."""
        if self.serves(space):
            self._begin(asker, self._hand_off(asker, request, space, keys, tenant, until))
        else:
            why = self.carrier.problem or "this namespace's blocks stay on the node"
            hint = "see network in `kvstore status`" if self.carrier.problem else "they end, or are encrypted"
            asker.answer(request, ac.Deny(request, f"nothing is handed off: {why}", hint))

    async def _hand_off(
        self, asker: Asker, request: int, space: Space, keys: Keys, tenant: int, until: float
    ) -> None:
        here = self._shell.placement.stored(space.number, keys)
        going = self._send(space, [keys[i] for i in range(here)], tenant, DEMAND)
        await self._wait(going, until)
        asker.answer(request, ac.Answer(request, _leading(going)))

    def _may_ask(self, asker: Asker) -> bool:
        """Whether one asker may have one flow more: who asks for too much gets what is here."""
        return len(self._tasks_of.get(asker, ())) < _FLOWS_OF_ONE

    def leave(self, asker: Asker) -> None:
        """Answers to this asker are no longer wanted; what is on its way for it goes on."""
        for task in self._tasks_of.pop(asker, ()):
            task.cancel()

    def _begin(self, asker: Asker | None, flow: Coroutine[Any, Any, None]) -> None:
        task = self._shell.loop.create_task(flow)
        self._tasks.add(task)
        if asker is not None:
            self._tasks_of.setdefault(asker, set()).add(task)
        task.add_done_callback(partial(self._ended, asker))

    def _ended(self, asker: Asker | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if asker is not None and asker in self._tasks_of:
            self._tasks_of[asker].discard(task)
            if not self._tasks_of[asker]:
                del self._tasks_of[asker]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request to the network tier failed", exc_info=error)

    async def _ask(self, event: Any) -> Any:
        """The core's answer to an event of one's own."""
        answer: asyncio.Future[Any] = self._shell.loop.create_future()
        self._shell.ask(_Then(answer.set_result), 0, event)
        return await answer

    async def _wait(self, coming: Sequence[Coming], until: float) -> None:
        left = until - _LEFT_S - self._shell.now()
        if coming and left > 0:
            await asyncio.wait(set(coming), timeout=left)

    # -- what is there, and what that is worth

    async def _find(self, space: Space, keys: Sequence[bytes], until: float) -> int:
        """How many leading blocks the network seems to have: a few are asked, then more, then many."""
        n, step = 0, _PROBE_FIRST
        while n < len(keys):
            some = [self._name(space, key) for key in keys[n : n + step]]
            there = await self._probe(some, until)
            n += there.index(False) if False in there else len(there)
            if False in there:
                break
            step *= _PROBE_MORE
        return n

    async def _probe(self, names: Sequence[Name], until: float, fresh: bool = False) -> list[bool]:
        """Which of these seem to be there. `fresh`: what was not there a moment ago may be now."""
        known = (True,) if fresh else (True, False)
        unknown = [name for name in names if self._presence.of(name) not in known]
        within_s = min(until - _LEFT_S - self._shell.now(), self._config.timeout)
        if unknown and within_s > 0 and self.carrier.usable:
            outcomes = await self.carrier.ask(partial(self.carrier.backend.probe, unknown), within_s)
            for name, outcome in zip(unknown, outcomes, strict=False):
                if outcome in (Outcome.OK, Outcome.MISSING):
                    self._presence.note(name, outcome == Outcome.OK)
        return [bool(self._presence.of(name)) and not self._is_banned(name) for name in names]

    def _worth(self, space: Space, n: int, tenant: int, until: float, recompute_s: float) -> int:
        """How many of so many blocks are worth loading: in time, and sooner than they are computed."""
        now, device = self._shell.now(), self.carrier.device
        one_s = slot_bytes(space.block_bytes) / device.share_of(now, tenant)
        numbers = np.arange(1, n + 1)
        load_s = device.wait_s(now, tenant, 0) + numbers * one_s
        good = load_s <= max(0.0, until - now)
        if recompute_s:
            good &= load_s <= numbers * recompute_s
        last = np.flatnonzero(good)
        return int(last[-1]) + 1 if len(last) else 0

    # -- coming in

    def _fetch(
        self, space: Space, keys: Sequence[bytes], before: bytes, tenant: int, kind: int, until: float
    ) -> list[Coming]:
        """Starts to bring a chain here, behind the key `before`; those on their way are joined."""
        coming: list[Coming] = []
        batch: list[bytes] = []
        most = _most(space)
        for i, key in enumerate(keys):
            known = self._coming.get(self._name(space, key))
            if known is None:
                known = self._coming[self._name(space, key)] = self._shell.loop.create_future()
                batch.append(key)
            coming.append(known)
            ends = i + 1 == len(keys) or self._name(space, keys[i + 1]) in self._coming or len(batch) == most
            if batch and ends:
                first = i + 1 - len(batch)
                parent = keys[first - 1] if first else before
                self._begin(None, self._load(space, space.number, batch, parent, tenant, kind, until))
                batch = []
        return coming

    async def _load(
        self,
        space: Space,
        number: int,
        keys: list[bytes],
        parent: bytes,
        tenant: int,
        kind: int,
        until: float,
    ) -> None:
        """Brings one batch here, when it is its turn."""
        nbytes, good = len(keys) * slot_bytes(space.block_bytes), set[bytes]()
        try:
            if await self.carrier.turn(tenant, kind, nbytes):
                moved = 0
                try:
                    good, moved = await self._read(space, number, keys, parent, until)
                finally:
                    self.carrier.done(kind, nbytes, moved)
        finally:
            for key in keys:
                _settle(self._coming.pop(self._name(space, key)), key in good)

    async def _read(
        self, space: Space, number: int, keys: list[bytes], parent: bytes, until: float
    ) -> tuple[set[bytes], int]:
        """Which blocks of a batch are here, and how many bytes came."""
        if space.number != number or not self.serves(space):
            return set(), 0
        joined = Keys(b"".join(keys), len(keys[0]))
        room = await self._ask(ev.Reserve(0, CLIENT, number, joined, parent, until, loading=True))
        if isinstance(room, ac.Deny):
            return set(), 0
        here = {key for key, status in zip(keys, room.status, strict=True) if status == ac.PRESENT}
        if not room.lease:
            return here, 0
        wanted = [key for key, status in zip(keys, room.status, strict=True) if status == ac.GRANTED]
        slots = self._shell.dram.slots(room.where)
        objects = [
            Object(self._name(space, key), space.block_bytes, slot)
            for key, slot in zip(wanted, slots, strict=True)
        ]
        outcomes = await self._read_hedged(objects)
        # What was forgotten meanwhile must not come back.
        written = np.array(
            [o == Outcome.OK and not self._is_banned(t.name) for o, t in zip(outcomes, objects, strict=True)]
        )
        sums = np.array([thing.checksum for thing in objects], np.uint64)
        await self._ask(ev.Commit(0, CLIENT, room.lease, sums, written))
        self._tell("read", objects, outcomes)
        moved = int(written.sum()) * space.block_bytes
        return here | {key for key, ok in zip(wanted, written, strict=True) if ok}, moved

    async def _read_hedged(self, objects: list[Object]) -> list[Outcome]:
        """Reads objects; those that take too long once more, if that is configured."""
        backend, timeout_s, first_s = self.carrier.backend, self._config.timeout, self._config.hedge_after
        if not 0 < first_s < timeout_s:
            outcomes = await self.carrier.move(partial(backend.read, objects), timeout_s)
            return outcomes or [Outcome.FAILED] * len(objects)
        outcomes = await self.carrier.try_move(partial(backend.read, objects), first_s)
        outcomes = outcomes or [Outcome.FAILED] * len(objects)
        late = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
        if late:
            self.counters["hedged_blocks"] += len(late)
            again = partial(backend.read, [objects[i] for i in late])
            for i, outcome in zip(late, await self.carrier.move(again, timeout_s - first_s), strict=False):
                outcomes[i] = outcome
        return outcomes

    def _tell(self, did: str, objects: Sequence[Object], outcomes: Sequence[Outcome]) -> None:
        """Counts what became of objects, and remembers which are there."""
        for thing, outcome in zip(objects, outcomes, strict=True):
            self.counters[f"{did}_{outcome.name.lower()}_blocks"] += 1
            if outcome != Outcome.FAILED:
                self._presence.note(thing.name, outcome == Outcome.OK)
        torn = [t.name for t, outcome in zip(objects, outcomes, strict=True) if outcome == Outcome.TORN]
        if torn:
            _log.warning("%d objects on the network are not what their names say: taken away", len(torn))
            self._begin(None, self._take_away(torn))

    async def _take_away(self, names: Sequence[Name]) -> None:
        await self.carrier.ask(partial(self.carrier.backend.delete, names), self._config.timeout)

    # -- going out

    def offer(self, action: ac.Offer) -> None:
        """Blocks that other nodes may want: sent when nothing else is to do."""
        identity = action.identity
        for number in np.unique(identity.namespace).tolist():
            space = self._shell.namespaces.at(number)
            if space is None or not self.serves(space):
                continue
            keys = [identity.key(i) for i in np.flatnonzero(identity.namespace == number).tolist()]
            if len(self._going) + len(keys) > _OFFERS_WAITING:
                self.counters["dropped_offers"] += len(keys)
                continue
            for length in {len(key) for key in keys}:
                self._send(space, [key for key in keys if len(key) == length], space.tenant, WRITE_BACK)

    def _send(self, space: Space, keys: Sequence[bytes], tenant: int, kind: int) -> list[Coming]:
        """Starts to send blocks; those on their way are joined, unless they wait and this is urgent."""
        going: list[Coming] = []
        batch: list[bytes] = []
        for key in keys:
            known = self._going.get(self._name(space, key))
            if known is None or kind == DEMAND:
                known = self._going[self._name(space, key)] = self._shell.loop.create_future()
                batch.append(key)
            going.append(known)
        most = _most(space)
        for at in range(0, len(batch), most):
            some = batch[at : at + most]
            futures = [self._going[self._name(space, key)] for key in some]
            self._begin(None, self._store(space, space.number, some, futures, tenant, kind))
        return going

    async def _store(
        self,
        space: Space,
        number: int,
        keys: list[bytes],
        futures: list[Coming],
        tenant: int,
        kind: int,
    ) -> None:
        """Sends one batch, when it is its turn."""
        nbytes, good = len(keys) * slot_bytes(space.block_bytes), set[bytes]()
        try:
            if await self.carrier.turn(tenant, kind, nbytes):
                moved = 0
                try:
                    good, moved = await self._write(space, number, keys, kind)
                finally:
                    self.carrier.done(kind, nbytes, moved)
        finally:
            for key, future in zip(keys, futures, strict=True):
                if self._going.get(name := self._name(space, key)) is future:
                    del self._going[name]
                _settle(future, key in good)

    async def _write(self, space: Space, number: int, keys: list[bytes], kind: int) -> tuple[set[bytes], int]:
        """Which blocks of a batch the network has, and how many bytes went there."""
        if space.number != number or not self.serves(space):
            return set(), 0
        until = self._shell.now() + self._config.timeout
        known = await self._probe([self._name(space, key) for key in keys], until)
        there = {key for key, seen in zip(keys, known, strict=True) if seen}
        moved, left = 0, [key for key in keys if key not in there]
        while left:
            sent, outcomes = await self._write_run(space, number, left, kind, until)
            good = {t.name.key for t, o in zip(sent, outcomes, strict=True) if o == Outcome.OK}
            there |= good
            moved += len(good) * space.block_bytes
            # What has gone from memory meanwhile is left out.
            left = left[max(1, len(sent)) :]
            if sent and not good:
                break
        return there, moved

    async def _write_run(
        self, space: Space, number: int, keys: list[bytes], kind: int, until: float
    ) -> tuple[list[Object], list[Outcome]]:
        """Sends the leading blocks that are in memory, or for somebody who waits, anywhere on this node."""
        deadline = until if kind == DEMAND else 0.0
        joined = Keys(b"".join(keys), len(keys[0]))
        event = ev.Acquire(0, CLIENT, number, joined, deadline, space.tenant, quiet=True)
        grant = await self._ask(event)
        if isinstance(grant, ac.Deny) or not grant.lease:
            return [], []
        try:
            n = len(grant.slots)
            sums = grant.checksum.tolist()
            parents = self._shell.placement.parents(number, joined)
            slots = self._shell.dram.slots(grant.where)
            names = [self._name(space, key) for key in keys[:n]]
            objects = [
                Object(names[i], space.block_bytes, slots[i], sums[i], parents[i])
                for i in range(n)
                if not self._is_banned(names[i])
            ]
            write = partial(_write_verified, self.carrier.backend, objects)
            outcomes = await self.carrier.move(write, self._config.timeout) or [Outcome.FAILED] * n
        finally:
            self._shell.handle(ev.Release(CLIENT, grant.lease))
        bad = [t.name.key for t, o in zip(objects, outcomes, strict=False) if o == Outcome.TORN]
        if bad:
            self._shell.handle(ev.Suspect(0, number, Keys(b"".join(bad), len(bad[0]))))
        outcomes = outcomes[: len(objects)]
        for thing, outcome in zip(objects, outcomes, strict=True):
            self.counters[f"written_{outcome.name.lower()}_blocks"] += 1
            if outcome == Outcome.OK:
                self._presence.note(thing.name, there=True)
        return objects, outcomes

    # -- forgetting

    def forget(
        self,
        asker: Asker,
        request: int,
        spaces: Sequence[Space],
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
            banned = [self._name(shared[0], key) for key in keys]
        self._banned.update(banned)
        # What is on its way there now must be there before it is taken away.
        whole = set(banned)
        going = [f for name, f in self._going.items() if name in whole or name.namespace in whole]

        def then(action: Any) -> None:
            if isinstance(action, ac.Deny):
                self._banned -= Counter(banned)
                asker.answer(request, action)
            else:
                self._begin(None, self._forget(asker, request, action, banned, going))

        here(_Then(then))

    async def _forget(
        self, asker: Asker, request: int, answer: Any, banned: list[Name | bytes], going: list[Coming]
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
            self._begin(None, self._make_good())
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
            outcomes = await self.carrier.ask(
                partial(self.carrier.backend.delete, some), self._config.timeout
            )
            if list(outcomes) != [Outcome.OK] * len(some):
                return False
            for name in some:
                self._presence.note(name, there=False)
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
            "bandwidth_bytes_per_s": round(carrier.device.bandwidth(self._shell.now())),
            "coming_blocks": len(self._coming),
            "going_blocks": len(self._going),
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


def _most(space: Space) -> int:
    """Blocks in a batch: enough to be worth a call, few enough that the first ones arrive soon."""
    return min(_BATCH_BLOCKS, max(1, _BATCH_BYTES // slot_bytes(space.block_bytes)))


def _leading(coming: Sequence[Coming]) -> int:
    n = 0
    for each in coming:
        if not (each.done() and not each.cancelled() and each.result()):
            break
        n += 1
    return n


def _settle(future: Coming, good: bool) -> None:
    if not future.done():
        future.set_result(good)


def _write_verified(backend: Backend, objects: Sequence[Object], ends: float) -> list[Outcome]:
    """Writes those whose bytes are what they should be; the others are TORN."""
    good = []
    for thing in objects:
        name = thing.name
        seed = arena.seed(name.namespace, name.key, thing.length)
        good.append(arena.checksum(thing.memory[: thing.length], seed) == thing.checksum)
    some = [thing for thing, ok in zip(objects, good, strict=True) if ok]
    outcomes = iter(backend.write(some, ends) if some else [])
    return [next(outcomes) if ok else Outcome.TORN for ok in good]
