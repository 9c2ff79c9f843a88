"""Blocks on their way to the network: each once, in batches, in turns; verified before they are written."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import arena
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.transfers.devices import DEMAND, WRITE_BACK
from kvstore.daemon.network.executor import CLIENT, batch_blocks
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Backend, Name, Object, Outcome
from kvstore.types import slot_bytes

if TYPE_CHECKING:
    from kvstore.daemon.network.tier import NetworkTier

_OFFERS_WAITING = 1 << 14


@dataclass(slots=True, eq=False)
class Upload:
    """One block: `there` becomes true once the network has it. `started`: no other may send it now."""

    there: asyncio.Future[bool]
    kind: int
    started: bool = False


class Uploads:
    """What goes out, by name."""

    def __init__(self, remote: NetworkTier) -> None:
        self._remote = remote
        self._shell = remote.shell
        self._going: dict[Name, Upload] = {}

    def __len__(self) -> int:
        return len(self._going)

    def of(self, whole: Collection[Name | bytes]) -> list[asyncio.Future[bool]]:
        """Those of these names, or of these namespaces, that are on their way."""
        return [g.there for name, g in self._going.items() if name in whole or name.namespace in whole]

    def offer(self, action: ac.Offer) -> None:
        """Blocks that other nodes may want: sent when nothing else is to do."""
        identity = action.identity
        for number in np.unique(identity.namespace).tolist():
            space = self._shell.namespaces.at(number)
            if space is None or not self._remote.serves(space):
                continue
            keys = [identity.key(i) for i in np.flatnonzero(identity.namespace == number).tolist()]
            if len(self._going) + len(keys) > _OFFERS_WAITING:
                self._remote.counters["dropped_offers"] += len(keys)
                continue
            for length in {len(key) for key in keys}:
                self.send(space, [key for key in keys if len(key) == length], space.tenant, WRITE_BACK)

    def send(
        self, space: NamespaceEntry, keys: Sequence[bytes], tenant: int, kind: int
    ) -> list[asyncio.Future[bool]]:
        """Starts to send blocks. Those on their way are joined, unless they still wait and this is urgent."""
        going: list[Upload] = []
        batch: list[tuple[bytes, Upload]] = []
        for key in keys:
            name = Name(space.fingerprint, key)
            known = self._going.get(name)
            if known is None or (kind == DEMAND != known.kind and not known.started):
                known = self._going[name] = Upload(self._shell.loop.create_future(), kind)
                batch.append((key, known))
            going.append(known)
        most = batch_blocks(space.block_bytes)
        for at in range(0, len(batch), most):
            self._remote.begin(self._store(space, batch[at : at + most], tenant, kind), space)
        return [each.there for each in going]

    async def _store(
        self, space: NamespaceEntry, batch: list[tuple[bytes, Upload]], tenant: int, kind: int
    ) -> None:
        """Sends one batch, when it is its turn."""
        number, good = space.number, set[bytes]()
        try:
            nbytes = len(batch) * slot_bytes(space.block_bytes)
            write = partial(self._write, space, number, batch, kind)
            good = await self._remote.carrier.in_turn(tenant, kind, nbytes, write) or set()
        finally:
            for key, going in batch:
                name = Name(space.fingerprint, key)
                if self._going.get(name) is going:
                    del self._going[name]
                going.there.set_result(key in good)

    async def _write(
        self, space: NamespaceEntry, number: int, batch: list[tuple[bytes, Upload]], kind: int
    ) -> tuple[set[bytes], int]:
        """Which blocks of a batch the network has, and how many bytes went there."""
        remote, keys = self._remote, []
        for key, going in batch:
            name = Name(space.fingerprint, key)
            # Somebody who needs it sooner may have taken it over; what is being forgotten is not sent.
            if self._going.get(name) is going and not remote.is_banned(name):
                going.started = True
                keys.append(key)
        if not keys or space.number != number or not remote.serves(space):
            return set(), 0
        until = self._shell.now() + remote.config.timeout
        known = await remote.probe([Name(space.fingerprint, key) for key in keys], until)
        there = {key for key, seen in zip(keys, known, strict=True) if seen}
        moved, left = 0, [key for key in keys if key not in there]
        while left:
            objects, outcomes = await self._write_run(space, number, left, until if kind == DEMAND else 0.0)
            good = {t.name.key for t, o in zip(objects, outcomes, strict=True) if o == Outcome.OK}
            there |= good
            moved += len(good) * space.block_bytes
            if objects and not good:
                break
            # What has gone from memory meanwhile is left out.
            left = left[max(1, len(objects)) :]
        return there, moved

    async def _write_run(
        self, space: NamespaceEntry, number: int, keys: list[bytes], deadline: float
    ) -> tuple[list[Object], list[Outcome]]:
        """Sends the leading blocks that are in memory by the deadline."""
        remote = self._remote
        joined = Keys(b"".join(keys), len(keys[0]))
        event = ev.Acquire(0, CLIENT, number, joined, deadline, space.tenant, no_touch=True)
        grant = await remote.core(event)
        if isinstance(grant, ac.Deny) or not grant.lease:
            return [], []
        try:
            n, sums = len(grant.slots), grant.checksum.tolist()
            parents = self._shell.placement.view.parents(number, joined)
            slots = self._shell.dram.slots(grant.where)
            names = [Name(space.fingerprint, key) for key in keys[:n]]
            objects = [Object(names[i], space.block_bytes, slots[i], sums[i], parents[i]) for i in range(n)]
            write = partial(_write_verified, remote.carrier.backend, objects)
            outcomes = await remote.carrier.move(write, remote.config.timeout) or [Outcome.FAILED] * n
        finally:
            self._shell.handle(ev.Release(CLIENT, grant.lease))
        self._count(number, objects, outcomes)
        return objects, outcomes

    def _count(self, number: int, objects: Sequence[Object], outcomes: Sequence[Outcome]) -> None:
        bad = []
        for thing, outcome in zip(objects, outcomes, strict=True):
            self._remote.counters[f"written_{outcome.name.lower()}_blocks"] += 1
            if outcome == Outcome.OK:
                self._remote.presence.note(thing.name, there=True)
            elif outcome == Outcome.TORN:
                bad.append(thing.name.key)
        if bad:
            self._shell.handle(ev.Suspect(0, number, Keys(b"".join(bad), len(bad[0]))))


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
