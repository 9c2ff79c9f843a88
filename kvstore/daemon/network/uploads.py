"""Uploads: blocks on their way from DRAM to the network.

A block is uploaded once. Blocks move in batches, in the order of the executor's queue. A block is verified
before it is written. A block that is corrupt in memory is reported to the core and not uploaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvstore import arena
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.queues.device_queue import DEMAND, WRITE_BACK
from kvstore.daemon.network.eligibility import Eligibility, Target
from kvstore.daemon.network.executor import BackendExecutor, batch_blocks
from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.daemon.network.names import block_name, is_name_of
from kvstore.daemon.network.tasks import CLIENT, Copied, Tasks, ask
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.tiers.dram import DramTier
from kvstore.tiers.network.base import Backend, Name, Object, Outcome, named_by_outcome
from kvstore.types import slot_bytes

_MOST_WAITING = 1 << 14


@dataclass(slots=True, eq=False)
class Upload:
    """One block of the namespace with this fingerprint.

    `ended` has whether the network has it; once `started`, no other upload may replace it.
    """

    name: Name
    fingerprint: bytes
    ended: Copied
    kind: int
    started: bool = False


@dataclass(slots=True, eq=False)
class Uploads:
    """Uploads under way, by name."""

    _core: Executor
    _dram: DramTier
    _namespaces: Namespaces
    _executor: BackendExecutor
    _eligibility: Eligibility
    _existence: ExistenceChecks
    _tasks: Tasks
    _uploads: dict[Name, Upload] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._uploads)

    def within(self, targets: Collection[Target]) -> list[Copied]:
        """Returns the uploads of these objects and of these namespaces."""
        return [
            upload.ended
            for name, upload in self._uploads.items()
            if name in targets or upload.fingerprint in targets
        ]

    def offer(self, action: ac.OfferBlocks) -> None:
        """Uploads blocks that the core offers, at the lowest priority. Drops them if too many wait."""
        identity = action.identity
        for number in np.unique(identity.namespace).tolist():
            namespace = self._namespaces.at(number)
            if namespace is None or not self._eligibility.serves(namespace):
                continue
            keys = [identity.key(i) for i in np.flatnonzero(identity.namespace == number).tolist()]
            if len(self._uploads) + len(keys) > _MOST_WAITING:
                self._executor.counters["dropped_offers"] += len(keys)
                continue
            if namespace.epoch is not None:
                self._start_offered(namespace, keys)
            else:
                self._tasks.start(self._start_named(namespace, keys), namespace)

    async def _start_named(self, namespace: NamespaceEntry, keys: Sequence[bytes]) -> None:
        """Uploads offered blocks once the epoch of their namespace is known. Drops them if it is not read."""
        number = namespace.number
        known = await self._eligibility.knows_epoch(namespace, self._executor.timeout_s)
        if known and namespace.number == number:
            self._start_offered(namespace, keys)
        else:
            self._executor.counters["dropped_offers"] += len(keys)

    def _start_offered(self, namespace: NamespaceEntry, keys: Sequence[bytes]) -> None:
        for length in {len(key) for key in keys}:
            some = [key for key in keys if len(key) == length]
            self.start(namespace, some, namespace.tenant, WRITE_BACK)

    def start(self, namespace: NamespaceEntry, keys: Sequence[bytes], tenant: int, kind: int) -> list[Copied]:
        """Starts to upload blocks. Joins uploads that are under way.

        `kind` is the class of work at the backend's queue. An upload of another kind that still waits is
        replaced if one of the two is DEMAND. The epoch of the namespace must be known.
        """
        uploads: list[Upload] = []
        batch: list[Upload] = []
        for key in keys:
            name = block_name(namespace, key)
            upload = self._uploads.get(name)
            if upload is None or (kind == DEMAND != upload.kind and not upload.started):
                ended = asyncio.get_running_loop().create_future()
                upload = self._uploads[name] = Upload(name, namespace.fingerprint, ended, kind)
                batch.append(upload)
            uploads.append(upload)
        most = batch_blocks(namespace.block_bytes)
        for at in range(0, len(batch), most):
            self._tasks.start(self._store(namespace, batch[at : at + most], tenant, kind), namespace)
        return [upload.ended for upload in uploads]

    async def _store(self, namespace: NamespaceEntry, batch: list[Upload], tenant: int, kind: int) -> None:
        """Uploads one batch when the executor's queue starts it."""
        stored = set[bytes]()
        try:
            nbytes = len(batch) * slot_bytes(namespace.block_bytes)
            write = partial(self._write, namespace, namespace.number, batch, kind)
            stored = await self._executor.schedule(tenant, kind, nbytes, write) or set()
        finally:
            for upload in batch:
                if self._uploads.get(upload.name) is upload:
                    del self._uploads[upload.name]
                upload.ended.set_result(upload.name.key in stored)

    async def _write(
        self, namespace: NamespaceEntry, number: int, batch: list[Upload], kind: int
    ) -> tuple[set[bytes], int]:
        """Returns the keys of a batch that are on the network now, and the uploaded bytes."""
        names = []
        for upload in batch:
            # A more urgent upload may have replaced this one. Blocks of a number are of the epochs that
            # namespace and keys have now, and never of later ones.
            is_last = self._uploads.get(upload.name) is upload and is_name_of(namespace, upload.name)
            if is_last and not self._eligibility.deletes(upload.name):
                upload.started = True
                names.append(upload.name)
        if not names or namespace.number != number or not self._eligibility.serves(namespace):
            return set(), 0
        until = self._core.now() + self._executor.timeout_s
        exist = await self._existence.probe(names, until)
        stored = {name.key for name, exists in zip(names, exist, strict=True) if exists}
        moved, left = 0, [name for name in names if name.key not in stored]
        while left:
            deadline = until if kind == DEMAND else 0.0
            objects, outcomes = await self._write_run(namespace, number, left, deadline)
            written = {t.name.key for t, o in zip(objects, outcomes, strict=True) if o == Outcome.OK}
            stored |= written
            moved += len(written) * namespace.block_bytes
            if objects and not written:
                break
            # A block that has left this node is skipped.
            left = left[max(1, len(objects)) :]
        return stored, moved

    async def _write_run(
        self, namespace: NamespaceEntry, number: int, names: list[Name], deadline: float
    ) -> tuple[list[Object], list[Outcome]]:
        """Writes the leading blocks that are in DRAM by the deadline."""
        executor, keys = self._executor, [name.key for name in names]
        joined = Keys(b"".join(keys), len(keys[0]))
        event = ev.Acquire(0, CLIENT, number, joined, deadline, namespace.tenant, no_touch=True)
        grant = await ask(self._core, event)
        if isinstance(grant, ac.Deny) or not grant.lease:
            return [], []
        try:
            n, checksums = len(grant.slots), grant.checksum.tolist()
            parents = self._core.view.parents(number, joined)
            slots = self._dram.slots(grant.where)
            nbytes, fingerprint = namespace.block_bytes, namespace.fingerprint
            objects = [
                Object(names[i], nbytes, slots[i], checksums[i], parents[i], fingerprint) for i in range(n)
            ]
            write = partial(_write_verified, executor.backend, objects)
            outcomes = await executor.transfer(write, executor.timeout_s) or [Outcome.FAILED] * n
        finally:
            self._core.handle(ev.Release(CLIENT, grant.lease))
        self._note(number, objects, outcomes)
        return objects, outcomes

    def _note(self, number: int, objects: Sequence[Object], outcomes: Sequence[Outcome]) -> None:
        """Counts outcomes, caches which objects exist, and reports corrupt blocks to the core."""
        named = named_by_outcome(objects, outcomes)
        for outcome, names in named.items():
            self._executor.counters[f"written_{outcome.name.lower()}_blocks"] += len(names)
        self._existence.note(named.get(Outcome.OK, ()), exist=True)
        corrupt = [name.key for name in named.get(Outcome.TORN, ())]
        if corrupt:
            self._core.handle(ev.Suspect(0, number, Keys(b"".join(corrupt), len(corrupt[0]))))


def _write_verified(backend: Backend, objects: Sequence[Object], ends: float) -> list[Outcome]:
    """Writes the objects whose bytes match their checksum. The outcome of the others is TORN."""
    intact = [
        arena.checksum(thing.memory[: thing.length], thing.seed()) == thing.checksum for thing in objects
    ]
    some = [thing for thing, ok in zip(objects, intact, strict=True) if ok]
    outcomes = iter(backend.write(some, ends) if some else [])
    return [next(outcomes) if ok else Outcome.TORN for ok in intact]
