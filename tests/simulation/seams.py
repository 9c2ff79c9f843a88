"""Where the code under test takes time, chance, threads and connections from: here all from the world."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvstore import native
from kvstore.client import aio, base, presence_tables
from kvstore.client import connection as client_connection
from kvstore.client.calls import call, namespace, reads, scope, writes
from kvstore.client.leases import Reservation
from kvstore.config import Config
from kvstore.core.transfers import transfers
from kvstore.daemon import composition, lifecycle
from kvstore.daemon.operator import devices, resizing
from kvstore.daemon.runtime import tier_set
from kvstore.daemon.server import connection
from kvstore.daemon.server.peer_credentials import Peer
from kvstore.tiers.nvme import journal
from kvstore.tiers.nvme.tier import NvmeTier
from tests.simulation import pool
from tests.simulation.daemon import Thread

_SOMEBODY = 61001
"""The user that all clients are: who they are, only their tokens say."""


@contextmanager
def in_simulation(world: Any) -> Iterator[None]:
    """The places where the code under test takes time, threads and links from: all from the world."""
    now = types.SimpleNamespace(monotonic=lambda: world.loop.now)
    fill = writes._fill

    def filled(room: Reservation, views: object) -> bytes:
        if not world.may_write(room):
            raise ConnectionResetError("noticed in time that the daemon is gone")
        return fill(room, views)  # type: ignore[arg-type]

    begin = Reservation.__init__

    def granted(room: Any, *args: Any, **more: Any) -> None:
        begin(room, *args, **more)
        room.granted_by = world.life

    def opened(config: Config, name: str, other: NvmeTier | None) -> NvmeTier:
        return world.life.open(config, name)  # type: ignore[no-any-return]

    def extent_bytes_of_new(limit_bytes: int, tenants: int) -> int:
        return int(world.disks[world.coming].extent_bytes)

    read_slots = native.read_slots

    def read_without_lease(*args: Any) -> int:
        assert read_slots is not None
        n = read_slots(*args)
        world.counts["blocks read without a lease"] += n
        return n

    # Whoever closes a device waits for it.
    Thread.delay = lambda: max(disk.delay() for disk in world.disks.values())
    threading = types.SimpleNamespace(Thread=Thread)
    errors = _Errors(world._errors)
    logger = logging.getLogger("kvstore")
    level, propagate = logger.level, logger.propagate
    with ExitStack() as stack:
        for module in (aio, base, call, client_connection, presence_tables):
            stack.enter_context(mock.patch.object(module, "time", now))
        stack.enter_context(mock.patch.object(client_connection, "random", world.dice))
        stack.enter_context(mock.patch.object(aio, "AsyncConnection", world.net.link))
        stack.enter_context(mock.patch.object(writes, "_fill", filled))
        for module in (lifecycle, tier_set):
            stack.enter_context(mock.patch.object(module, "threading", threading))
        stack.enter_context(mock.patch.object(Reservation, "__init__", granted))
        stack.enter_context(mock.patch.object(devices, "_open", opened))
        stack.enter_context(mock.patch.object(devices, "_check_empty", return_value=None))
        for module in (devices, resizing):
            stack.enter_context(mock.patch.object(module, "extent_bytes", extent_bytes_of_new))
        stack.enter_context(mock.patch.object(composition, "_MIN_ROWS", world.dice.choice((96, 512))))
        stack.enter_context(mock.patch.object(connection, "peer_of", return_value=_Peer(_SOMEBODY, ())))
        if read_slots is not None:
            stack.enter_context(mock.patch.object(native, "read_slots", read_without_lease))
        if world.gpu is not None:
            for module in (namespace, reads, scope, writes):
                for name, stand_in in pool.in_place(world.gpu).items():
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(mock.patch.object(connection, "_numbers", iter(range(1, 1 << 30))))
        stack.enter_context(mock.patch.object(journal, "GROUP_RECORDS", world.dice.choice((4, 8192))))
        # So that small commits start their writes in a step of their own.
        stack.enter_context(mock.patch.object(transfers, "_AT_ONCE", world.dice.choice((0, 32))))
        logger.addHandler(errors)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(errors)
            logger.setLevel(level)
            logger.propagate = propagate


class _Peer(Peer):
    """One whose process need not be watched: what it maps ends with the run."""

    def pidfd(self) -> int:
        return -1


class _Errors(logging.Handler):
    """Keeps what was logged with an exception: nothing in the daemon may fail unforeseen."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._errors.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
