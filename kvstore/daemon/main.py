"""Runs the daemon: from the configuration to the orderly stop at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvstore import logs
from kvstore.config import Config, Memory, check_dram, choose, read_memory
from kvstore.daemon import lifecycle, summary
from kvstore.daemon.composition import Daemon, Storage
from kvstore.daemon.operator.devices import open_devices
from kvstore.daemon.operator.gpus import Pinner, open_pools
from kvstore.daemon.operator.settings import LiveConfig
from kvstore.daemon.server.listener import Listener, identity, listen, unlink_own
from kvstore.daemon.systemd import FdStore, inherited, notify, watchdog_s
from kvstore.errors import KVStoreError
from kvstore.tiers.dram import OWNERS, DramTier
from kvstore.tiers.network import open_network
from kvstore.types import extent_bytes

_log = logging.getLogger("kvstore")

_SWITCH_INTERVAL_S = 1e-4
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_MAPPED_FROM_BYTES = 64 << 10
_OPERATORS_MODE = 0o600
GC_THRESHOLD = 5_000  # blocks are not objects: the collector finds little


def run(path: Path | None) -> int:
    """Serves by the configuration at `path` until SIGTERM or SIGINT. SIGHUP reloads the configuration.

    Without a path, the limit of the DRAM tier is chosen by the memory of this machine. Returns the exit code.
    Raises KVStoreError if the daemon cannot start.
    """
    # Heaps of threads would each grow to the most that the thread ever had. Python allocates one at a time.
    _mallopt(_M_ARENA_MAX, 1)
    given, memory = inherited(), read_memory()
    settings = LiveConfig(path, choose(memory, _kept_bytes(given)) if path is None else None)
    logs.start(settings.config.daemon.log_level, settings.config.daemon.log_format)
    check_dram(settings.config, memory, path)
    # With the default of 5 ms, a thread in pure Python delays an answer by a millisecond.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with new_runner() as runner:
        return runner.run(_serve(settings, given, lambda daemon: _introduce(daemon, path, memory)))


def new_runner() -> asyncio.Runner:
    """Returns a runner with the fastest available event loop."""
    try:
        import uvloop  # noqa: PLC0415 - absent where it does not build
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _return_memory() -> None:
    """Lets glibc map each large allocation, so that its memory is returned to the system when it is freed.

    By default, glibc raises its threshold to the largest freed allocation, and keeps memory after a peak. The
    recovery before uses its columns again and again, which is twice as fast; then all of them are returned.
    """
    _mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(option: int, value: int) -> None:
    """Sets an option of glibc's malloc. Another C library keeps its own ways."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)


def _kept_bytes(given: Mapping[str, int]) -> int:
    """Returns the size of the DRAM extents among inherited descriptors."""
    return sum(
        os.fstat(fd).st_size for name, fd in given.items() if name.startswith("dram-") and name != OWNERS
    )


def _introduce(daemon: Daemon, path: Path | None, memory: Memory) -> None:
    """Shows the start-up summary."""
    summary.show(summary.rows(daemon.config(), daemon.status.status(), path, memory))


async def _serve(settings: LiveConfig, given: Mapping[str, int], introduce: Callable[[Daemon], None]) -> int:
    loop, config = asyncio.get_running_loop(), settings.config
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # Recovery makes many short-lived objects without cycles. Modules are permanent.
    gc.disable()
    gc.freeze()
    listener, ours = _listener(config, given)
    listeners = [listener]
    own_paths = [(config.daemon.socket, identity(config.daemon.socket))] if ours else []
    try:
        if config.daemon.operator_socket is not None:
            listeners.append(listen(config.daemon.operator_socket, _OPERATORS_MODE, "daemon.operator_socket"))
            own_paths.append((config.daemon.operator_socket, identity(config.daemon.operator_socket)))
        daemon = Daemon(config, loop, open_tiers(config, given))
        await lifecycle.start(daemon)
        server = daemon.make_server(settings)
        daemon.lag.start()
        listening = [
            Listener(loop, each, partial(server.connect, among_operators))
            for among_operators, each in zip((False, True), listeners, strict=False)
        ]
        reloads = _Reloads(settings)
        loop.add_signal_handler(signal.SIGHUP, reloads.start)
        _return_memory()
        # Objects that exist now are permanent: full collections skip them.
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(GC_THRESHOLD)
        introduce(daemon)
        _log.info("serving on %s", config.daemon.socket)
        notify("READY=1", f"STATUS=serving on {config.daemon.socket}")
        if watchdog_s():
            _feed(loop, watchdog_s() / 3)
        await stopping.wait()
        notify("STOPPING=1")
        _log.info("stopping")
        for served in listening:
            served.close()
        await server.close()
        await lifecycle.stop(daemon, daemon.config().daemon.stop_timeout)
    finally:
        for each in listeners:
            each.close()
        for path, made in own_paths:
            unlink_own(path, made)
    return 0


def open_tiers(config: Config, given: Mapping[str, int]) -> Storage:
    """Opens the tiers of a configuration. `given`: inherited descriptors by name, among them DRAM extents."""
    devices, problems = open_devices(config)
    pools, more = open_pools(config)
    network, why_not = open_network(config.network)
    pins = Pinner(pools.values()) if pools else None
    extents = {name: fd for name, fd in given.items() if name.startswith("dram-")}
    size = extent_bytes(config.dram.limit, len(config.tenants))
    dram = DramTier(config.dram.limit, size, config.dram.huge_pages, FdStore(), extents, pins)
    return Storage(dram, devices, pools, network, (*problems, *more, *why_not))


def _feed(loop: asyncio.AbstractEventLoop, every_s: float) -> None:
    """Feeds the watchdog from the event loop, which proves that the loop runs."""
    notify("WATCHDOG=1", within_s=0)  # requests must not wait for the service manager
    loop.call_later(every_s, _feed, loop, every_s)


class _Reloads:
    """Reloads the configuration at SIGHUP. Reports each reload to the service manager."""

    def __init__(self, settings: LiveConfig) -> None:
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts a reload once the running one has ended."""
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._task = asyncio.get_running_loop().create_task(self._run(self._task))

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            await self._settings.reload()
        except KVStoreError as error:
            _log.error("not reloaded: %s", error)
        except Exception:
            _log.exception("not reloaded, because of a bug: the configuration from before holds")
        finally:
            notify("READY=1")


def _listener(config: Config, given: Mapping[str, int]) -> tuple[socket.socket, bool]:
    """Returns the listening socket, and whether this process removes its path.

    The socket of the service manager, if there is one, stays.
    """
    for name, fd in given.items():
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            _log.info("listening on the socket %s of the service manager", name)
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
            return listener, False
    return listen(config.daemon.socket, config.daemon.socket_mode), True
