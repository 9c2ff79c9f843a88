"""A byte-carrying world around Placement, without processes, files or time of its own.

Tiers are dictionaries from (tier, extent, index) to payload. Copies wait in a list and are finished in the
order, and with the results, that the test chooses: late, failed, corrupted. After every event all invariants
are checked, and every readable block is compared with what was put under its key.
"""

from __future__ import annotations

import numpy as np
import xxhash

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.keys import Keys
from kvstore.core.placement import Limits, Placement
from kvstore.core.residency import TierSpec
from kvstore.types import ALIGN, Tier

Place = tuple[int, int, int]


def payload(namespace: int, key: bytes, salt: int = 0) -> bytes:
    return b"%d/%d/" % (namespace, salt) + key


class World:
    """Runs the actions of one Placement. `dram` and `nvme` are extents of four slots each (nvme 0: none)."""

    def __init__(
        self, dram: int = 2, nvme: int = 4, *, write_policy: str = "write_through", slots: int = 4
    ) -> None:
        size = slots * (ALIGN + 128) + ALIGN
        size = -(-size // ALIGN) * ALIGN
        specs = [TierSpec(Tier.DRAM, dram * size, size, True)]
        if nvme:
            specs.append(TierSpec(Tier.NVME, nvme * slots * ALIGN, slots * ALIGN, False))
        self.p = Placement(
            specs, max_blocks=512, seed=7, write_policy=write_policy, limits=Limits(leases_per_client=8)
        )
        self.now = 0.0
        self.bytes: dict[Place, bytes] = {}
        self.headers: dict[Place, tuple[int, bytes, int]] = {}
        self.records: dict[tuple[int, bytes], tuple[int, int]] = {}
        self.copies: dict[int, ac.Copy] = {}
        self.probes: dict[int, ac.Probe] = {}
        self.answers: dict[int, ac.Action] = {}
        self._request = 0
        for tier, n in enumerate([dram, nvme][: len(specs)]):
            for extent in range(n):
                self.send(ev.ExtentReady(tier, extent))
            self.send(ev.ExtentsEnd(tier))

    # -- driving

    def send(self, event: ev.Event) -> None:
        self.now += 0.001
        for action in self.p.handle(event, self.now):
            self._run(action)
        self.p.check()

    def ask(self, event: ev.Event) -> ac.Action | None:
        """Sends a request and returns its answer, or None if it waits."""
        self._request += 1
        event.request = self._request
        self.send(event)
        return self.answers.get(self._request)

    def _run(self, action: ac.Action) -> None:
        if isinstance(action, ac.Grant | ac.Room | ac.Answer | ac.Deny):
            if action.request:
                assert action.request not in self.answers, "answered twice"
                self.answers[action.request] = action
        elif isinstance(action, ac.Copy):
            self.copies[action.transfer] = action
        elif isinstance(action, ac.Probe):
            self.probes[action.probe] = action
        elif isinstance(action, ac.Stamp):
            for i, place in enumerate(self.places(action.tier, action.where)):
                self.headers[place] = (
                    int(action.identity.namespace[i]),
                    action.identity.key(i),
                    int(action.version[i]),
                )
        elif isinstance(action, ac.Drop):
            for i, place in enumerate(self.places(action.tier, action.where)):
                self.headers.pop(place, None)
                who = (int(action.identity.namespace[i]), action.identity.key(i))
                if action.tier == 1 and self.records.get(who) == place[1:]:
                    del self.records[who]

    @staticmethod
    def places(tier: int, where: ac.Where) -> list[Place]:
        return [(tier, e, i) for e, i in zip(where.extent.tolist(), where.index.tolist(), strict=True)]

    # -- copies end

    def finish(self, transfer: int, results: list[int]) -> None:
        """Ends one copy; results as in CopyDone. Bytes move now, from what the source holds now."""
        copy = self.copies.pop(transfer)
        source, target = (
            self.places(copy.source, copy.source_where),
            self.places(copy.target, copy.target_where),
        )
        out = np.array([*results[: len(source)], *[ev.OK] * (len(source) - len(results))], np.uint8)
        for i, (a, b) in enumerate(zip(source, target, strict=True)):
            who = (int(copy.identity.namespace[i]), copy.identity.key(i))
            bytes_ = self.bytes.get(a, b"nothing")
            if out[i] == ev.OK and hash_of(bytes_) != int(copy.identity.checksum[i]):
                out[i] = ev.CORRUPT
            if out[i] == ev.OK:
                self.bytes[b] = bytes_
                if copy.target == 1:
                    self.records[who] = b[1:]
            elif copy.target == 0:
                self.bytes[b] = b"torn"
        self.send(ev.CopyDone(transfer, out))

    def finish_all(self) -> None:
        while self.copies:
            self.finish(next(iter(self.copies)), [])

    def probe(self, number: int) -> None:
        probe = self.probes.pop(number)
        good = [
            hash_of(self.bytes.get(p, b"")) == int(probe.identity.checksum[i])
            for i, p in enumerate(self.places(probe.tier, probe.where))
        ]
        self.send(ev.ProbeDone(number, np.array(good, np.bool_)))

    # -- a client

    def reserve(self, client: int, namespace: int, keys: list[bytes], parent: bytes = b"", wait: float = 0.0):
        return self.ask(ev.Reserve(0, client, namespace, joined(keys), parent, self.now + wait))

    def fill(self, namespace: int, keys: list[bytes], room: ac.Room, salt: int = 0) -> np.ndarray:
        """Writes the payloads of the granted keys; returns their checksums."""
        granted = [k for k, s in zip(keys, room.status.tolist(), strict=True) if s == ac.GRANTED]
        for key, place in zip(granted, self.places(0, room.where), strict=True):
            self.bytes[place] = payload(namespace, key, salt)
        return np.array([hash_of(payload(namespace, k, salt)) for k in granted], np.uint64)

    def put(self, client: int, namespace: int, keys: list[bytes], parent: bytes = b"") -> int:
        """Stores a chain at once; returns how many blocks were stored."""
        room = self.reserve(client, namespace, keys, parent)
        if not isinstance(room, ac.Room) or not room.lease:
            return 0
        sums = self.fill(namespace, keys, room)
        written = np.ones(len(sums), np.bool_)
        answer = self.ask(ev.Commit(0, client, room.lease, sums, written))
        assert isinstance(answer, ac.Answer)
        return answer.value

    def acquire(self, client: int, namespace: int, keys: list[bytes], wait: float = 1.0) -> ac.Action | None:
        return self.ask(ev.Acquire(0, client, namespace, joined(keys), self.now + wait))

    def read(self, namespace: int, keys: list[bytes], grant: ac.Grant) -> list[bytes | None]:
        """What a verifying reader gets: the payload, or None where it would see a bad checksum."""
        out: list[bytes | None] = []
        for i, place in enumerate(self.places(0, grant.where)):
            data = self.bytes.get(place, b"")
            out.append(data if hash_of(data) == int(grant.checksum[i]) else None)
            assert self.headers[place] == (namespace, keys[i], int(grant.version[i])), "a header lies"
        return out

    def open(self, namespace: int, block_bytes: int = 100) -> None:
        assert isinstance(self.ask(ev.OpenNamespace(0, namespace, block_bytes)), ac.Answer)


def joined(keys: list[bytes]) -> Keys:
    return Keys(b"".join(keys), len(keys[0]) if keys else 1)


def hash_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
