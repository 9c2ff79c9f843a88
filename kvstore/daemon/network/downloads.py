"""Downloads: blocks on their way from the network into DRAM.

A block that several requests want is downloaded once. Blocks move in batches, in the order of the executor's
queue. A downloaded block is verified before it is committed to the core; a corrupt object is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.executor import BackendExecutor, batch_blocks
from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.daemon.network.names import block_name, is_name_of
from kvstore.daemon.network.tasks import CLIENT, Copied, Tasks, ask
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.dram import DramTier
from kvstore.tiers.network.base import Name, Object, Outcome, named_by_outcome
from kvstore.types import slot_bytes

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Downloads:
    """Downloads under way, by name. A read longer than `hedge_after_s` (0: no limit) is repeated once."""

    _core: Executor
    _dram: DramTier
    _executor: BackendExecutor
    _eligibility: Eligibility
    _existence: ExistenceChecks
    _tasks: Tasks
    hedge_after_s: float
    _downloads: dict[Name, Copied] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._downloads)

    def start(
        self,
        namespace: NamespaceEntry,
        keys: Sequence[bytes],
        parent: bytes,
        tenant: int,
        kind: int,
        until: float,
    ) -> list[Copied]:
        """Starts to download a chain whose first key follows `parent`. Joins downloads that are under way.

        Independent blocks are downloaded in the same way and get no parents.
        `kind` is the class of work at the backend's queue: DEMAND or PREFETCH.
        """
        if namespace.epoch is None:  # it became unknown again since the check of existence
            return []
        names = [block_name(namespace, key) for key in keys]
        downloads: list[Copied] = []
        batch: list[Name] = []
        most = batch_blocks(namespace.block_bytes)
        for i, name in enumerate(names):
            download = self._downloads.get(name)
            if download is None:
                download = self._downloads[name] = asyncio.get_running_loop().create_future()
                batch.append(name)
            downloads.append(download)
            ends = i + 1 == len(keys) or names[i + 1] in self._downloads or len(batch) == most
            if batch and ends:
                first = i + 1 - len(batch)
                before = keys[first - 1] if first else parent
                before = b"" if namespace.independent else before
                self._tasks.start(self._load(namespace, batch, before, tenant, kind, until), namespace)
                batch = []
        return downloads

    async def _load(
        self,
        namespace: NamespaceEntry,
        names: list[Name],
        parent: bytes,
        tenant: int,
        kind: int,
        until: float,
    ) -> None:
        """Downloads one batch when the executor's queue starts it."""
        loaded = set[bytes]()
        try:
            nbytes = len(names) * slot_bytes(namespace.block_bytes)
            read = partial(self._read, namespace, namespace.number, names, parent, until)
            loaded = await self._executor.schedule(tenant, kind, nbytes, read) or set()
        finally:
            for name in names:
                self._downloads.pop(name).set_result(name.key in loaded)

    async def _read(
        self, namespace: NamespaceEntry, number: int, names: list[Name], parent: bytes, until: float
    ) -> tuple[set[bytes], int]:
        """Returns the keys of a batch that are on this node now, and the downloaded bytes."""
        if namespace.number != number or not self._eligibility.serves(namespace):
            return set(), 0
        keys = [name.key for name in names]
        # The epochs of namespace and keys may have changed since the names were made.
        if not all(is_name_of(namespace, name) for name in names):
            return set(), 0
        joined = Keys(b"".join(keys), len(keys[0]))
        reserved = await ask(self._core, ev.Reserve(0, CLIENT, number, joined, parent, until, loading=True))
        if isinstance(reserved, ac.Deny):
            return set(), 0
        statuses = list(zip(keys, reserved.status, strict=True))
        present = {key for key, status in statuses if status == ac.PRESENT}
        if not reserved.lease:
            return present, 0
        granted = [key for key, status in statuses if status == ac.GRANTED]
        name_of = {name.key: name for name in names}
        objects = [
            Object(name_of[key], namespace.block_bytes, slot, fingerprint=namespace.fingerprint)
            for key, slot in zip(granted, self._dram.slots(reserved.where), strict=True)
        ]
        outcomes = await self._read_hedged(objects)
        # A block that was deleted during the read must not return.
        good = [
            outcome == Outcome.OK and not self._eligibility.deletes(thing.name)
            for outcome, thing in zip(outcomes, objects, strict=True)
        ]
        checksums = np.array([thing.checksum for thing in objects], np.uint64)
        await ask(self._core, ev.Commit(0, CLIENT, reserved.lease, checksums, np.array(good, np.bool_)))
        self._note(objects, outcomes)
        loaded = {key for key, ok in zip(granted, good, strict=True) if ok}
        return present | loaded, len(loaded) * namespace.block_bytes

    async def _read_hedged(self, objects: list[Object]) -> list[Outcome]:
        """Reads objects. With hedging, repeats the reads that failed or took too long."""
        executor, timeout_s = self._executor, self._executor.timeout_s
        first_s = self.hedge_after_s if 0 < self.hedge_after_s < timeout_s else 0.0
        outcomes = [Outcome.FAILED] * len(objects)
        if first_s:
            first = await executor.try_transfer(partial(executor.backend.read, objects), first_s)
            outcomes = first or outcomes
            executor.counters["hedged_blocks"] += outcomes.count(Outcome.FAILED)
        late = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
        if late:
            read = partial(executor.backend.read, [objects[i] for i in late])
            for i, outcome in zip(late, await executor.transfer(read, timeout_s - first_s), strict=False):
                outcomes[i] = outcome
        return outcomes

    def _note(self, objects: Sequence[Object], outcomes: Sequence[Outcome]) -> None:
        """Counts outcomes, caches which objects exist, and deletes corrupt objects."""
        named = named_by_outcome(objects, outcomes)
        for outcome, names in named.items():
            self._executor.counters[f"read_{outcome.name.lower()}_blocks"] += len(names)
            if outcome != Outcome.FAILED:
                self._existence.note(names, outcome == Outcome.OK)
        corrupt = named.get(Outcome.TORN, [])
        if corrupt:
            _log.warning("deleting %d corrupt objects on the network", len(corrupt))
            self._tasks.start(self._delete(corrupt))

    async def _delete(self, names: Sequence[Name]) -> None:
        await self._executor.call(partial(self._executor.backend.delete, names), self._executor.timeout_s)
