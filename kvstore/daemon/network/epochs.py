"""Epochs: how the deletion of a namespace, or of single keys, on one node reaches all nodes.

The epoch of a namespace is an object on the network. Without an object it is zero. A node that deletes the
namespace writes a later epoch. Every node reads the epochs of its open namespaces every 2 s, and those of
newly opened ones at once. If an epoch is later than that of the node's blocks, the node deletes its blocks of
the namespace durably, then records the epoch. Names of objects depend on the epoch (see `names`), so objects
of an earlier epoch are never found, however late they are written.

An earlier epoch, or none, is no deletion: the network has lost the object. A node that knows a later epoch
writes that again. So nodes that write different epochs, at whatever times, end with the latest.

A key that is deleted alone gets an epoch of its own, in a list that the epoch's object names by a digest. A
node that finds another list deletes its blocks of the keys that are new to it, and writes the keys that the
network lacks. So lists of several nodes are merged, and a list that the network has lost is written again. No
key leaves the list before the namespace's epoch changes. A node does not record which keys it has deleted:
after a restart it deletes all of the list again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvstore.core import actions as ac
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.epoch_objects import Epoch, EpochObjects, merged
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.key_lists import KeyLists, set_keys
from kvstore.daemon.network.names import ZERO, block_name, next_epoch
from kvstore.daemon.network.tasks import Callback, Tasks
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import EventLog, Requester
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.tiers.network.base import Name, Outcome

_log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""Time between reads of all epochs: how long other nodes may serve blocks of a deleted namespace or key."""

_EPOCHS_PER_CALL = 1024
_KEYS_PER_EVENT = 1024


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
        self.delete_keys_here: Callable[[Requester, NamespaceEntry, Keys], None]
        """Deletes blocks on this node, and answers when this is durable. Set by the composition."""
        self.record: Callable[[NamespaceEntry], None]
        """Records a namespace on NVMe. Set by the composition."""
        self.on_known: Callable[[NamespaceEntry], None] = lambda namespace: None
        """Called when the epoch of a namespace is known, or another one."""
        self.on_deleted: Callable[[list[Name]], None] = lambda names: None
        """Called with earlier names of blocks that another node has deleted."""
        self._core = core
        self._executor = executor
        self._objects = objects = EpochObjects(executor)
        self.keys = KeyLists(objects, random_bits, clock)
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
            batch = [(each, _known(each)) for each in namespaces[at : at + _EPOCHS_PER_CALL]]
            found = await self._objects.read([each.fingerprint for each, _ in batch])
            for (namespace, known), (outcome, epoch) in zip(batch, found, strict=True):
                # What was read while the namespace was deleted or changed may be from before.
                if namespace.fingerprint not in self._eligibility.deletions and _known(namespace) == known:
                    self._compare(namespace, outcome, epoch)

    def _compare(self, namespace: NamespaceEntry, outcome: Outcome, found: Epoch) -> None:
        fingerprint = namespace.fingerprint
        known = Epoch(namespace.epoch or ZERO, namespace.keys_digest)
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
        has_other_keys = found.value == known.value and found.keys not in (known.keys, b"")
        if found.value > known.value or has_other_keys:
            self._start_change(namespace, found, was_lost)
        elif namespace.epoch is None:
            self._set(namespace, ZERO)
        elif found != known and was_lost:
            self._tasks.start(self._restore(namespace), namespace)
        elif found != known:
            # A node that replaces an epoch may delete it first: only the second time counts.
            self._lost.add(fingerprint)

    def _report_torn(self, fingerprint: bytes) -> None:
        problem = "the epoch of a namespace is corrupt: invalidate the namespace again"
        _log.error("%s on the network: %s", fingerprint.hex(), problem)
        self._event_log.add(EntryKind.NETWORK, namespace=fingerprint.hex(), detail=problem)

    # -- changing

    def _start_change(self, namespace: NamespaceEntry, found: Epoch, was_lost: bool) -> None:
        # From now on the namespace neither reads nor writes on the network.
        self._eligibility.deletions[namespace.fingerprint] += 1
        self._tasks.start(self._change(namespace, namespace.epoch, found, was_lost), namespace)

    async def _change(
        self, namespace: NamespaceEntry, known: bytes | None, found: Epoch, was_lost: bool
    ) -> None:
        """Deletes the local blocks of a namespace or of single keys, then sets the epochs.

        Uploads under way need no wait: their names are those of the earlier epoch.
        """
        fingerprint = namespace.fingerprint
        try:
            outcome, listed = await self._objects.read_keys(fingerprint, found.keys)
            whole = found.value > (known or ZERO)
            if outcome != Outcome.OK and not whole:
                self._missed_keys(namespace, found.keys, outcome, was_lost)
                return
            while self._namespaces.at(namespace.number) is namespace:
                if await (self._delete_here(namespace) if whole else self._delete_keys(namespace, listed)):
                    # Recorded last: after a crash before this, the blocks are deleted again.
                    is_same = namespace.epoch == known
                    later = {k: e for k, e in namespace.key_epochs.items() if e > found.value}
                    self._set(namespace, found.value if is_same else None, merged(listed, later))
                    break
                await asyncio.sleep(CHECK_EVERY_S)
        finally:
            self._eligibility.deletions -= Counter((fingerprint,))
            self._eligibility.end_waits((namespace,))
            self.ask()
        if namespace.keys_digest != found.keys and not whole:
            await self.keys.publish(namespace)

    def _missed_keys(self, namespace: NamespaceEntry, keys: bytes, outcome: Outcome, was_lost: bool) -> None:
        """Handles a list of deleted keys that cannot be read: nobody waits for it."""
        self._eligibility.unreadable.add(namespace.fingerprint)
        if outcome != Outcome.FAILED and was_lost:
            # Another node that knows the list finds that the network has none, and writes it again.
            self._tasks.start(self.keys.remove(namespace, keys), namespace)
        elif outcome != Outcome.FAILED:
            self._lost.add(namespace.fingerprint)

    async def _delete_here(self, namespace: NamespaceEntry) -> bool:
        """Deletes all blocks of a namespace on this node. Returns whether this is durable."""
        n = await self._deleted(self.delete_here, namespace)
        if n:
            what = f"its epoch has changed: {n} blocks are deleted, as on another node"
            _log.info("namespace %s: %s", namespace.fingerprint.hex(), what)
            self._event_log.add(EntryKind.FORGOTTEN, namespace=namespace.fingerprint.hex(), detail=what)
        return n is not None

    async def _delete_keys(self, namespace: NamespaceEntry, listed: Mapping[bytes, bytes]) -> bool:
        """Deletes the blocks of listed keys that are new to this node. Returns whether this is durable."""
        known = namespace.key_epochs
        new = [key for key, epoch in listed.items() if epoch > known.get(key, b"")]
        if namespace.epoch is not None:
            # The network may have blocks that nodes have uploaded since the deletion.
            self.on_deleted([block_name(namespace, key) for key in new])
        total = 0
        for keys in _batches(new):
            n = await self._deleted(self.delete_keys_here, namespace, keys)
            if n is None:
                return False
            total += n
        if total:
            _log.info(
                "namespace %s: %d blocks are deleted, as on another node", namespace.fingerprint.hex(), total
            )
        return True

    async def _deleted(self, delete: Callable[..., None], *what: Any) -> int | None:
        """Returns how many blocks of `what` are deleted durably, None if this was refused."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(action: Any) -> None:
            if not answer.done():  # the task may have been cancelled
                answer.set_result(action)

        delete(Callback(answered), *what)
        action = await answer
        if isinstance(action, ac.Deny):
            _log.warning("blocks that another node deleted cannot be deleted yet: %s", action.why)
            return None
        return int(action.value)

    def _set(
        self, namespace: NamespaceEntry, epoch: bytes | None, key_epochs: Mapping[bytes, bytes] | None = None
    ) -> None:
        is_other = epoch != namespace.epoch
        namespace.epoch = epoch
        set_keys(namespace, {} if key_epochs is None or epoch is None else key_epochs)
        if epoch is None:
            return  # it is read when the deletion has ended
        if epoch != ZERO and namespace.number and is_other:
            self.record(namespace)
        self.on_known(namespace)

    # -- writing

    async def renew(self, fingerprint: bytes) -> Renewal | None:
        """Writes a later epoch. Returns None if the backend does not confirm that the epoch is another one.

        Concurrent calls, also of several nodes, may end with one new epoch for all of them.
        """
        [(outcome, before)] = await self._objects.read([fingerprint])
        if outcome == Outcome.FAILED:
            return None
        last = max(before.value, *self.known(fingerprint), ZERO)
        written = next_epoch(last, self._clock(), self._random_bits(64))
        after = await self._objects.write(fingerprint, Epoch(written), before)
        return Renewal(before.value, written, after.value) if after else None

    async def _restore(self, namespace: NamespaceEntry) -> None:
        """Writes the known epoch of a namespace, and its deleted keys, again that the network has lost."""
        if await self.keys.publish(namespace):
            _log.warning(
                "namespace %s: the network had lost its epoch; written again", namespace.fingerprint.hex()
            )

    def known(self, fingerprint: bytes) -> set[bytes]:
        """Returns the known epochs of the namespaces with a fingerprint."""
        return {each.epoch for each in self.of(fingerprint) if each.epoch is not None}

    def of(self, fingerprint: bytes) -> list[NamespaceEntry]:
        """Returns the namespaces with a fingerprint."""
        return [namespace for namespace in self._namespaces if namespace.fingerprint == fingerprint]

    def settle(self, fingerprint: bytes, renewal: Renewal) -> None:
        """Applies a new epoch after this node has deleted its blocks.

        If another node has changed the epoch too, blocks that were stored since may be older than that: the
        epoch is unknown until it is compared.
        """
        for namespace in self.of(fingerprint):
            was_last = (namespace.epoch or ZERO) >= renewal.before
            self._set(namespace, renewal.after if was_last and renewal.after == renewal.written else None)


def _known(namespace: NamespaceEntry) -> tuple[int, bytes | None, bytes]:
    return namespace.number, namespace.epoch, namespace.keys_digest


def _batches(keys: Sequence[bytes]) -> Iterator[Keys]:
    """Yields keys in batches of one length each."""
    for length in {len(key) for key in keys}:
        same = [key for key in keys if len(key) == length]
        for at in range(0, len(same), _KEYS_PER_EVENT):
            yield Keys(b"".join(same[at : at + _KEYS_PER_EVENT]), length)
