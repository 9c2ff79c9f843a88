"""A byte-carrying world around Placement, without processes, files or time of its own.

Tiers are dictionaries from (tier, extent, index) to payload. Copies wait in a list and are finished in the
order, and with the results, that the test chooses: late, failed, corrupted. After every event all invariants
are checked, and every readable block is compared with what was put under its key. `restart` is a crash: what
was recorded comes back, and what headers say if the extents of tier 0 were kept. Pools of HBM have neither.

Extents that change hands wait in a list too. Whoever is granted a slot must be allowed to map its extent, and
no extent is ever cut for another domain than before unless it was made anew in between.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import xxhash

from kvstore import native
from kvstore.client.presence_tables import ABSENT, PresenceTable
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import UNLIMITED, Quota
from kvstore.core.placement import Limits, Placement
from kvstore.core.policy.admission import Rule
from kvstore.core.queues.device_queue import TierSpec
from kvstore.types import ALIGN, HBM_EXTENTS, HEADER_BYTES, LABEL_BYTES, MAX_KEY_BYTES, Tier

Place = tuple[int, int, int]
_TOLD_EVERY = 20


def payload(namespace: int, key: bytes, salt: int = 0) -> bytes:
    return b"%d/%d/" % (namespace, salt) + key


@dataclass
class Record:
    """What the journal says of a block; of two records the one with the larger `stamp` is newer."""

    place: Place
    version: int
    checksum: int
    parent: bytes
    stamp: float


@dataclass
class Header:
    """What tier 0 says of a slot."""

    namespace: int
    key: bytes
    version: int
    parent: bytes
    checksum: int
    stamp: int


class World:
    """Runs the actions of one Placement. `dram`, `nvme` and `hbm` are extents of `slots` slots each.

    `nvme` 0: there is no such tier; several: as many devices. `nvme_gets`: how many extents the first one has
    room for; `nvme_slots`: how many slots those have, where it differs. `admission`: what is written to it.
    `hbm`: pools of GPU memory, numbered after the devices; `hbm_slots` as above.
    """

    def __init__(
        self,
        dram: int = 2,
        nvme: int | Sequence[int] = 4,
        *,
        policy: str = "lru",
        write_policy: str = "write_through",
        slots: int = 4,
        max_blocks: int = 512,
        limits: Limits | None = None,
        nvme_gets: int | None = None,
        nvme_slots: int = 0,
        admission: Rule | None = None,
        hbm: int | Sequence[int] = 0,
        hbm_slots: int = 0,
    ) -> None:
        size = LABEL_BYTES + slots * ALIGN + -(-slots * HEADER_BYTES // ALIGN) * ALIGN
        self._specs = [TierSpec(Tier.DRAM, dram * size, size, True)]
        self._nvme_size, self._rule = (nvme_slots or slots) * ALIGN, admission or Rule()
        self._extents = [dram]
        for extents in nvme if isinstance(nvme, Sequence) else [nvme] if nvme else []:
            self._specs.append(self._device(extents))
            self._extents.append(extents)
        if nvme_gets is not None:
            self._extents[1] = nvme_gets
        size = (hbm_slots or slots) * ALIGN
        for extents in hbm if isinstance(hbm, Sequence) else [hbm] if hbm else []:
            name = f"hbm{len(self.pools)}"
            self._specs.append(TierSpec(Tier.HBM, extents * size, size, False, name=name))
            self._extents.append(extents)
        self.max_blocks = max_blocks
        self._policy = policy
        self._write_policy = write_policy
        self._limits = limits or Limits(leases_per_client=8)
        self.now = 0.0
        self.bytes: dict[Place, bytes] = {}
        self.rotten: set[Place] = set()
        self.journals: list[dict[tuple[int, bytes], Record]] = [{} for _ in self._extents]
        self.headers: dict[Place, Header] = {}
        self.kept: list[dict[int, int]] = [{} for _ in self._extents]
        self._left: set[int] = set()
        self.versions: dict[Place, int] = {}
        self.namespaces: dict[int, int] = {}
        self.opened: dict[int, ev.OpenNamespace] = {}
        self.tenants: dict[int, ev.SetTenant] = {}
        self.whose: dict[tuple[int, int], int] = {}
        self.owners: dict[int, int] = {}
        self._next_extent = {0: dram}
        self._request = 0
        self.found_in_tables = 0
        self._stamp = 0.0
        self._headers = 0
        self._begin()

    def _device(self, extents: int) -> TierSpec:
        name = f"nvme{len(self._specs)}" if len(self._specs) > 1 else ""
        return TierSpec(Tier.NVME, extents * self._nvme_size, self._nvme_size, False, self._rule, name)

    @property
    def pools(self) -> list[int]:
        """Numbers of the pools of HBM, those that were lost included."""
        return [tier for tier, spec in enumerate(self._specs) if spec.tier == Tier.HBM]

    def _first(self, tier: int) -> int:
        """The lowest number of an extent of a tier: no two tiers of memory share one."""
        return HBM_EXTENTS * (1 + self.pools.index(tier)) if tier in self.pools else 0

    @property
    def records(self) -> dict[tuple[int, bytes], Record]:
        """Those of the only device of NVMe."""
        return self.journals[1]

    @records.setter
    def records(self, records: dict[tuple[int, bytes], Record]) -> None:
        self.journals[1] = records

    def _begin(self) -> None:
        self._close_up()
        self._next_extent[0] = max(self._next_extent[0], self._extents[0])
        self._next_extent |= {tier: self._first(tier) + self._extents[tier] for tier in self.pools}
        self.p = Placement(
            self._specs,
            max_blocks=self.max_blocks,
            seed=7,
            policy=self._policy,
            write_policy=self._write_policy,
            limits=self._limits,
        )
        self.p.policy_migration.rows_at_once = 3
        self.p.residency.outbox.telling = True
        self.told: set[tuple[int, int, bytes]] = set()
        self._events = 0
        self.copies: dict[int, ac.Copy] = {}
        self.unwanted: set[Place] = set()
        self.probes: dict[int, ac.Probe] = {}
        self.renewals: list[ac.RenewExtent] = []
        self.removals: list[ac.RemoveExtent] = []
        self.lost: set[int] = set()
        self.wanted: list[ac.MakeExtents] = []
        self.joined: list[int] = []
        self.left: list[int] = []
        self.answers: dict[int, ac.Action] = {}
        self.asked: dict[int, ev.Event] = {}
        self.actions: list[ac.Action] = []
        for event in [*self.tenants.values(), *self.opened.values()]:
            self.send(event)
        self._drop_beyond()
        for tier in range(1, len(self._specs)):
            for extent, slot_bytes in sorted(self.kept[tier].items()):
                self.send(ev.ExtentReady(tier, extent, slot_bytes, None, *self._owner(tier, extent)))
            if self.kept[tier]:
                self.send(self._restored(tier))
        for extent, slot_bytes in sorted(self.kept[0].items()):
            slots = self.p.residency.tiers[0].extents.geometry(slot_bytes).slots
            last = [self.versions.get((0, extent, i), 0) for i in range(slots)]
            last = np.array(last, np.uint32)
            self.send(ev.ExtentReady(0, extent, slot_bytes, last, *self._owner(0, extent)))
        if self.kept[0]:
            held = sorted(self.headers.items(), key=lambda item: -item[1].stamp)
            rows = [(h.namespace, h.key, h.parent, p[1], p[2], h.version, h.checksum) for p, h in held]
            self.send(restore(rows, tier=0))
        for tier, n in enumerate(self._extents):
            numbers = range(self._first(tier), self._first(tier) + n)
            new = [extent for extent in numbers if extent not in self.kept[tier]]
            for extent in new[: n - len(self.kept[tier])]:
                self.send(ev.ExtentReady(tier, extent))
            self.send(ev.ExtentsEnd(tier))

    def _close_up(self) -> None:
        """Devices that were removed are not there any more; those behind them have other numbers.

        What was in HBM was this process's, and ended with it.
        """
        for tier in self.pools:
            for extent in list(self.kept[tier]):
                self._erase(tier, extent)
            self.whose = {at: domain for at, domain in self.whose.items() if at[0] != tier}
        stay = [tier for tier in range(len(self._specs)) if tier not in self._left]
        if self._left:
            number = {old: new for new, old in enumerate(stay)}
            self._specs, self._extents, self.journals, self.kept = (
                [column[tier] for tier in stay]
                for column in (self._specs, self._extents, self.journals, self.kept)
            )
            self.bytes = {(number[t], *p): data for (t, *p), data in self.bytes.items() if t in number}
            self.rotten = {(number[t], *p) for t, *p in self.rotten if t in number}
            self.whose = {(number[t], e): domain for (t, e), domain in self.whose.items() if t in number}
            for journal in self.journals:
                for record in journal.values():
                    record.place = (number[record.place[0]], *record.place[1:])
        self._left = set()
        for event in self.tenants.values():
            quotas = (*event.quotas, *[Quota()] * len(self._specs))
            event.quotas = quotas[: len(self._specs)]

    def _drop_beyond(self) -> None:
        """What a lower limit has no room for, of what was kept."""
        for tier, kept in enumerate(self.kept):
            for extent in sorted(kept)[self._extents[tier] :]:
                self._erase(tier, extent)
                records = self.journals[tier]
                for who in [who for who, r in records.items() if r.place[1] == extent]:
                    del records[who]
                self.headers = {p: h for p, h in self.headers.items() if p[:2] != (tier, extent)}

    def _erase(self, tier: int, extent: int) -> None:
        self.bytes = {p: data for p, data in self.bytes.items() if p[:2] != (tier, extent)}
        self.kept[tier].pop(extent, None)
        self.whose.pop((tier, extent), None)

    def _owner(self, tier: int, extent: int) -> tuple[int, int]:
        """(tenant, domain) of an extent that was kept."""
        domain = self.whose[tier, extent]
        return self.owners.get(domain, domain), domain

    def _new_extent(self, tier: int) -> int:
        """A number that no client ever saw, where clients map extents; the lowest free one elsewhere."""
        if tier and tier not in self.pools:
            extents = self.p.residency.tiers[tier].extents
            taken = extents.ready | set(extents.renewing)
            return min(set(range(len(taken) + 1)) - taken)
        self._next_extent[tier] += 1
        return self._next_extent[tier] - 1

    def _restored(self, tier: int) -> ev.Restore:
        """The records as an event, latest first; of two that name one place only the latest counts."""
        records, kept = self.journals[tier], self.kept[tier]
        latest = {r.place: who for who, r in sorted(records.items(), key=lambda item: item[1].stamp)}
        self.journals[tier] = records = {who: r for who, r in records.items() if latest[r.place] == who}
        return restore(
            [
                (ns, key, r.parent, r.place[1], r.place[2], r.version, r.checksum)
                for (ns, key), r in sorted(records.items(), key=lambda item: -item[1].stamp)
                if kept.get(r.place[1]) == -(-self.namespaces[ns] // ALIGN) * ALIGN
            ],
            tier,
        )

    def restart(self, handover: bool = False) -> None:
        """A crash: leases and whatever was under way are gone, and memory too, unless it is handed over."""
        if not handover:
            self.bytes = {place: data for place, data in self.bytes.items() if place[0]}
            self.headers, self.kept[0], self.versions = {}, {}, {}
            self.whose = {at: domain for at, domain in self.whose.items() if at[0]}
        self._begin()

    # -- driving

    def send(self, event: ev.Event) -> list[ac.Action]:
        self.now += 0.001
        before = [self.extents(tier) for tier in range(len(self.p.residency.tiers))]
        self.actions = self.p.handle(event, self.now)
        for action in self.actions:
            self._run(action)
        self._share_presence()
        self.p.check()
        self.check_records()
        self._check_told()
        if not isinstance(event, ev.SetTenant | ev.ForgetTenant | ev.ExtentLost):
            for tier, held in enumerate(before):
                self._check_floors(tier, held)
        return self.actions

    def _share_presence(self) -> None:
        """Each namespace that can have a presence table has one, which is being filled or full."""
        for number in self.opened:
            nbytes = self.p.view.presence_bytes(number)
            if nbytes and number not in self.p.residency.presence.tables:
                words = np.frombuffer(mmap.mmap(-1, nbytes), np.uint64)
                actions = self.p.handle(ev.SharePresence(number, words, self._events), self.now)
                assert not actions
        if self._events % 3:
            self.p.residency.presence.step(self.now + 1)

    def _check_told(self) -> None:
        """Who has only been told what moved knows what is where."""
        blocks = self.p.residency.blocks
        held = blocks.slot[:, : blocks.rows_touched] >= 0
        assert len(self.told) == np.count_nonzero(held)
        self._events += 1
        if self._events % _TOLD_EVERY == 0:
            pairs = np.argwhere(held).tolist()
            assert self.told == {(t, int(blocks.namespace[row]), blocks.key(row)) for t, row in pairs}

    def _check_floors(self, tier: int, before: list[int]) -> None:
        """Nobody has become poorer than its floor."""
        floors = self.p.residency.tiers[tier].extents.holdings.floor.tolist()
        for held, now, floor in zip(before, self.extents(tier), floors, strict=False):
            assert now >= min(held, floor), "an extent below a floor was taken"

    def ask(self, event: ev.Event) -> ac.Action | None:
        """Sends a request and returns its answer, or None if it waits."""
        self._request += 1
        event.request = self._request
        self.asked[self._request] = event
        self.send(event)
        return self.answers.get(self._request)

    @property
    def last_request(self) -> int:
        return self._request

    def _run(self, action: ac.Action) -> None:
        if isinstance(action, ac.Reply):
            if action.request:
                assert action.request not in self.answers, "answered twice"
                self.answers[action.request] = action
            if isinstance(action, ac.Grant | ac.Reserved) and action.lease:
                self._check_mapping(self.asked[action.request], action)
        elif isinstance(action, ac.CopyReport):
            who = action.identity
            moved = {(action.tier, int(n), who.key(i)) for i, n in enumerate(who.namespace)}
            (self.told.update if action.gained else self.told.difference_update)(moved)
        elif isinstance(action, ac.MakeExtents):
            self.wanted.append(action)
        elif isinstance(action, ac.RenewExtent | ac.RemoveExtent):
            assert not any(p[:2] == (action.tier, action.extent) for p in self.headers), "a header stays"
            left = [r for r in self.journals[action.tier].values() if r.place[1] == action.extent]
            assert action.tier == 0 or not left, "a record stays"
            if isinstance(action, ac.RemoveExtent):
                self.removals.append(action)
            else:
                self.renewals.append(action)
        elif isinstance(action, ac.Copy):
            assert not {action.source, action.target} & self.lost, "a copy to or from a device that is lost"
            self.copies[action.transfer] = action
        elif isinstance(action, ac.Probe):
            assert action.tier not in self.lost, "a look at a device that is lost"
            self.probes[action.probe] = action
        elif isinstance(action, ac.FormatExtent):
            before = self.whose.setdefault((action.tier, action.extent), action.domain)
            assert before == action.domain, "an extent has changed hands as it was"
            self.kept[action.tier][action.extent] = action.slot_bytes
        elif isinstance(action, ac.DeviceAdded):
            self.joined.append(action.tier)
        elif isinstance(action, ac.NamespaceClosed):
            del self.namespaces[action.namespace], self.opened[action.namespace]
        elif isinstance(action, ac.DeviceRemoved):
            assert not self.kept[action.tier], "a device was left with something in it"
            assert not self.journals[action.tier], "a device was left with records"
            self.left.append(action.tier)
        elif isinstance(action, ac.WriteHeader):
            assert action.tier == 0, "only DRAM has headers"
            for i, place in enumerate(self.places(action.tier, action.where)):
                self._headers += 1
                self.versions[place] = int(action.version[i])
                self.headers[place] = Header(
                    int(action.identity.namespace[i]),
                    action.identity.key(i),
                    int(action.version[i]),
                    action.parents.key(i),
                    int(action.identity.checksum[i]),
                    self._headers,
                )
        elif isinstance(action, ac.Drop):
            for i, place in enumerate(self.places(action.tier, action.where)):
                self.headers.pop(place, None)
                if action.tier and action.tier not in self.pools:
                    # By key, as the journal does it; and what is still on its way there gets no record.
                    who = int(action.identity.namespace[i]), action.identity.key(i)
                    self.journals[action.tier].pop(who, None)
                    self.unwanted |= {place} & {
                        p for c in self.copies.values() for p in self.places(c.target, c.target_where)
                    }

    def _check_mapping(self, event: ev.Event, answer: ac.Grant | ac.Reserved) -> None:
        """Whoever is told of a slot may map its extent: the namespace's tenant, or readers of its domain."""
        space, tier = self.p.residency.namespaces[event.namespace], self.tier_of(answer)
        assert tier not in self.lost, "a slot of a device that is lost"
        for _, extent, _ in self.places(tier, answer.where):
            tenant, domain = self._owner(tier, extent)
            assert tenant == space.tenant, "a slot in an extent of somebody else"
            if isinstance(event, ev.Acquire) and event.tenant != space.tenant:
                assert tier == 0, "what a GPU holds is shown to a reader of another tenant"
                assert domain == space.pools[0].domain, "a reader is led to an extent that it may not map"

    def tier_of(self, answer: ac.Grant | ac.Reserved) -> int:
        """The tier of memory that slots told to a client are in, as the client sees it."""
        first = int(answer.where.extent[0]) if len(answer.where) else 0
        pool = first // HBM_EXTENTS
        return self.pools[pool - 1] if pool else 0

    @staticmethod
    def places(tier: int, where: ac.Where) -> list[Place]:
        return [(tier, e, i) for e, i in zip(where.extent.tolist(), where.index.tolist(), strict=True)]

    def check_records(self) -> None:
        """Every block that the core believes on NVMe is on record there, or a restart would lose it."""
        for tier in range(1, len(self.p.residency.tiers)):
            if tier not in self.pools:
                self._check_records(tier)

    def _check_records(self, tier: int) -> None:
        r = self.p.residency
        rows = np.flatnonzero(r.blocks.slot[tier] >= 0)
        rows = rows[r.blocks.state[rows] != 0]
        places = self.places(tier, r.where(tier, r.blocks.slot[tier, rows].astype(np.int64)))
        for row, place in zip(rows.tolist(), places, strict=True):
            who = (int(r.blocks.namespace[row]), r.blocks.key(row))
            record = self.journals[tier].get(who)
            assert record is not None, f"{who} is on NVMe, but not on record"
            assert record.place == place, f"{who} is on record in another slot"

    # -- copies end

    def finish(self, transfer: int, results: list[int]) -> None:
        """Ends one copy; results as in CopyDone. Bytes move now, from what the source holds now."""
        self.send(ev.CopyDone(transfer, self.move(transfer, results)))

    def move(self, transfer: int, results: list[int]) -> np.ndarray:
        """What ends a copy, without saying so; returns the results.

        What comes into memory is verified, as the tiers do; a block that did not get through leaves rubbish
        behind. Nothing gets to or from a device that is lost.
        """
        copy = self.copies.pop(transfer)
        source, target = (
            self.places(copy.source, copy.source_where),
            self.places(copy.target, copy.target_where),
        )
        out = np.array([*results[: len(source)], *[ev.OK] * (len(source) - len(results))], np.uint8)
        if {copy.source, copy.target} & self.lost:
            out[:] = ev.FAILED
        verified = copy.target in (0, *self.pools)
        self._stamp += 1.0
        for i, (a, b) in enumerate(zip(source, target, strict=True)):
            who = (int(copy.identity.namespace[i]), copy.identity.key(i))
            data = self.bytes.get(a, b"nothing")
            if verified and out[i] == ev.OK and hash_of(data) != int(copy.identity.checksum[i]):
                out[i] = ev.CORRUPT
            if copy.target not in self.lost:
                self.bytes[b] = data if out[i] == ev.OK else b"torn"
            self.rotten.discard(b)
            if a in self.rotten and out[i] == ev.OK:
                self.rotten.add(b)
            if b in self.unwanted:
                self.unwanted.discard(b)
                out[i] = ev.FAILED
            if copy.target and copy.target not in self.pools and out[i] == ev.OK:
                self.journals[copy.target][who] = Record(
                    b,
                    int(copy.version[i]),
                    int(copy.identity.checksum[i]),
                    copy.parents[i],
                    self._stamp - 1e-6 * i,
                )
        return out

    def finish_all(self) -> None:
        while self.copies:
            self.finish(next(iter(self.copies)), [])

    def renew(self, which: int = 0, lost: bool = False) -> int:
        """Makes an extent anew: its number in tier 0 is a new one. Returns it; -1 if it is `lost`."""
        tier, extent = self.renewals[which].tier, self.renewals[which].extent
        del self.renewals[which]
        self._erase(tier, extent)
        if lost:
            self._extents[tier] -= 1
            self.send(ev.ExtentLost(tier, extent))
            return -1
        new = extent if tier and tier not in self.pools else self._new_extent(tier)
        self.send(ev.ExtentReady(tier, new, replaces=extent))
        return new

    def remove(self, which: int = 0) -> None:
        """An extent that was too much is gone."""
        gone = self.removals.pop(which)
        self._erase(gone.tier, gone.extent)
        self.send(ev.ExtentLost(gone.tier, gone.extent))

    def make(self, all_of_them: bool = True) -> None:
        """Extents that were asked for are there, or the first of them."""
        wanted = self.wanted.pop(0)
        for _ in range(wanted.count if all_of_them else 1):
            self.send(ev.ExtentReady(wanted.tier, self._new_extent(wanted.tier)))
        self.send(ev.ExtentsEnd(wanted.tier))

    def resize(self, tier: int, extents: int) -> None:
        """From now on, and after a restart."""
        size = self._specs[tier].extent_bytes
        self._specs[tier] = replace(self._specs[tier], limit_bytes=extents * size)
        self._extents[tier] = extents
        self.send(ev.SetLimit(tier, extents * size))

    def add(self, extents: int) -> None:
        """One device of NVMe more, from now on; it is told of its extents when it is there."""
        spec = self._device(extents)
        self.send(ev.AddDevice(spec))
        [tier] = self.joined
        self.joined.clear()
        for column in (self.journals, self.kept):
            column.append({})
        self._specs.append(spec)
        self._extents.append(extents)
        self.send(ev.SetLimit(tier, spec.limit_bytes))

    def leaves(self, tier: int) -> bool:
        """Whether a device is to go."""
        return tier in self._left

    def leave(self, tier: int) -> None:
        """A device is to go, after a restart at the latest."""
        self._left.add(tier)
        self.send(ev.RemoveDevice(tier))

    def lose(self, tier: int) -> None:
        """A device is gone with its bytes; so are, after a restart, those that read them."""
        self._left.add(tier)
        self.lost.add(tier)
        self.bytes = {place: data for place, data in self.bytes.items() if place[0] != tier}
        self.send(ev.LoseDevice(tier))

    def move_extents(self) -> None:
        """All that waits to be made, made anew or removed is."""
        while self.renewals or self.removals or self.wanted:
            if self.renewals:
                self.renew()
            elif self.removals:
                self.remove()
            else:
                self.make()

    def pass_time(self, seconds: float) -> int:
        """Ticks come when they are due, and all that is under way ends well; returns how many came."""
        until, ticks = self.now + seconds, 0
        while True:
            self.finish_all()
            self.move_extents()
            wake = self.p.next_wakeup()
            if wake is None or wake > until:
                self.now = max(self.now, until)
                return ticks
            self.now = max(self.now, wake)
            self.send(ev.Tick())
            ticks += 1

    def probe(self, number: int) -> None:
        probe = self.probes.pop(number)
        if probe.tier in self.lost:
            self.send(ev.ProbeDone(number, np.full(len(probe.identity), ev.FAILED, np.uint8)))
            return
        good = [
            hash_of(self.bytes.get(p, b"")) == int(probe.identity.checksum[i])
            for i, p in enumerate(self.places(probe.tier, probe.where))
        ]
        self.send(ev.ProbeDone(number, np.where(good, ev.OK, ev.CORRUPT).astype(np.uint8)))

    def rot(self, place: Place) -> None:
        """The device changes its mind about some bytes."""
        self.bytes[place] = b"rot"
        self.rotten.add(place)

    def settle(self, clients: int = 8) -> None:
        """Everybody leaves, everything under way ends; then nothing may be held by anyone."""
        for client in range(clients):
            self.send(ev.ClientLost(client))
        self.now += 1000
        while self.copies or self.probes or self.renewals or self.removals or self.wanted:
            self.finish_all()
            for number in list(self.probes):
                self.probe(number)
            self.move_extents()
        self.send(ev.Tick())
        self.pass_time(20)
        p = self.p
        assert not p.leases.leases
        assert not p.leases.reservations
        assert not p.leases.waiting
        assert not p.leases.stalled
        assert not p.leases.probes
        assert not p.residency.pins.ends
        assert not p.copies.under_way
        assert not p.copies.writing.total()
        assert not p.residency.blocks.copy_marks.any()
        for state in p.residency.tiers:
            held = set(np.flatnonzero(state.slots.refs).tolist())
            assert held <= state.slots.retired, "a slot is held by nobody"

    # -- a client

    def reserve(
        self,
        client: int,
        namespace: int,
        keys: list[bytes],
        parent: bytes = b"",
        wait: float = 0.0,
        at: int = 0,
        of: tuple[int, bytes] = (0, b""),
    ) -> ac.Action | None:
        return self.ask(ev.Reserve(0, client, namespace, joined(keys), parent, self.now + wait, at, *of))

    def fill(self, namespace: int, keys: list[bytes], room: ac.Reserved, salt: int = 0) -> np.ndarray:
        """Writes the payloads of the granted keys; returns their checksums."""
        granted, tier = granted_of(keys, room), self.tier_of(room)
        for key, place in zip(granted, self.places(tier, room.where), strict=True):
            if tier in self.lost:
                continue
            self.bytes[place] = payload(namespace, key, salt)
            self.rotten.discard(place)
        return np.array([hash_of(payload(namespace, k, salt)) for k in granted], np.uint64)

    def commit(
        self, client: int, room: ac.Reserved, sums: np.ndarray, written: list[bool] | None = None
    ) -> int:
        marks = np.ones(len(sums), np.bool_) if written is None else np.array(written, np.bool_)
        answer = self.ask(ev.Commit(0, client, room.lease, sums, marks))
        assert isinstance(answer, ac.Answer), answer
        return answer.value

    def put(
        self,
        client: int,
        namespace: int,
        keys: list[bytes],
        parent: bytes = b"",
        salt: int = 0,
        at: int = 0,
        of: tuple[int, bytes] = (0, b""),
    ) -> int:
        """Stores a chain at once; returns how many blocks were stored. `of`: the block they belong to."""
        room = self.reserve(client, namespace, keys, parent, at=at, of=of)
        if not isinstance(room, ac.Reserved) or not room.lease:
            return 0
        return self.commit(client, room, self.fill(namespace, keys, room, salt))

    def acquire(
        self,
        client: int,
        namespace: int,
        keys: list[bytes],
        wait: float = 1.0,
        tenant: int | None = None,
        at: int = 0,
    ) -> ac.Action | None:
        """As `tenant`; None: as the one whose namespace it is."""
        who = self.opened[namespace].tenant if tenant is None and namespace in self.opened else tenant or 0
        return self.ask(ev.Acquire(0, client, namespace, joined(keys), self.now + wait, who, tier=at))

    def lookup(
        self,
        namespace: int,
        keys: list[bytes],
        tenant: int | None = None,
        at: int = 0,
        deadline: float = math.inf,
        recompute_s: float = 0.0,
    ) -> int:
        who = self.opened[namespace].tenant if tenant is None and namespace in self.opened else tenant or 0
        answer = self.ask(ev.Lookup(0, namespace, joined(keys), who, deadline, recompute_s, at))
        assert isinstance(answer, ac.Found), answer
        tiers = self._in_table(namespace, keys, who, leading=True)
        if tiers is not None and len(set(keys)) == len(keys) and not at:
            # A binary search is right about chains only.
            stored = answer.stored.blocks if answer.gaps else self.p.view.stored(namespace, joined(keys))
            assert len(tiers) == stored, "the presence table has another prefix"
            if answer.gaps:
                assert Counter(tiers) == +Counter(answer.stored.by_tier), "the table names other tiers"
            assert any(tiers) or answer.value == stored or not answer.gaps, "blocks in DRAM need no loading"
            sampled = self._in_table(namespace, keys, who, leading=True, step=3)
            if self._are_linked(namespace, keys):
                assert sampled is not None
                assert len(sampled) == stored, "a search that skips keys finds another prefix"
        return answer.value

    def _are_linked(self, namespace: int, keys: list[bytes]) -> bool:
        """Whether each of the keys that has a row follows the one before."""
        rows, parent_of = self.p.residency.index.find(namespace, joined(keys)), self.p.residency.blocks.parent
        return bool(((rows[1:] < 0) | (parent_of[rows[1:]] == rows[:-1]) & (rows[:-1] >= 0)).all())

    def _in_table(
        self, namespace: int, keys: list[bytes], tenant: int, leading: bool, step: int = 0
    ) -> bytes | None:
        """What a client of this tenant finds in the presence table; None: it has to ask."""
        table = self.p.residency.presence.tables.get(namespace)
        if table is None or native.presence is None:
            return None
        mapping = SimpleNamespace(view=memoryview(table.words).cast("B"))
        foreign = tenant != self.p.residency.namespaces[namespace].tenant
        reader = PresenceTable(mapping, foreign, False, 0)  # type: ignore[arg-type]
        tiers = reader.find_prefix(keys, step) if step else reader.find(keys, leading)
        self.found_in_tables += tiers is not None and ABSENT not in tiers
        return tiers

    def contains(self, namespace: int, keys: list[bytes], tenant: int | None = None) -> list[bool]:
        who = self.opened[namespace].tenant if tenant is None and namespace in self.opened else tenant or 0
        answer = self.ask(ev.Contains(0, namespace, joined(keys), who))
        assert isinstance(answer, ac.Presence), answer
        tiers = self._in_table(namespace, keys, who, leading=False)
        if tiers is not None:
            assert [tier != ABSENT for tier in tiers] == answer.mask.tolist(), "the table has other keys"
        return [bool(each) for each in answer.mask]

    def invalidate(self, namespace: int, keys: list[bytes]) -> int:
        answer = self.ask(ev.Invalidate(0, namespace, joined(keys)))
        assert isinstance(answer, ac.Answer), answer
        return answer.value

    def get(
        self, namespace: int, keys: list[bytes], client: int = 7, tenant: int | None = None, at: int = 0
    ) -> list[bytes]:
        """What a verifying reader gets who waits for everything that is under way."""
        grant = self.acquire(client, namespace, keys, tenant=tenant, at=at)
        if grant is None:
            request = self._request
            self.finish_all()
            grant = self.answers[request]
        assert isinstance(grant, ac.Grant), grant
        out: list[bytes] = []
        for data in self.read(namespace, keys, grant):
            if data is None:
                break
            out.append(data)
        if grant.lease:
            self.send(ev.Release(client, grant.lease))
        return out

    def read(self, namespace: int, keys: list[bytes], grant: ac.Grant) -> list[bytes | None]:
        """What a verifying reader gets: the payload, or None where it would see a bad checksum."""
        out: list[bytes | None] = []
        tier = self.tier_of(grant)
        for i, place in enumerate(self.places(tier, grant.where)):
            data = self.bytes.get(place, b"")
            out.append(data if hash_of(data) == int(grant.checksum[i]) else None)
            if tier:
                continue
            header = self.headers[place]
            told = (namespace, keys[i], int(grant.slots["version"][i]), int(grant.checksum[i]))
            assert (header.namespace, header.key, header.version, header.checksum) == told, "a header lies"
        return out

    def open(self, namespace: int, block_bytes: int = 100, tenant: int = 0, **more: float) -> None:
        event = ev.OpenNamespace(0, namespace, block_bytes, tenant, tenant, **more)
        assert isinstance(self.ask(event), ac.Answer)
        self.namespaces[namespace] = block_bytes
        self.opened[namespace] = replace(event, request=0)

    def tenant(self, number: int, *tiers: tuple[int, int | None], share: float = 1.0, **more: float) -> None:
        """Sets a tenant's (floor, limit) of each tier, in extents (None: no limit)."""
        quotas = tuple(
            Quota(floor * spec.extent_bytes, UNLIMITED if limit is None else limit * spec.extent_bytes, share)
            for (floor, limit), spec in zip(tiers, self._specs, strict=False)
        )
        self.tenants[number] = ev.SetTenant(number, quotas, weight=share, **more)
        self.send(self.tenants[number])

    def publish(self, namespace: int, domain: int) -> None:
        """From now on its extents are of this domain."""
        self.owners[domain] = self.opened[namespace].tenant
        answer = self.ask(ev.Publish(0, namespace, domain))
        assert answer is None or isinstance(answer, ac.Answer)
        self.opened[namespace].domain = domain

    def used(self, tier: int = 0, tenant: int | None = None) -> int:
        """Bytes in use in a tier, by one tenant or all."""
        extents = self.p.residency.tiers[tier].extents
        return extents.used_bytes if tenant is None else extents.holdings.of(tenant)[0]

    def extents(self, tier: int = 0) -> list[int]:
        """How many extents each tenant holds, by number."""
        return self.p.residency.tiers[tier].extents.holdings.extents.tolist()


def joined(keys: list[bytes]) -> Keys:
    return Keys(b"".join(keys), len(keys[0]) if keys else 1)


def granted_of(keys: list[bytes], room: ac.Reserved) -> list[bytes]:
    """Those of the keys that a room has slots for."""
    return [k for k, s in zip(keys, room.status.tolist(), strict=True) if s == ac.GRANTED]


def hash_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def restore(records: list[tuple[int, bytes, bytes, int, int, int, int]], tier: int = 1) -> ev.Restore:
    """A Restore event; a record is (namespace, key, parent, extent, index, version, checksum)."""

    def padded(keys: list[bytes]) -> np.ndarray:
        raw = b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys)
        return np.frombuffer(raw, np.uint8).reshape(len(keys), MAX_KEY_BYTES)

    return ev.Restore(
        tier,
        np.array([r[0] for r in records], np.uint32),
        padded([r[1] for r in records]),
        np.array([len(r[1]) for r in records], np.uint8),
        padded([r[2] for r in records]),
        np.array([len(r[2]) for r in records], np.uint8),
        np.array([r[3] for r in records], np.uint32),
        np.array([r[4] for r in records], np.uint32),
        np.array([r[5] for r in records], np.uint64),
        np.array([r[6] for r in records], np.uint64),
        np.full(len(records), np.inf),
    )
