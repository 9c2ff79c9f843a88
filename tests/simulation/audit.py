"""What has to hold in a daemon and below it at every moment, and after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from kvstore import arena
from kvstore.client.extents import Maps
from kvstore.core.blocks.block_table import LIVE
from kvstore.tiers.nvme.records import ID, unpack
from kvstore.types import slot_bytes
from tests.simulation.daemon import DRAM, Life
from tests.simulation.device import Disk
from tests.simulation.pool import SimPool

Who = tuple[int, bytes]


@dataclass
class Record:
    """A committed record, read as the daemon would."""

    extent: int
    offset: int
    slot_bytes: int
    length: int
    checksum: int
    seed: int

    def payload(self, disk: Disk) -> bytes:
        """What its slot holds."""
        return bytes(disk.slabs[self.extent].seen[self.offset : self.offset + self.length])


def fingerprints(disk: Disk) -> dict[int, bytes]:
    """Of all namespaces on record, by number."""
    return {ID.unpack(k)[0]: msgpack.unpackb(v)[2] for k, v in disk.tables["namespaces"].items()}


def records(disk: Disk) -> dict[Who, Record]:
    """All records by namespace number and key; looked at again only when there was a commit."""
    if disk.read_at != disk.commits:
        disk.read, disk.read_at = _read(disk), disk.commits
    return disk.read


def _read(disk: Disk) -> dict[Who, Record]:
    blocks, damaged = unpack(disk.tables["slots"].items())
    assert not len(damaged)
    spaces = fingerprints(disk)
    found = {}
    for i in range(len(blocks)):
        number, key = int(blocks.ns[i]), blocks.key(i)
        assert number in spaces, "a record of a namespace that is not on record"
        length = int(blocks.length[i])
        size = slot_bytes(length)
        found[number, key] = Record(
            int(blocks.extent[i]),
            int(blocks.index[i]) * size,
            size,
            length,
            int(blocks.checksum[i]),
            arena.seed(spaces[number], key, length),
        )
    return found


def records_prove_their_slots(disk: Disk, limits_fall: bool) -> None:
    """At any moment a crash, or a power cut, leaves each record with the bytes that it speaks of.

    `limits_fall`: a start may remove slabs beyond a lower limit before their records.
    """
    for who, record in records(disk).items():
        slab = disk.slabs.get(record.extent)
        if slab is None and limits_fall:
            continue
        assert slab is not None, f"the record of {who} speaks of an extent that is not there"
        for how, data in (("seen", slab.seen), ("safe", slab.safe)):
            payload = data[record.offset : record.offset + record.length]
            assert arena.checksum(payload, record.seed) == record.checksum, (
                f"the record of {who} has other bytes ({how}) in extent {record.extent} at {record.offset}"
            )


def live(life: Life) -> dict[Who, tuple[list[int], int]]:
    """(slots by tier, checksum) of every readable block; slot -1: not there."""
    b = life.daemon.placement.residency.blocks
    rows = np.flatnonzero(b.state == LIVE)
    return {
        (int(b.namespace[row]), b.key(row)): (slots, int(b.checksum[row]))
        for row, slots in zip(rows.tolist(), b.slot[:, rows].T.tolist(), strict=True)
    }


def daemon_is_sound(life: Life, disks: dict[str, Disk], corrupted: bool) -> None:
    """The core's invariants, limits, headers, and every block's bytes where the core believes them."""
    placement = life.daemon.placement
    placement.check()
    r = placement.residency
    most = r.tiers[DRAM].extents.bound_bytes
    assert len(life.dram._extents) * life.dram.extent_bytes <= most, "more DRAM than allowed"
    _dram_is_sound(life, corrupted)
    if life.pool is not None and not life.pool.is_lost:
        _pool_is_sound(life, life.pool, corrupted)
    for name, disk in disks.items():
        tier = life.tier_of(name)
        if tier is not None:
            most = r.tiers[tier].extents.bound_bytes
            _nvme_is_on_record(life, disk, tier)
        else:
            # It has left, or is about to come.
            most = life.daemon.tiers.devices[name].limit_bytes if name in life.daemon.tiers.devices else 0
            assert not records(disk), f"{name} is not there, and has blocks on record"
        assert disk.nbytes <= most, f"more slabs than the limit of {name} allows"


def _dram_is_sound(life: Life, corrupted: bool) -> None:
    r = life.daemon.placement.residency
    spaces = life.daemon.namespaces
    extents = r.tiers[DRAM].extents
    readable = 0
    for number, table in life.dram.headers._tables.items():
        if number in extents.ready:
            readable += int((table["version"] != 0).sum())
    owned = np.flatnonzero(extents.slots.owner >= 0)
    assert readable == len(owned), f"{readable} headers are readable, {len(owned)} slots are owned"
    where = r.where(DRAM, owned)
    slots = life.dram.slots(where)
    for slot, extent, index, row, view in zip(
        owned.tolist(),
        where.extent.tolist(),
        where.index.tolist(),
        extents.slots.owner[owned].tolist(),
        slots,
        strict=True,
    ):
        header = life.dram.headers._tables[extent][index]
        number, key = int(r.blocks.namespace[row]), r.blocks.key(row)
        assert header["version"] == extents.slots.version[slot], "a header has another version"
        assert header["key"].tobytes()[: header["key_bytes"]] == key, "a header names another block"
        assert header["checksum"] == r.blocks.checksum[row] == extents.slots.record["checksum"][slot], (
            "checksums differ"
        )
        if not corrupted:
            length = spaces.lengths[number]
            seed = arena.seed(spaces.fingerprints[number], key, length)
            good = arena.checksum(view[:length], seed) == int(r.blocks.checksum[row])
            assert good, f"block {key!r} has other bytes in DRAM than were committed"


def _pool_is_sound(life: Life, pool: SimPool, corrupted: bool) -> None:
    """Blocks in GPU memory have the bytes that were committed; there is no more of it than allowed."""
    r, spaces = life.daemon.placement.residency, life.daemon.namespaces
    [tier] = r.topology.memory[1:]
    extents = r.tiers[tier].extents
    assert len(pool.memory) * pool.extent_bytes <= extents.bound_bytes, "more GPU memory than allowed"
    owned = np.flatnonzero(extents.slots.owner >= 0)
    for row, view in zip(extents.slots.owner[owned].tolist(), pool.slots(r.where(tier, owned)), strict=True):
        number, key = int(r.blocks.namespace[row]), r.blocks.key(row)
        length = spaces.lengths[number]
        good = arena.checksum(view[:length], arena.seed(spaces.fingerprints[number], key, length))
        assert corrupted or good == int(r.blocks.checksum[row]), (
            f"block {key!r} has other bytes in the pool than were committed"
        )


def old_memory_is_empty(life: Life, maps: list[Maps]) -> None:
    """Who still maps an extent that was made anew sees zeros there."""
    for each in maps:
        if each.instance == life.daemon.instance:
            for (number, _), mapped in each._mapped.items():
                if number in life.dram.renewed:
                    assert not np.frombuffer(mapped.mapping.view, np.uint8).any(), (
                        f"extent {number} has changed hands, and shows what was in it"
                    )


def _nvme_is_on_record(life: Life, disk: Disk, tier: int) -> None:
    r = life.daemon.placement.residency
    found = records(disk)
    rows = np.flatnonzero((r.blocks.state == LIVE) & (r.blocks.slot[tier] >= 0))
    where = r.where(tier, r.blocks.slot[tier, rows].astype(np.int64))
    for row, extent, index in zip(rows.tolist(), where.extent.tolist(), where.index.tolist(), strict=True):
        who = int(r.blocks.namespace[row]), r.blocks.key(row)
        record = found.get(who)
        assert record is not None, f"{who} is on {disk.name}, but not on record"
        assert (record.extent, record.offset) == (extent, index * record.slot_bytes), f"{who}: another slot"
        assert record.checksum == int(r.blocks.checksum[row]), f"{who}: another checksum"


@dataclass
class Left:
    """What a daemon left: records by device, and the blocks that were readable in memory."""

    records: dict[str, dict[Who, Record]]
    dram: dict[tuple[bytes, bytes], int]

    @classmethod
    def of(cls, life: Life, disks: dict[str, Disk], handed_over: bool) -> Left:
        """Devices that were leaving promise nothing."""
        # Those that are being forgotten, and those whose blocks end, promise nothing.
        spaces = {s.number: s.fingerprint for s in life.daemon.namespaces if s.number and not s.ttl_s}
        blocks = live(life) if handed_over else {}
        in_dram = {
            (spaces[n], key): checksum
            for (n, key), (slots, checksum) in blocks.items()
            if slots[DRAM] >= 0 and n in spaces
        }
        on_record = {
            name: {who: record for who, record in records(disk).items() if who[0] in spaces}
            for name, disk in disks.items()
            if name in life.daemon.config().nvme.limits
        }
        return cls(on_record, in_dram)

    def keep_known(self, life: Life) -> None:
        """Only records that the daemon has taken in are promised."""
        found = live(life)
        for name, on_record in self.records.items():
            tier = life.tier_of(name)
            self.records[name] = {
                who: record
                for who, record in on_record.items()
                if tier is not None and who in found and found[who][0][tier] >= 0
            }

    def check(self, life: Life) -> None:
        """All of it is readable in the daemon that starts now."""
        found = live(life)
        spaces = life.daemon.namespaces.fingerprints
        numbers = {fingerprint: number for number, fingerprint in spaces.items()}
        for (fingerprint, key), checksum in self.dram.items():
            who = numbers.get(fingerprint, 0), key
            assert who in found, f"{key!r} was in DRAM, and is lost"
            slots, now = found[who]
            assert slots[DRAM] >= 0, f"{key!r} was in DRAM, and is not"
            assert now == checksum, f"{key!r} was in DRAM, and has another checksum"
        for name, on_record in self.records.items():
            if (tier := life.tier_of(name)) is not None:
                self._check_device(life, name, tier, found, on_record)

    def _check_device(
        self,
        life: Life,
        name: str,
        tier: int,
        found: dict[Who, tuple[list[int], int]],
        on_record: dict[Who, Record],
    ) -> None:
        used = 0
        for who, record in on_record.items():
            assert who in found, f"{who} was on record on {name}, and is lost"
            slots, checksum = found[who]
            others = [r[who].checksum for r in self.records.values() if who in r and r is not on_record]
            if checksum != record.checksum:
                assert slots[DRAM] >= 0 or checksum in others, f"{who} has another checksum than its record"
            elif all(other == checksum for other in others):
                assert slots[tier] >= 0, f"{who} was on record, and is not on {name}"
                used += record.slot_bytes
        in_use = life.daemon.placement.residency.tiers[tier].extents.used_bytes
        assert in_use >= used, f"{in_use} bytes of {name} in use, {used} on record"


@dataclass
class Quotas:
    """What tenants had of each tier when it was last looked at; how often one was forgotten, until when."""

    had: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    forgotten: int = 0

    def check(self, life: Life, lossy: bool) -> None:
        """Nobody uses more than its limit, or ever more of it; nobody at its floor has lost an extent.

        `lossy`: extents may fail to be made anew.
        """
        p: Any = life.daemon.placement
        _limits_are_divided(life)
        forgetting = self.forgotten < life.tenants_forgotten
        for tier, state in enumerate(p.residency.tiers):
            holdings = state.extents.holdings
            for tenant in range(len(holdings.used)):
                used, quota = holdings.of(tenant)
                extents = int(holdings.extents[tenant])
                before = self.had.get((tier, tenant))
                if before is not None:
                    most, who = max(quota.limit, before[0]), f"tenant {tenant} in tier {tier}"
                    assert used <= most or forgetting, f"{who} uses {used} bytes, may use {most}"
                    kept = min(before[1], quota.floor // state.extents.extent_bytes)
                    assert extents >= kept or lossy or forgetting, (
                        f"{who} had {before[1]} extents, has {extents}, {kept} for sure"
                    )
                self.had[tier, tenant] = used, extents
        if not any(sweep.tenant >= 0 for sweep in p._deletion._sweeps):
            self.forgotten = life.tenants_forgotten


def _limits_are_divided(life: Life) -> None:
    """What a tenant may have of all devices together is no more than its limit."""
    quotas, authenticator = life.daemon.quotas, life.daemon.authenticator
    r = life.daemon.placement.residency
    tiers = [r.tiers[tier] for tier in r.topology.persistent if not r.tiers[tier].leaving]
    for name, tenant in life.daemon.config().tenants.items():
        limit, number = tenant.nvme.limit, authenticator.number(name)
        # One that is being deleted has nothing in memory, from where it could get there.
        if limit is not None and number is not None and not quotas.is_suspended(number):
            most = sum(t.extents.holdings.limit_of(number) for t in tiers)
            assert most <= limit, f"devices give {name} {most} bytes, {limit} are allowed"


def nothing_is_held(life: Life) -> None:
    """Everybody has left and all is quiet: nobody holds anything, nobody waits."""
    p: Any = life.daemon.placement
    assert not p.leases.leases, "leases are left"
    assert not p.leases.reservations, "reservations are left"
    assert not p.leases.waiting, "waiters are left"
    assert not p.leases.stalled, "stalled requests are left"
    assert not p.leases.wanted_by, "rows are wanted by nobody"
    assert not p.leases.probes, "probes are left"
    assert not any(p.leases.held.values()), "holds are left"
    assert not p.residency.gaps.open, "reservations are left"
    assert not p.copies.under_way, "copies are left"
    assert not p.copies.writing.total(), "writes are left"
    assert not p.residency.blocks.copy_marks.any(), "blocks are on the move"
    assert not life.daemon.core.pending, "somebody was never answered"
    assert not life.server.table.connections, "connections are left"
    for state in p.residency.tiers:
        assert state.gone or not state.leaving, f"{state.spec.name} is leaving, and is still there"
        held = set(np.flatnonzero(state.slots.refs).tolist())
        assert held <= state.slots.retired, "a slot is held by nobody"
