"""Epochs over a backend in memory: comparison, the order of deletion and record, and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core import actions as ac
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.network import epochs as module
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.epoch_objects import pack, unpack
from kvstore.daemon.network.epochs import Epochs
from kvstore.daemon.network.key_lists import MOST_KEYS
from kvstore.daemon.network.names import (
    EPOCH_BYTES,
    EPOCHS,
    KEY_LISTS,
    ZERO,
    block_name,
    name_prefix,
    next_epoch,
)
from kvstore.daemon.network.tasks import Tasks
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.tiers.network.base import Backend, Name, Object, Outcome

FINGERPRINT, OLD, NEW = b"f" * 16, b"\1" * EPOCH_BYTES, b"\2" * EPOCH_BYTES
OBJECT = Name(EPOCHS, FINGERPRINT)


class Memory:
    """A backend of epochs. `failing`: reads fail. `full`: writes fail. `keeps`: a write keeps an object."""

    def __init__(self) -> None:
        self.objects: dict[Name, bytes] = {}
        self.parents: dict[Name, bytes] = {}
        self.torn: set[Name] = set()
        self.failing = False
        self.full = False
        self.keeps = False
        self.after_read: Callable[[], None] = lambda: None
        self.reads: list[int] = []

    def read(self, things: list[Object], ends: float) -> list[Outcome]:
        self.reads.append(len(things))
        if self.failing:
            return [Outcome.FAILED] * len(things)
        outcomes = []
        for thing in things:
            found = self.objects.get(thing.name)
            if thing.name in self.torn:
                outcomes.append(Outcome.TORN)
            elif found is None:
                outcomes.append(Outcome.MISSING)
            else:
                thing.memory[: thing.length] = found
                thing.parent = self.parents.get(thing.name, b"")
                outcomes.append(Outcome.OK)
        after, self.after_read = self.after_read, lambda: None
        after()
        return outcomes

    def write(self, things: list[Object], ends: float) -> list[Outcome]:
        if self.full:
            return [Outcome.FULL] * len(things)
        for thing in things:
            if not (self.keeps and (thing.name in self.objects or thing.name in self.torn)):
                self.objects[thing.name] = bytes(thing.memory[: thing.length])
                self.parents[thing.name] = thing.parent
                self.torn.discard(thing.name)
        return [Outcome.OK] * len(things)

    def delete(self, names: list[Name], ends: float) -> list[Outcome]:
        for name in names:
            self.objects.pop(name, None)
            self.torn.discard(name)
        return [Outcome.OK] * len(names)


class Node:
    """One node with one namespace, and what it did, in order."""

    def __init__(self, backend: Memory | Backend, epoch: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self.did: list[Any] = []
        self.denied = 0
        self.names = Namespaces()
        self.namespace = NamespaceEntry(1, FINGERPRINT, 0, 4096)
        self.namespace.epoch = epoch
        self.names.add(self.namespace)
        self.executor: Any = SimpleNamespace(
            backend=backend, usable=True, checked=True, timeout_s=5.0, call=self._call
        )
        self.eligibility = Eligibility(self.executor, lambda tenant: False)
        self.tasks = Tasks(loop, self.names)
        core: Any = SimpleNamespace(now=loop.time, loop=loop)
        log: Any = SimpleNamespace(add=lambda *_, **more: self.did.append(("reported", more["detail"])))
        bits = iter(range(1, 100))
        self.time_s = 1.0
        self.epochs = Epochs(
            core,
            self.executor,
            self.eligibility,
            self.names,
            self.tasks,
            log,
            lambda n: next(bits),
            lambda: self.time_s,
        )
        self.epochs.delete_here = self._delete
        self.epochs.delete_keys_here = self._delete_keys
        self.epochs.record = lambda namespace: self.did.append(("recorded", namespace.epoch))
        self.eligibility.ask_epochs = self.epochs.ask
        self.epochs.start()

    async def _call(self, call: Callable[[float], Any], within_s: float) -> Any:
        await asyncio.sleep(0)
        return call(time.monotonic() + within_s)

    def _delete(self, requester: Any, namespace: NamespaceEntry) -> None:
        assert not self.eligibility.serves(namespace), "it is banned meanwhile"
        self.denied -= 1
        if self.denied >= 0:
            requester.answer(0, ac.Deny(0, "busy"))
            return
        self.did.append(("deleted", namespace.epoch))
        requester.answer(0, ac.Answer(0, 0))

    def _delete_keys(self, requester: Any, namespace: NamespaceEntry, keys: Keys) -> None:
        assert not self.eligibility.serves(namespace), "it is banned meanwhile"
        self.did += [("deleted key", keys[i]) for i in range(keys.n)]
        requester.answer(0, ac.Answer(0, keys.n))

    async def rounds(self, n: int = 1) -> None:
        """Has all epochs read so often, and waits for what comes of it."""
        for _ in range(n):
            self.epochs.check_all()
            for _ in range(30):
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are asked for; only what is retried after this time comes by itself."""
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.05)


def run(test: Callable[[Memory], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(Memory()))


def test_all_epochs_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_EVERY_S", 60.0)  # no round by itself, however busy the machine is

    async def test(backend: Memory) -> None:
        node = Node(backend, ZERO)
        for number in range(2, 201):
            node.names.add(NamespaceEntry(number, number.to_bytes(16, "big"), 0, 4096))
        await node.rounds(2)
        assert backend.reads == [200, 200]

    run(test)


def test_waits_for_an_epoch_end_when_it_is_read_or_cannot_be() -> None:
    async def test(backend: Memory) -> None:
        for usable, failing in ((True, False), (False, False), (True, True)):
            node = Node(backend, None)
            node.executor.checked = node.executor.usable = False
            waiting = asyncio.ensure_future(node.eligibility.knows_epoch(node.namespace, 60.0))
            await node.rounds(3)
            assert not waiting.done(), "the network is yet to be checked"
            node.executor.checked, node.executor.usable, backend.failing = True, usable, failing
            await node.rounds()
            assert await asyncio.wait_for(waiting, 1.0) == (usable and not failing)

    run(test)


def test_names_of_epoch_zero_are_those_without_epochs() -> None:
    namespace = NamespaceEntry(1, FINGERPRINT, 0, 4096)
    namespace.epoch = ZERO
    assert block_name(namespace, b"key") == Name(FINGERPRINT, b"key")
    prefixes = {name_prefix(FINGERPRINT, epoch) for epoch in (ZERO, OLD, NEW)}
    assert len(prefixes | {name_prefix(b"g" * 16, NEW)}) == 4
    assert {len(prefix) for prefix in prefixes} == {16}


def test_a_namespace_without_an_epoch_keeps_its_blocks() -> None:
    async def test(backend: Memory) -> None:
        node = Node(backend, None)
        assert await node.eligibility.knows_epoch(node.namespace, 5.0)
        assert node.namespace.epoch == ZERO
        await node.rounds(3)
        assert node.did == []

    run(test)


@pytest.mark.parametrize("known", [None, ZERO, OLD])
def test_another_epoch_deletes_blocks_and_is_recorded_afterwards(known: bytes | None) -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = NEW
        node = Node(backend, known)
        await node.rounds()
        # A crash between the two finds the old epoch on record, and deletes again.
        assert node.did == [("deleted", known), ("recorded", NEW)]
        assert node.eligibility.serves(node.namespace)
        await node.rounds(3)
        assert len(node.did) == 2, "once"

    run(test)


def test_blocks_that_cannot_be_deleted_stay_banned_until_they_are() -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = NEW
        node = Node(backend, OLD)
        node.denied = 2
        await node.rounds()
        assert node.did == []
        assert node.namespace.epoch == OLD
        assert not node.eligibility.serves(node.namespace)
        await asyncio.sleep(0.3)
        assert node.did == [("deleted", OLD), ("recorded", NEW)]
        assert node.eligibility.serves(node.namespace)

    run(test)


@pytest.mark.parametrize("known", [None, OLD])
@pytest.mark.parametrize("torn", [False, True])
def test_a_failed_read_changes_nothing(known: bytes | None, torn: bool) -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = NEW
        backend.failing = not torn
        backend.torn = {OBJECT} if torn else set()
        node = Node(backend, known)
        assert await node.eligibility.knows_epoch(node.namespace, 5.0) == (known is not None)
        await node.rounds(3)
        assert node.namespace.epoch == known
        assert [what for what, _ in node.did] == ["reported"] * torn, "once"
        backend.failing, backend.torn = False, set()
        await node.rounds()
        assert node.namespace.epoch == NEW

    run(test)


def test_nobody_waits_for_an_epoch_that_cannot_be_read() -> None:
    async def test(backend: Memory) -> None:
        backend.failing = True
        node = Node(backend, None)
        async with asyncio.timeout(1):
            for _ in range(100):
                assert not await node.eligibility.knows_epoch(node.namespace, 60.0)

    run(test)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("found", [None, OLD])
def test_a_lost_epoch_is_written_again_the_second_time(found: bytes | None, keeps: bool) -> None:
    async def test(backend: Memory) -> None:
        backend.keeps = keeps
        lost = {} if found is None else {OBJECT: found}
        backend.objects |= lost
        node = Node(backend, NEW)
        await node.rounds()
        assert backend.objects == lost, "another node may be replacing it"
        backend.objects[OBJECT] = NEW
        await node.rounds()
        backend.objects = dict(lost)
        await node.rounds()
        assert backend.objects == lost
        await node.rounds()
        assert backend.objects == {OBJECT: NEW}
        await node.rounds(3)
        assert node.did == [], "nothing is deleted, and no other epoch is written"
        assert node.namespace.epoch == NEW

    run(test)


@pytest.mark.parametrize("known", [None, ZERO, OLD])
@pytest.mark.parametrize("time_s", [0.0, 1e9, 1e30])
@pytest.mark.parametrize("before", [ZERO, OLD, NEW])
def test_a_new_epoch_is_later_than_all_known_ones(known: bytes | None, time_s: float, before: bytes) -> None:
    """Also if the clock is wrong, and if nothing is known, as after a restart with an emptied network."""

    async def test(backend: Memory) -> None:
        if before != ZERO:
            backend.objects[OBJECT] = before
        node = Node(backend, known)
        node.time_s = time_s
        renewal = await node.epochs.renew(FINGERPRINT)
        assert renewal is not None
        assert backend.objects[OBJECT] == renewal.after == renewal.written > max(before, known or ZERO)
        if time_s == 1e9:
            assert renewal.written > next_epoch(ZERO, 1e9 - 1, 2**64 - 1), "later than one that is not known"

    run(test)


def test_nodes_with_different_epochs_end_with_the_latest() -> None:
    async def test(backend: Memory) -> None:
        nodes = [Node(backend, epoch) for epoch in (None, ZERO, OLD, NEW)]
        for _ in range(4):
            for node in nodes:
                await node.rounds()
        assert backend.objects == {OBJECT: NEW}
        assert [node.namespace.epoch for node in nodes] == [NEW] * 4
        assert nodes[3].did == [], "the one that knew it keeps its blocks"

    run(test)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_a_renewed_epoch_replaces_any_object(keeps: bool, torn: bool) -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = OLD
        backend.keeps = keeps
        backend.torn = {OBJECT} if torn else set()
        node = Node(backend, OLD)
        renewal = await node.epochs.renew(FINGERPRINT)
        assert renewal is not None
        assert renewal.before == (b"" if torn else OLD)
        assert renewal.after == renewal.written == backend.objects[OBJECT] > OLD

    run(test)


def test_an_epoch_that_cannot_be_read_back_is_not_confirmed() -> None:
    async def test(backend: Memory) -> None:
        node = Node(backend, OLD)
        backend.failing = True
        assert await node.epochs.renew(FINGERPRINT) is None
        backend.failing = False
        backend.after_read = lambda: setattr(backend, "failing", True)
        assert await node.epochs.renew(FINGERPRINT) is None

    run(test)


def test_a_full_backend_keeps_the_epoch() -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = OLD
        backend.full = True
        node = Node(backend, OLD)
        assert await node.epochs.renew(FINGERPRINT) is None
        assert backend.objects[OBJECT] == OLD
        del backend.objects[OBJECT]
        await node.rounds(4)
        assert (node.did, node.namespace.epoch) == ([], OLD), "nothing is deleted without a new epoch"

    run(test)


def test_an_own_deletion_is_not_taken_for_that_of_another_node() -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = OLD
        node = Node(backend, OLD)
        renewal = await node.epochs.renew(FINGERPRINT)
        assert renewal is not None
        node.epochs.settle(FINGERPRINT, renewal)
        await node.rounds(3)
        assert node.did == [("recorded", renewal.after)]

    run(test)


def test_an_own_deletion_does_not_hide_that_of_another_node() -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = NEW  # of another node, unseen here
        node = Node(backend, OLD)
        node.eligibility.deletions[FINGERPRINT] += 1  # as while it is deleted here
        renewal = await node.epochs.renew(FINGERPRINT)
        assert renewal is not None
        node.epochs.settle(FINGERPRINT, renewal)
        del node.eligibility.deletions[FINGERPRINT]
        assert node.namespace.epoch is None, "nothing is served by names of the old epoch"
        await node.rounds()
        assert node.did == [("deleted", None), ("recorded", renewal.after)]

    run(test)


def test_what_was_read_before_a_change_is_not_compared_after_it() -> None:
    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = OLD
        node = Node(backend, OLD)

        def changed() -> None:
            node.namespace.epoch = backend.objects[OBJECT] = NEW

        await node.rounds()
        backend.after_read = changed
        await node.rounds(3)
        assert node.did == []
        assert node.namespace.epoch == NEW

    run(test)


# -- single keys

KEYS = [b"one", b"two", b"three"]


async def delete_keys(node: Node, *keys: bytes) -> bool:
    """Deletes keys on one node, and tells the others."""
    assert node.epochs.keys.add(node.namespace, set(keys))
    return await node.epochs.keys.publish(node.namespace)


def deleted(node: Node) -> list[bytes]:
    return [key for what, key in node.did if what == "deleted key"]


@pytest.mark.parametrize("epoch", [ZERO, OLD])
def test_deleted_keys_reach_all_nodes_once(epoch: bytes) -> None:
    async def test(backend: Memory) -> None:
        if epoch != ZERO:
            backend.objects[OBJECT] = epoch
        first, second, late = Node(backend, epoch), Node(backend, epoch), Node(backend, None)
        assert await delete_keys(first, b"one", b"two")
        await second.rounds(3)
        assert deleted(second) == [b"one", b"two"]
        assert second.namespace.key_epochs == first.namespace.key_epochs
        assert second.namespace.keys_digest == first.namespace.keys_digest != b""
        assert second.namespace.epoch == epoch
        old = Name(name_prefix(FINGERPRINT, epoch), b"one")
        assert block_name(second.namespace, b"one") == block_name(first.namespace, b"one") != old
        assert block_name(second.namespace, b"three").namespace == old.namespace
        assert await delete_keys(second, b"two", b"three")
        await first.rounds(3)
        assert deleted(first) == [b"two", b"three"], "not the one that it has deleted itself"
        late.did.clear()
        await late.rounds(3)
        assert sorted(deleted(late)) == sorted(KEYS)
        assert late.namespace.key_epochs == first.namespace.key_epochs
        for node in (first, second, late):
            await node.rounds(3)
        assert len(deleted(first)) == len(deleted(second)) == 2
        lists = [name for name in backend.objects if name.namespace == KEY_LISTS]
        assert len(lists) == 1, "earlier lists are deleted"

    run(test)


@pytest.mark.parametrize("keeps", [False, True])
def test_lists_of_several_nodes_are_merged(keeps: bool) -> None:
    async def test(backend: Memory) -> None:
        backend.keeps = keeps
        nodes = [Node(backend, ZERO) for _ in KEYS]
        told = await asyncio.gather(*(delete_keys(node, key) for node, key in zip(nodes, KEYS, strict=True)))
        assert all(told)
        for _ in range(4):
            for node in nodes:
                await node.rounds()
        for node, key in zip(nodes, KEYS, strict=True):
            assert set(node.namespace.key_epochs) == set(KEYS)
            assert sorted(deleted(node)) == sorted(set(KEYS) - {key})

    run(test)


def test_a_key_that_is_deleted_twice_is_deleted_twice() -> None:
    async def test(backend: Memory) -> None:
        first, second = Node(backend, ZERO), Node(backend, ZERO)
        for _ in range(2):
            await delete_keys(first, b"one")
            await second.rounds(2)
        assert deleted(second) == [b"one", b"one"]

    run(test)


def test_deleted_keys_are_told_after_an_outage() -> None:
    async def test(backend: Memory) -> None:
        first, second = Node(backend, ZERO), Node(backend, ZERO)
        await first.rounds()
        backend.full = True
        assert not await delete_keys(first, b"one")
        await second.rounds(3)
        assert deleted(second) == []
        backend.full = False
        await first.rounds(3)
        await second.rounds(2)
        assert deleted(second) == [b"one"]

    run(test)


@pytest.mark.parametrize("lost", ["all", "the list", "a torn list", "the digest"])
def test_a_lost_list_is_written_again(lost: str) -> None:
    async def test(backend: Memory) -> None:
        first, second = Node(backend, OLD), Node(backend, OLD)
        await delete_keys(first, b"one")
        [name] = [name for name in backend.objects if name.namespace == KEY_LISTS]
        if lost == "all":
            backend.objects.clear()
        elif lost == "the list":
            del backend.objects[name]
        elif lost == "a torn list":
            backend.keeps = True
            backend.torn = {name}
        else:  # as a node writes the epoch that does not know of lists
            backend.parents[OBJECT] = b""
        for _ in range(6):
            for node in (second, first):
                await node.rounds()
        assert deleted(second) == [b"one"]
        assert deleted(first) == []
        assert second.namespace.keys_digest == first.namespace.keys_digest == backend.parents[OBJECT]

    run(test)


@pytest.mark.parametrize("packed", [b"x", bytes(17), bytes(16) + b"\5abc", bytes(16) + b"\x41" + bytes(65)])
def test_a_foreign_list_is_not_understood(packed: bytes) -> None:
    assert unpack(packed) is None


def test_a_list_is_packed_and_unpacked() -> None:
    listed = {b"k": OLD, b"x" * 64: NEW}
    assert unpack(pack(listed)) == listed
    assert unpack(b"") == {}


def test_a_new_epoch_ends_the_list() -> None:
    async def test(backend: Memory) -> None:
        first, second = Node(backend, ZERO), Node(backend, ZERO)
        await delete_keys(first, b"one")
        await second.rounds(2)
        renewal = await first.epochs.renew(FINGERPRINT)
        assert renewal is not None
        first.epochs.settle(FINGERPRINT, renewal)
        await second.rounds(3)
        for node in (first, second):
            assert (node.namespace.key_epochs, node.namespace.keys_digest) == ({}, b"")
            assert node.namespace.epoch == renewal.after
        assert second.did[-2:] == [("deleted", ZERO), ("recorded", renewal.after)]

    run(test)


def test_a_full_list_changes_nothing() -> None:
    async def test(backend: Memory) -> None:
        node = Node(backend, ZERO)
        keys = {n.to_bytes(4, "big") for n in range(MOST_KEYS)}
        assert await delete_keys(node, *keys)
        before = node.namespace.key_epochs
        assert not node.epochs.keys.add(node.namespace, {b"one more"})
        assert node.namespace.key_epochs is before
        assert node.epochs.keys.add(node.namespace, {bytes(4)}), "which is on it"

    run(test)


def test_a_node_keeps_the_keys_of_one_that_is_gone() -> None:
    async def test(backend: Memory) -> None:
        gone, node, late = (Node(backend, ZERO) for _ in range(3))
        await delete_keys(gone, b"one")
        gone.executor.usable = False
        assert await delete_keys(node, b"two")
        await late.rounds(2)
        assert sorted(deleted(late)) == [b"one", b"two"]

    run(test)


def test_a_key_that_is_deleted_after_a_new_epoch_is_told_in_that_epoch() -> None:
    """The node does not know of the epoch yet: it deletes the key in the one before."""

    async def test(backend: Memory) -> None:
        backend.objects[OBJECT] = NEW
        node, late = Node(backend, OLD), Node(backend, NEW)
        node.time_s = 1e30
        assert not await delete_keys(node, b"one"), "the network has a later epoch"
        for _ in range(4):
            await node.rounds()
        await late.rounds(2)
        assert node.namespace.epoch == NEW
        assert deleted(late) == [b"one"]

    run(test)
