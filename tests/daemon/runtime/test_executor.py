"""Actions that fail: the others of their batch run, everybody is answered, nothing stays held."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, arena
from kvstore.config import parse
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.queues.device_queue import FENCED
from kvstore.daemon import lifecycle
from kvstore.daemon.composition import Daemon
from kvstore.daemon.main import open_tiers
from kvstore.daemon.operator.settings import LiveConfig
from kvstore.daemon.server.connection import Connection
from kvstore.daemon.tenancy.auth import Principal, Role
from kvstore.errors import DeniedError, TierError
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.key_files import KeyFiles
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Layout
from tests.daemons import names, payload, payloads, room_for
from tests.tiers.faulty import Faults, FaultyEngine

MIB = 1 << 20
SIZE = 4096
CLIENT = 1
LAYOUT = Layout("shell", SIZE)
WHO = Principal(0, "default", Role.ADMIN, True)
ALWAYS = Faults(broken=1.0)
KEYS = names(8)
JOINED = Keys(b"".join(KEYS), len(KEYS[0]))
DRAM, NVME = 0, 1


class Node:
    """A daemon over real memory and, in a folder, an NVMe tier whose I/O engine may break."""

    def __init__(self, folder: Path | None) -> None:
        self.engine = FaultyEngine(PosixEngine(2), Faults())
        config = parse('dram.limit = "8MiB"\nscrub.rate = 0\n')
        devices = {}
        if folder is not None:
            devices["nvme"] = NvmeTier.open(folder, 8 * MIB, 4 * MIB, self.engine)
        storage = replace(open_tiers(config, {}), devices=devices)
        self.daemon = Daemon(config, asyncio.get_running_loop(), storage)

    async def start(self) -> None:
        await lifecycle.start(self.daemon)
        await self.until(lambda: not any(tier.growing for tier in self.daemon.placement.residency.tiers))
        space, _ = self.daemon.catalog.open(WHO, LAYOUT)
        assert space is not None
        self.space = space

    async def ask(self, event: Any) -> Any:
        return await asyncio.wait_for(self.asked(event), 10)

    def asked(self, event: Any) -> asyncio.Future[Any]:
        asker = Asker()
        self.daemon.core.ask(asker, 0, event)
        return asker.answered

    async def put(self) -> None:
        event = ev.Reserve(0, CLIENT, self.space.number, JOINED, b"", self.daemon.core.now() + 5)
        room = await self.ask(event)
        sums = []
        for key, slot in zip(KEYS, self.daemon.tiers.dram.slots(room.where), strict=True):
            slot[:SIZE] = payload(key, SIZE)
            sums.append(arena.checksum(slot[:SIZE], arena.seed(self.space.fingerprint, key, SIZE)))
        written = np.ones(len(KEYS), np.bool_)
        answer = await self.ask(ev.Commit(0, CLIENT, room.lease, np.array(sums, np.uint64), written))
        assert answer.value == len(KEYS)

    def acquiring(self) -> ev.Acquire:
        return ev.Acquire(0, CLIENT, self.space.number, JOINED, self.daemon.core.now() + 5)

    def stored(self) -> int:
        return self.daemon.placement.view.stored(self.space.number, JOINED)

    async def until(self, there: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not there():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def quiet(self) -> None:
        """Returns when nothing is copied or looked at any more."""
        placement = self.daemon.placement
        await self.until(lambda: not (placement.copies.under_way or placement.leases.probes))
        placement.check()


class Asker:
    def __init__(self, breaks: bool = False) -> None:
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._breaks = breaks

    def answer(self, request: int, action: Any) -> None:
        if self._breaks and not isinstance(action, ac.Deny):
            raise RuntimeError("injected: no answer can be sent")
        self.answered.set_result(action)


def on_node(folder: Path | None, work: Callable[[Node], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node(folder)
        await node.start()
        await work(node)
        await lifecycle.stop(node.daemon, 5)

    asyncio.run(run())


def test_copies_and_probes_end_when_the_engine_breaks(tmp_path: Path) -> None:
    async def work(node: Node) -> None:
        await node.put()
        await node.quiet()
        node.engine.faults = ALWAYS
        node.daemon.core.handle(ev.Scrub(NVME, MIB))
        await node.quiet()
        assert node.stored() == len(KEYS)
        again = ev.Invalidate(0, node.space.number, JOINED)
        assert (await node.ask(again)).value == len(KEYS)
        await node.put()
        await node.quiet()
        assert node.engine.injected["broken"] >= 2
        node.engine.faults = Faults()
        node.daemon.core.handle(ev.Scrub(NVME, MIB))
        await node.quiet()
        assert (await node.ask(node.acquiring())).lease

    on_node(tmp_path / "nvme", work)


def test_a_load_that_cannot_begin_is_a_miss(tmp_path: Path) -> None:
    async def fill(node: Node) -> None:
        await node.put()
        await node.quiet()

    async def work(node: Node) -> None:
        node.engine.faults = ALWAYS
        assert len((await node.ask(node.acquiring())).slots) == 0
        await node.quiet()

    on_node(tmp_path / "nvme", fill)
    on_node(tmp_path / "nvme", work)


@pytest.mark.parametrize("tier", [DRAM, NVME])
def test_a_look_that_raises_ends_and_takes_no_block_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: int
) -> None:
    async def work(node: Node) -> None:
        await node.put()
        await node.quiet()
        with monkeypatch.context() as patched:
            for module in ("tiers.dram", "tiers.nvme.reads"):
                patched.setattr(f"kvstore.{module}.verify_all", broken)
            node.daemon.core.handle(ev.Scrub(tier, MIB))
            await node.quiet()
        name = node.daemon.placement.residency.tiers[tier].spec.name
        assert node.daemon.placement.view.counters[f"scrubbed_blocks_{name}"] == len(KEYS)
        node.daemon.core.handle(ev.Scrub(tier, MIB))
        await node.quiet()
        assert node.daemon.placement.view.counters[f"scrubbed_blocks_{name}"] == 2 * len(KEYS)
        assert node.stored() == len(KEYS)

    on_node(tmp_path / "nvme", work)


def test_a_move_in_memory_that_raises_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(node: Node) -> None:
        await node.put()
        await node.quiet()
        tried = []
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.tiers.dram.verify_all", lambda *_: tried.append(True) or broken())
            asker = Asker()
            node.daemon.catalog.publish(asker, 0, node.space, ["reader"])
            await node.until(lambda: tried)
            await node.quiet()
        assert isinstance(await asyncio.wait_for(asker.answered, 15), ac.Answer)

    on_node(None, work)


def test_one_that_cannot_be_answered_does_not_keep_the_others(tmp_path: Path) -> None:
    async def fill(node: Node) -> None:
        await node.put()
        await node.quiet()

    async def work(node: Node) -> None:
        bad, good = Asker(breaks=True), Asker()
        # Both wait for one copy, whose end answers both.
        node.daemon.core.ask(bad, 0, node.acquiring())
        node.daemon.core.ask(good, 0, node.acquiring())
        assert len(node.daemon.placement.leases.waiting) == 2
        assert len((await asyncio.wait_for(good.answered, 10)).slots) == len(KEYS)
        assert (await asyncio.wait_for(bad.answered, 10)).why == "internal error"
        await node.quiet()

    on_node(tmp_path / "nvme", fill)
    on_node(tmp_path / "nvme", work)


def test_a_device_that_cannot_drop_is_fenced_and_the_rest_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(node: Node) -> None:
        await node.put()
        await node.quiet()

        def refused(*_: Any) -> None:
            raise TierError("injected: no record can be deleted")

        with monkeypatch.context() as patched:
            patched.setattr(node.daemon.tiers.devices["nvme"], "drop", refused)
            answer = await node.ask(ev.Invalidate(0, node.space.number, JOINED))
        assert answer.value == len(KEYS)
        device = node.daemon.placement.residency.tiers[NVME].device
        await node.until(lambda: device.state == FENCED)
        assert "no record can be deleted" in node.daemon.status.of(WHO)["problems"][-1]
        assert node.stored() == 0

    on_node(tmp_path / "nvme", work)


def test_memory_and_core_that_disagree_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[bool] = []

    async def work(node: Node) -> None:
        await node.put()
        await node.quiet()
        with monkeypatch.context() as patched:
            patched.setattr(os, "abort", lambda: ended.append(True))
            patched.setattr(node.daemon.tiers.dram, "drop", broken)
            await node.ask(ev.Invalidate(0, node.space.number, JOINED))

    on_node(tmp_path / "nvme", work)
    assert ended == [True]
    assert "the core and dram disagree" in caplog.text


def broken(*_: Any) -> Any:
    raise RuntimeError("injected: broken")


# -- data keys


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A configuration with an encrypted tenant, which is whoever runs the tests."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    file = tmp_path / "kvstore.toml"
    file.write_text(
        f'dram.limit = "8MiB"\nscrub.rate = 0\nencryption.key_file = "{key}"\n'
        f'nvme.path = "{tmp_path / "nvme"}"\nnvme.limit = "8MiB"\n'
        f'[tenants.me]\nuids = [{os.getuid()}]\nrole = "admin"\nencrypt = true\n'
    )
    return file


def served(file: Path, work: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Runs `work` with a client of a daemon in this process."""

    config = parse(file.read_text())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        daemon = Daemon(config, loop, open_tiers(config, {}))
        await lifecycle.start(daemon)
        server, path = daemon.make_server(LiveConfig(None)), file.with_name("socket")
        listening = await loop.create_unix_server(server.connect, path)
        async with AsyncClient(f"unix://{path}", strict=True, deadline_s=10) as client:
            await work(client)
        listening.close()
        await server.close()
        await lifecycle.stop(daemon, 5)

    asyncio.run(run())


def test_an_ended_connection_is_free_before_the_collector_runs(tmp_path: Path) -> None:
    (tmp_path / "kvstore.toml").write_text('dram.limit = "8MiB"\nscrub.rate = 0\n')
    made: list[weakref.ref[Any]] = []

    async def work(client: AsyncClient) -> None:
        before = {id(each) for each in connections()}
        async with AsyncClient(f"unix://{client.path}", strict=True, deadline_s=10) as other:
            await round_trip(other, 1)
            made.extend(weakref.ref(each) for each in connections() if id(each) not in before)
            assert made
        for _ in range(200):
            await asyncio.sleep(0.005)
        assert [each() for each in made] == [None] * len(made)

    def connections() -> list[Connection]:
        return [each for each in gc.get_objects() if isinstance(each, Connection)]

    gc.disable()
    try:
        served(tmp_path / "kvstore.toml", work)
    finally:
        gc.enable()


async def round_trip(client: AsyncClient, salt: int) -> None:
    namespace = client.namespace(LAYOUT)
    assert (await namespace.put(KEYS, payloads(KEYS, SIZE, salt))).stored == len(KEYS)
    out = room_for(len(KEYS), SIZE)
    assert await namespace.get(KEYS, out) == len(KEYS)
    assert np.array_equal(out, payloads(KEYS, SIZE, salt))


def test_data_keys_are_made_and_erased_beside_the_event_loop(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"put": set(), "erase": set()}
    slow, real = threading.Event(), {name: getattr(KeyFiles, name) for name in threads}
    keys = sealed.parent / "nvme" / "keys"

    def noting(name: str) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            threads[name].add(threading.get_ident())
            assert slow.wait(10)
            real[name](*args)

        return noted

    async def meanwhile(client: AsyncClient, name: str, call: Awaitable[Any]) -> Any:
        """While the disk takes its time, others are answered."""
        slow.clear()
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(10):
            while not threads[name]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await client.status())["tenants"]
        assert not task.done()
        slow.set()
        return await task

    async def work(client: AsyncClient) -> None:
        await round_trip(client, 1)
        for name in threads:
            monkeypatch.setattr(KeyFiles, name, noting(name))
        assert await meanwhile(client, "erase", client.delete_tenant("me")) == len(KEYS)
        assert not os.listdir(keys)
        # On the same connection, whose namespace has ended: it gets another key.
        await meanwhile(client, "put", round_trip(client, 2))
        assert os.listdir(keys) == ["me.key"]

    served(sealed, work)
    assert threading.get_ident() not in threads["put"] | threads["erase"]


def test_a_key_that_cannot_be_erased_is_an_answer(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: AsyncClient) -> None:
        await round_trip(client, 1)
        with monkeypatch.context() as patched:
            patched.setattr(KeyFiles, "erase", broken)
            with pytest.raises(DeniedError, match="internal error"):
                await client.delete_tenant("me")
        assert await client.namespace(LAYOUT).lookup(KEYS) == 0
        await round_trip(client, 2)
        assert await client.delete_tenant("me") == len(KEYS)
        await round_trip(client, 3)

    served(sealed, work)


def test_a_key_that_cannot_be_made_is_an_answer(sealed: Path) -> None:
    keys = sealed.parent / "nvme" / "keys"

    async def work(client: AsyncClient) -> None:
        await round_trip(client, 1)
        assert await client.delete_tenant("me") == len(KEYS)
        keys.rename(keys.with_name("away"))
        keys.touch()
        for layout in (LAYOUT, replace(LAYOUT, revision="other")):
            with pytest.raises(DeniedError, match=r"cannot write .*me\.key"):
                await client.namespace(layout).lookup(KEYS)
        keys.unlink()
        await round_trip(client, 2)

    served(sealed, work)
