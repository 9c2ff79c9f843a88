"""Runs the daemon in this process, without sockets. Clients copy no bytes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import expect, like_the_daemon
from bench.served import serve, wait_until
from kvstore import Layout
from kvstore.arena import checksum, seed
from kvstore.config import parse
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon import lifecycle
from kvstore.daemon.composition import Daemon
from kvstore.daemon.main import open_tiers
from kvstore.daemon.tenancy.auth import Principal, Role

_CLIENT = 1
_WITHIN_S = 60.0


class InProcess:
    """Sends requests about one layout to a daemon, inside the daemon's event loop."""

    def __init__(self, daemon: Daemon, layout: Layout) -> None:
        self._daemon = daemon
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        space, _ = daemon.catalog.open(Principal(0, "default", Role.ADMIN, operator=True), layout)
        assert space is not None
        self.namespace = space.number
        self._fingerprint = space.fingerprint
        self._block_bytes = layout.block_bytes

    def answer(self, request: int, action: Any) -> None:
        """See Asker."""
        self._waiting.pop(request).set_result(action)

    async def acquire(self, keys: list[bytes]) -> ac.Grant:
        """Returns a lease on DRAM slots and the tiers where the blocks were found."""
        until = self._loop.time() + _WITHIN_S
        grant = await self._ask(ev.Acquire(0, _CLIENT, self.namespace, _joined(keys), until))
        assert isinstance(grant, ac.Grant), grant
        return grant

    def slots(self, given: ac.Grant | ac.Reserved) -> list[memoryview]:
        """Returns the memory of a lease or reservation."""
        return self._daemon.tiers.dram.slots(given.where)

    def release(self, lease: int) -> None:
        """Ends a lease."""
        self._daemon.core.handle(ev.Release(_CLIENT, lease))

    async def put(self, keys: list[bytes], data: np.ndarray[Any, Any] | None = None) -> int:
        """Reserves and commits. Returns the number of stored blocks.

        Without `data`, slots keep their bytes and the checksums are wrong; such blocks must not be read.
        """
        until = self._loop.time() + _WITHIN_S
        room = await self._ask(ev.Reserve(0, _CLIENT, self.namespace, _joined(keys), b"", until))
        assert isinstance(room, ac.Reserved), room
        n = len(room.where)
        sums, written = np.zeros(n, np.uint64), np.ones(n, np.bool_)
        if data is not None:
            for i, (key, slot) in enumerate(zip(keys, self.slots(room), strict=True)):
                slot[: self._block_bytes] = data[i].data
                sums[i] = checksum(data[i].data, seed(self._fingerprint, key, self._block_bytes))
        stored = await self._ask(ev.Commit(0, _CLIENT, room.lease, sums, written))
        return int(stored.value)

    def counter(self, name: str) -> int:
        """Returns a counter of the core."""
        return int(self._daemon.view.counters[name])

    async def counted(self, name: str, target: int) -> None:
        """Waits until a counter reaches its target. Raises TimeoutError after a minute."""
        ends = self._loop.time() + _WITHIN_S
        while self.counter(name) < target:
            if self._loop.time() > ends:
                raise TimeoutError(f"{name} is {self.counter(name)}, not {target}")
            await asyncio.sleep(0.0005)

    async def _ask(self, event: Any) -> Any:
        self._last += 1
        future = self._waiting[self._last] = self._loop.create_future()
        self._daemon.core.ask(self, self._last, event)
        return await asyncio.wait_for(future, _WITHIN_S)


@contextmanager
def in_process(
    folder: Path, dram_bytes: int, nvme_bytes: int, layout: Layout
) -> Iterator[tuple[InProcess, asyncio.Runner]]:
    """Yields a started daemon on a folder, and its event loop."""
    text = f"[dram]\nlimit = {dram_bytes}\n[nvme]\nlimit = {nvme_bytes}\npath = {json.dumps(str(folder))}\n"
    text += '[policy]\neviction = "lru"\n'  # this policy refuses no block
    text += "[scrub]\nrate = 0\n"  # checksums are not real here
    config = parse(text, "the bench's settings")
    with like_the_daemon(), asyncio.Runner(loop_factory=_loop_factory()) as runner:

        async def start() -> tuple[Daemon, InProcess]:
            daemon = Daemon(config, asyncio.get_running_loop(), open_tiers(config, {}))
            await lifecycle.start(daemon)
            growing = daemon.view.tiers
            ends = time.monotonic() + _WITHIN_S
            while any(tier.growing for tier in growing) and time.monotonic() < ends:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return daemon, InProcess(daemon, layout)

        daemon, inside = runner.run(start())
        try:
            yield inside, runner
        finally:
            runner.run(lifecycle.stop(daemon, 10.0))


def written_folder(
    folder: Path, nvme_bytes: int, layout: Layout, data: np.ndarray[Any, Any]
) -> list[list[bytes]]:
    """Runs a daemon that fills a new folder to its limit. Returns the keys of the stored chains.

    Every chain has the blocks of `data`.
    """
    chain = len(data)
    with serve(nvme_bytes // 4, (folder, nvme_bytes)) as (client, _):
        [nvme] = [tier for tier in client.status()["tiers"] if tier["name"] == "nvme"]
        room = nvme["capacity_bytes"] // layout.block_bytes
        chains = [[os.urandom(32) for _ in range(chain)] for _ in range(room // chain)]
        space = client.namespace(layout)
        for keys in chains:
            expect(space.put(keys, data).stored, chain, "blocks stored")
        wait_until(client, lambda s: s["counters"].get("written_blocks", 0) >= len(chains) * chain)
    return chains


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns the event loop factory of the daemon."""
    try:
        import uvloop  # noqa: PLC0415 - absent where it does not build
    except ImportError:
        return None
    return uvloop.new_event_loop


def _joined(keys: list[bytes]) -> Keys:
    return Keys(b"".join(keys), len(keys[0]))
