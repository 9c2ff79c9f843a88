"""A daemon with a kind of tier that kvstore does not have: blocks go down to it and come back.

The kind needs its own file and three others: its number in `types.py`, its movers in `movers.py`, and
`main.py`, which opens it. Here `tests/tiers/cxl.py` is the file, and the test changes the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore import arena, types
from kvstore.config import parse
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.queues.device_queue import TierSpec
from kvstore.daemon import lifecycle
from kvstore.daemon.composition import Daemon
from kvstore.daemon.main import open_tiers
from kvstore.daemon.runtime.movers import MOVERS
from kvstore.daemon.tenancy.auth import Principal, Role
from kvstore.types import Layout, Tier
from tests.daemon.runtime.test_executor import Asker
from tests.daemons import names, payload
from tests.tiers import cxl

MIB = 1 << 20
SIZE = MIB - 4096
BATCH, BATCHES = 3, 6
CLIENT = 1
WHO = Principal(0, "default", Role.ADMIN, True)
KEYS = names(BATCH * BATCHES)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Tier:
    """The number of the kind in `types.py`, and its movers in `movers.py`."""
    made = int.__new__(Tier, 4)
    made._name_, made._value_ = "CXL", 4
    monkeypatch.setattr(types, "_RANK", {**types._RANK, made: 1.5})
    monkeypatch.setattr(types, "_PERSISTENT", types._PERSISTENT | {made})
    monkeypatch.setitem(MOVERS, ("dram", cxl.KIND), cxl.between)
    monkeypatch.setitem(MOVERS, (cxl.KIND, "dram"), cxl.between)
    return made


class Node:
    """A daemon with 8 MiB of DRAM over a tier of the new kind, as `main.py` would open it."""

    def __init__(self, kind: Tier) -> None:
        config = parse('dram.limit = "8MiB"\nscrub.rate = 0\n')
        self.cxl = cxl.CxlTier(64 * MIB, 8 * MIB)
        spec = TierSpec(kind, self.cxl.limit_bytes, self.cxl.extent_bytes, table=False)
        storage = replace(open_tiers(config, {}), others=[(spec, self.cxl)])
        self.daemon = Daemon(config, asyncio.get_running_loop(), storage)

    async def start(self) -> None:
        await lifecycle.start(self.daemon)
        space, _ = self.daemon.catalog.open(WHO, Layout("cxl", SIZE))
        assert space is not None
        self.space = space

    async def ask(self, event: Any) -> Any:
        asker = Asker()
        self.daemon.core.ask(asker, 0, event)
        return await asyncio.wait_for(asker.answered, 10)

    async def put(self, keys: list[bytes], parent: bytes) -> None:
        joined = Keys(b"".join(keys), len(keys[0]))
        ends = self.daemon.core.now() + 5
        room = await self.ask(ev.Reserve(0, CLIENT, self.space.number, joined, parent, ends))
        sums = []
        for key, slot in zip(keys, self.daemon.tiers.dram.slots(room.where), strict=True):
            slot[:SIZE] = payload(key, SIZE)
            sums.append(arena.checksum(slot[:SIZE], arena.seed(self.space.fingerprint, key, SIZE)))
        written = np.ones(len(keys), np.bool_)
        answer = await self.ask(ev.Commit(0, CLIENT, room.lease, np.array(sums, np.uint64), written))
        assert answer.value == len(keys)

    async def get(self, keys: list[bytes]) -> list[bytes]:
        joined = Keys(b"".join(keys), len(keys[0]))
        ends = self.daemon.core.now() + 5
        grant = await self.ask(ev.Acquire(0, CLIENT, self.space.number, joined, ends))
        found = [bytes(slot[:SIZE]) for slot in self.daemon.tiers.dram.slots(grant.where)]
        self.daemon.core.handle(ev.Release(CLIENT, grant.lease))
        return found

    async def quiet(self) -> None:
        placement = self.daemon.placement
        async with asyncio.timeout(10):
            while placement.copies.under_way or placement.leases.probes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        placement.check()


def test_blocks_are_written_to_a_new_kind_of_tier_and_promoted_from_it(
    kind: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []
    for pair in (("dram", cxl.KIND), (cxl.KIND, "dram")):
        monkeypatch.setitem(MOVERS, pair, lambda *args: (sources.append(args[0].kind), cxl.between(*args)))

    async def run() -> None:
        node = Node(kind)
        await node.start()
        parent = b""
        for start in range(0, len(KEYS), BATCH):
            await node.put(KEYS[start : start + BATCH], parent)
            parent = KEYS[start + BATCH - 1]
            await node.quiet()
        counters = node.daemon.view.counters
        for start in range(0, len(KEYS), BATCH):
            keys = KEYS[: start + BATCH][-BATCH:]
            assert await node.get(keys) == [payload(key, SIZE) for key in keys]
            await node.quiet()
        assert sources.count("cxl") > 0, "DRAM does not hold all blocks"
        tiers = {tier.name: tier.capacity().used_bytes for tier in node.daemon.view.tiers}
        assert tiers["cxl"] >= len(KEYS) * SIZE, "all blocks are written back"
        node.daemon.core.handle(ev.Scrub(1, 64 * MIB))
        await node.quiet()
        assert counters["scrubbed_blocks_cxl"] > 0
        await lifecycle.stop(node.daemon, 5)
        assert node.cxl._jobs.closed

    asyncio.run(run())
