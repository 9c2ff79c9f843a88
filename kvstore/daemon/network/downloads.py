"""Blocks on their way from the network: each once, in batches, in turns; verified before they count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.network.executor import CLIENT, batch_blocks
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Object, Outcome
from kvstore.types import slot_bytes

if TYPE_CHECKING:
    from kvstore.daemon.network.tier import NetworkTier

_log = logging.getLogger(__name__)

Download = asyncio.Future[bool]


class Downloads:
    """What comes in: futures by name, true once a block is here."""

    def __init__(self, remote: NetworkTier) -> None:
        self._remote = remote
        self._shell = remote.shell
        self._coming: dict[Name, Download] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def fetch(
        self,
        space: NamespaceEntry,
        keys: Sequence[bytes],
        before: bytes,
        tenant: int,
        kind: int,
        until: float,
    ) -> list[Download]:
        """Starts to bring a chain here, behind the key `before`; those on their way are joined."""
        names = [Name(space.fingerprint, key) for key in keys]
        coming: list[Download] = []
        batch: list[bytes] = []
        most = batch_blocks(space.block_bytes)
        for i, name in enumerate(names):
            known = self._coming.get(name)
            if known is None:
                known = self._coming[name] = self._shell.loop.create_future()
                batch.append(keys[i])
            coming.append(known)
            ends = i + 1 == len(keys) or names[i + 1] in self._coming or len(batch) == most
            if batch and ends:
                first = i + 1 - len(batch)
                parent = keys[first - 1] if first else before
                self._remote.begin(self._load(space, batch, parent, tenant, kind, until), space)
                batch = []
        return coming

    async def _load(
        self, space: NamespaceEntry, keys: list[bytes], parent: bytes, tenant: int, kind: int, until: float
    ) -> None:
        """Brings one batch here, when it is its turn."""
        number, good = space.number, set[bytes]()
        try:
            nbytes = len(keys) * slot_bytes(space.block_bytes)
            read = partial(self._read, space, number, keys, parent, until)
            good = await self._remote.carrier.in_turn(tenant, kind, nbytes, read) or set()
        finally:
            for key in keys:
                self._coming.pop(Name(space.fingerprint, key)).set_result(key in good)

    async def _read(
        self, space: NamespaceEntry, number: int, keys: list[bytes], parent: bytes, until: float
    ) -> tuple[set[bytes], int]:
        """Which blocks of a batch are here, and how many bytes came."""
        remote = self._remote
        if space.number != number or not remote.serves(space):
            return set(), 0
        joined = Keys(b"".join(keys), len(keys[0]))
        room = await remote.core(ev.Reserve(0, CLIENT, number, joined, parent, until, loading=True))
        if isinstance(room, ac.Deny):
            return set(), 0
        here = {key for key, status in zip(keys, room.status, strict=True) if status == ac.PRESENT}
        if not room.lease:
            return here, 0
        wanted = [key for key, status in zip(keys, room.status, strict=True) if status == ac.GRANTED]
        objects = [
            Object(Name(space.fingerprint, key), space.block_bytes, slot)
            for key, slot in zip(wanted, self._shell.dram.slots(room.where), strict=True)
        ]
        outcomes = await self._read_hedged(objects)
        # What was forgotten meanwhile must not come back.
        good = [
            o == Outcome.OK and not remote.is_banned(t.name) for o, t in zip(outcomes, objects, strict=True)
        ]
        sums = np.array([thing.checksum for thing in objects], np.uint64)
        await remote.core(ev.Commit(0, CLIENT, room.lease, sums, np.array(good, np.bool_)))
        self._tell(objects, outcomes)
        came = {key for key, ok in zip(wanted, good, strict=True) if ok}
        return here | came, len(came) * space.block_bytes

    async def _read_hedged(self, objects: list[Object]) -> list[Outcome]:
        """Reads objects; those that take too long once more, if that is configured."""
        carrier, config = self._remote.carrier, self._remote.config
        first_s = config.hedge_after if 0 < config.hedge_after < config.timeout else 0.0
        outcomes = [Outcome.FAILED] * len(objects)
        if first_s:
            first = await carrier.try_move(partial(carrier.backend.read, objects), first_s)
            outcomes = first or outcomes
            self._remote.counters["hedged_blocks"] += outcomes.count(Outcome.FAILED)
        late = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
        if late:
            read = partial(carrier.backend.read, [objects[i] for i in late])
            for i, outcome in zip(late, await carrier.move(read, config.timeout - first_s), strict=False):
                outcomes[i] = outcome
        return outcomes

    def _tell(self, objects: Sequence[Object], outcomes: Sequence[Outcome]) -> None:
        """Counts what became of objects, remembers which are there, takes away what is not what it says."""
        remote, torn = self._remote, []
        for thing, outcome in zip(objects, outcomes, strict=True):
            remote.counters[f"read_{outcome.name.lower()}_blocks"] += 1
            if outcome != Outcome.FAILED:
                remote.presence.note(thing.name, outcome == Outcome.OK)
            if outcome == Outcome.TORN:
                torn.append(thing.name)
        if torn:
            _log.warning("%d objects on the network are not what their names say: taken away", len(torn))
            remote.begin(self._take_away(torn))

    async def _take_away(self, names: Sequence[Name]) -> None:
        carrier = self._remote.carrier
        await carrier.ask(partial(carrier.backend.delete, names), self._remote.config.timeout)
