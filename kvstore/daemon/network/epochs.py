"""Epochs: how the deletion of a namespace on one node reaches all nodes.

The epoch of a namespace is an object on the network. Without an object it is zero. A node that deletes the
namespace writes a later epoch. Every node reads the epochs of its open namespaces every 2 s, and those of
newly opened ones at once. If an epoch is later than that of the node's blocks, the node deletes its blocks of
the namespace durably, then records the epoch. Names of objects depend on the epoch (see `names`), so objects
of an earlier epoch are never found, however late they are written.

An earlier epoch, or none, is no deletion: the network has lost the object. A node that knows a later epoch
writes that again. So nodes that write different epochs, at whatever times, end with the latest.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvstore import arena
from kvstore.core import actions as ac
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.names import EPOCH_BYTES, ZERO, epoch_name, next_epoch
from kvstore.daemon.network.tasks import Callback, Tasks
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import EventLog, Requester
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.tiers.network.base import Object, Outcome
from kvstore.types import ALIGN

_log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""Time between reads of all epochs: how long other nodes may serve blocks of a deleted namespace."""

_EPOCHS_PER_CALL = 1024


class Renewal(NamedTuple):
    """A change of an epoch: `before` (empty: it was corrupt), what was written, and what was read `after`.

    `after` is later than what was `written` if another node has changed the epoch at the same time.
    """

    before: bytes
    written: bytes
    after: bytes


class Epochs:
    """Reads, compares and renews the epochs of shared namespaces."""

    def __init__(
        self,
        core: Executor,
        executor: BackendExecutor,
        eligibility: Eligibility,
        namespaces: Namespaces,
        tasks: Tasks,
        event_log: EventLog,
        random_bits: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        """`random_bits` returns a number of that many random bits, `clock` Unix time in s."""
        self.delete_here: Callable[[Requester, NamespaceEntry], None]
        """Empties a namespace on this node, and answers when this is durable. Set by the composition."""
        self.record: Callable[[NamespaceEntry], None]
        """Records a namespace on NVMe. Set by the composition."""
        self.on_known: Callable[[NamespaceEntry], None] = lambda namespace: None
        """Called when the epoch of a namespace is known, or another one."""
        self._core = core
        self._executor = executor
        self._eligibility = eligibility
        self._namespaces = namespaces
        self._tasks = tasks
        self._event_log = event_log
        self._random_bits = random_bits
        self._clock = clock
        self._asked = asyncio.Event()
        self._all_at = 0.0
        self._lost: set[bytes] = set()
        self._torn: set[bytes] = set()

    def start(self) -> None:
        """Starts to read epochs."""
        self._tasks.start(self._watch())

    def ask(self) -> None:
        """Has unknown epochs read now."""
        self._asked.set()

    def check_all(self) -> None:
        """Has all epochs read now: the network is used again, or not used any more."""
        self._eligibility.unreadable.clear()
        self._all_at = 0.0
        self._asked.set()

    # -- comparing

    async def _watch(self) -> None:
        while True:
            self._asked.clear()
            now = self._core.now()
            every = self._all_at <= now
            if every:
                self._all_at = now + CHECK_EVERY_S
            wanted = [each for each in self._namespaces if self._is_wanted(each, every)]
            if self._executor.usable:
                try:
                    await self._check(wanted)
                except Exception:  # a bug must not end the comparison
                    _log.exception("the epochs of namespaces could not be compared")
            self._eligibility.end_waits(wanted)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._all_at - self._core.now())):
                    await self._asked.wait()

    def _is_wanted(self, namespace: NamespaceEntry, every: bool) -> bool:
        unknown = namespace.epoch is None and namespace.fingerprint not in self._eligibility.unreadable
        return namespace.number > 0 and (every or unknown) and self._eligibility.shares(namespace)

    async def _check(self, namespaces: Sequence[NamespaceEntry]) -> None:
        for at in range(0, len(namespaces), _EPOCHS_PER_CALL):
            batch = [(each, each.number, each.epoch) for each in namespaces[at : at + _EPOCHS_PER_CALL]]
            found = await self._read([each.fingerprint for each, _, _ in batch])
            for (namespace, number, known), (outcome, epoch) in zip(batch, found, strict=True):
                # What was read while the namespace was deleted or changed may be from before.
                busy = namespace.fingerprint in self._eligibility.deletions
                if not busy and (namespace.number, namespace.epoch) == (number, known):
                    self._compare(namespace, outcome, epoch)

    def _compare(self, namespace: NamespaceEntry, outcome: Outcome, epoch: bytes) -> None:
        fingerprint, known = namespace.fingerprint, namespace.epoch
        if outcome not in (Outcome.OK, Outcome.MISSING):
            self._eligibility.unreadable.add(fingerprint)
            if outcome == Outcome.TORN and fingerprint not in self._torn:
                self._torn.add(fingerprint)
                self._report_torn(fingerprint)
            return
        self._eligibility.unreadable.discard(fingerprint)
        self._torn.discard(fingerprint)
        was_lost = fingerprint in self._lost
        self._lost.discard(fingerprint)
        if epoch > (known or ZERO):
            self._start_change(namespace, epoch)
        elif known is None:
            self._set(namespace, ZERO)
        elif epoch < known and was_lost:
            self._tasks.start(self._restore(fingerprint, known), namespace)
        elif epoch < known:
            # A node that replaces an epoch may delete it first: only the second time counts.
            self._lost.add(fingerprint)

    def _report_torn(self, fingerprint: bytes) -> None:
        problem = "the epoch of a namespace is corrupt: invalidate the namespace again"
        _log.error("%s on the network: %s", fingerprint.hex(), problem)
        self._event_log.add(EntryKind.NETWORK, namespace=fingerprint.hex(), detail=problem)

    # -- changing

    def _start_change(self, namespace: NamespaceEntry, epoch: bytes) -> None:
        # From now on the namespace neither reads nor writes on the network.
        self._eligibility.deletions[namespace.fingerprint] += 1
        self._tasks.start(self._change(namespace, namespace.epoch, epoch), namespace)

    async def _change(self, namespace: NamespaceEntry, known: bytes | None, epoch: bytes) -> None:
        """Deletes the local blocks of a namespace, then sets its epoch.

        Uploads under way need no wait: their names are those of the earlier epoch.
        """
        try:
            while self._namespaces.at(namespace.number) is namespace:
                if await self._delete_here(namespace):
                    # Recorded last: after a crash before this, the blocks are deleted again.
                    self._set(namespace, epoch if namespace.epoch == known else None)
                    break
                await asyncio.sleep(CHECK_EVERY_S)
        finally:
            self._eligibility.deletions -= Counter((namespace.fingerprint,))
            self._eligibility.end_waits((namespace,))
            self.ask()

    async def _delete_here(self, namespace: NamespaceEntry) -> bool:
        """Deletes all blocks of a namespace on this node. Returns whether this is durable."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(action: Any) -> None:
            if not answer.done():  # the task may have been cancelled
                answer.set_result(action)

        self.delete_here(Callback(answered), namespace)
        action = await answer
        if isinstance(action, ac.Deny):
            _log.warning("a namespace that another node deleted cannot be deleted yet: %s", action.why)
            return False
        if action.value:
            what = f"its epoch has changed: {action.value} blocks are deleted, as on another node"
            _log.info("namespace %s: %s", namespace.fingerprint.hex(), what)
            self._event_log.add(EntryKind.FORGOTTEN, namespace=namespace.fingerprint.hex(), detail=what)
        return True

    def _set(self, namespace: NamespaceEntry, epoch: bytes | None) -> None:
        namespace.epoch = epoch
        if epoch is None:
            return  # it is read when the deletion has ended
        if epoch != ZERO and namespace.number:
            self.record(namespace)
        self.on_known(namespace)

    # -- writing

    async def renew(self, fingerprint: bytes) -> Renewal | None:
        """Writes a later epoch. Returns None if the backend does not confirm that the epoch is another one.

        Concurrent calls, also of several nodes, may end with one new epoch for all of them.
        """
        [(outcome, before)] = await self._read([fingerprint])
        if outcome == Outcome.FAILED:
            return None
        last = max(before, *self.known(fingerprint), ZERO)
        written = next_epoch(last, self._clock(), self._random_bits(64))
        after = await self._write(fingerprint, written)
        return Renewal(before, written, after) if after else None

    async def _restore(self, fingerprint: bytes, epoch: bytes) -> None:
        """Writes a known epoch again that the network has lost."""
        if await self._write(fingerprint, epoch):
            _log.warning("namespace %s: the network had lost its epoch; written again", fingerprint.hex())

    async def _write(self, fingerprint: bytes, epoch: bytes) -> bytes:
        """Writes an epoch. Returns what the network has then: this or a later one; empty: unknown."""
        executor = self._executor
        write = partial(executor.backend.write, [_epoch_object(fingerprint, epoch)])
        delete = partial(executor.backend.delete, [epoch_name(fingerprint)])
        # A backend may keep an existing object: then it is deleted first.
        for replace in (False, True):
            if replace:
                await executor.call(delete, executor.timeout_s)
            if list(await executor.call(write, executor.timeout_s)) != [Outcome.OK]:
                return b""
            [(outcome, after)] = await self._read([fingerprint])
            if outcome == Outcome.OK and after >= epoch:
                return after
            if outcome == Outcome.FAILED:
                return b""
        return b""

    def known(self, fingerprint: bytes) -> set[bytes]:
        """Returns the known epochs of the namespaces with a fingerprint."""
        mine = (namespace for namespace in self._namespaces if namespace.fingerprint == fingerprint)
        return {namespace.epoch for namespace in mine if namespace.epoch is not None}

    def settle(self, fingerprint: bytes, renewal: Renewal) -> None:
        """Applies a new epoch after this node has deleted its blocks.

        If another node has changed the epoch too, blocks that were stored since may be older than that: the
        epoch is unknown until it is compared.
        """
        for namespace in self._namespaces:
            if namespace.fingerprint == fingerprint:
                was_last = (namespace.epoch or ZERO) >= renewal.before
                self._set(namespace, renewal.after if was_last and renewal.after == renewal.written else None)

    async def _read(self, fingerprints: Sequence[bytes]) -> list[tuple[Outcome, bytes]]:
        """Returns the outcome of each read, and the epoch: zero if it is missing, empty if unknown."""
        memory = memoryview(mmap.mmap(-1, ALIGN * len(fingerprints)))
        things = [
            Object(epoch_name(each), EPOCH_BYTES, memory[i * ALIGN : (i + 1) * ALIGN])
            for i, each in enumerate(fingerprints)
        ]
        executor = self._executor
        outcomes = await executor.call(partial(executor.backend.read, things), executor.timeout_s)
        outcomes = outcomes or [Outcome.FAILED] * len(things)
        read = []
        for thing, outcome in zip(things, outcomes, strict=True):
            epoch = bytes(thing.memory[:EPOCH_BYTES]) if outcome == Outcome.OK else b""
            read.append((outcome, ZERO if outcome == Outcome.MISSING else epoch))
        return read


def _epoch_object(fingerprint: bytes, epoch: bytes) -> Object:
    memory = memoryview(mmap.mmap(-1, ALIGN))
    memory[:EPOCH_BYTES] = epoch
    thing = Object(epoch_name(fingerprint), EPOCH_BYTES, memory)
    thing.checksum = arena.checksum(memory[:EPOCH_BYTES], thing.seed())
    return thing
