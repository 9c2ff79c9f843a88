"""From configuration to a running daemon, and from a signal to its orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from kvstore.config import Config
from kvstore.daemon.notify import notify
from kvstore.daemon.server import Server
from kvstore.daemon.shell import Shell
from kvstore.errors import KVStoreError, TierError

_log = logging.getLogger("kvstore")

_SWITCH_INTERVAL_S = 1e-4
_BACKLOG = 128
_GC_THRESHOLD = 50_000  # blocks are no objects, so little is there to find


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. Raises KVStoreError if it cannot start."""
    logging.basicConfig(
        level=config.daemon.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr
    )
    # With the default of 5 ms, a thread in pure Python delays an answer by a millisecond.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        import uvloop  # noqa: PLC0415 - absent where it does not build

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_serve(config))


async def _serve(config: Config) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    listener = _listen(config.daemon.socket, config.daemon.socket_mode)
    try:
        shell = Shell(config, loop)
        await shell.start()
        server = Server(shell)
        listening = await loop.create_unix_server(server.connect, sock=listener, backlog=_BACKLOG)
        # What exists now stays: the collector need not walk it at every full pass.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        _log.info("serving on %s", config.daemon.socket)
        notify("READY=1", f"STATUS=serving on {config.daemon.socket}")
        await stopping.wait()
        notify("STOPPING=1")
        _log.info("stopping")
        listening.close()
        await server.close()
        await shell.stop(config.daemon.stop_timeout)
    finally:
        listener.close()
        config.daemon.socket.unlink(missing_ok=True)
    return 0


def _listen(path: Path, mode: int) -> socket.socket:
    """A bound, listening socket. TierError names the path if it can't be had or another daemon has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _remove_stale(path)
        old = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TierError(f"cannot listen on {path}: {error.strerror or error}", "set daemon.socket") from error
    except KVStoreError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Removes a socket that nobody serves. TierError if somebody does, or if it is no socket."""
    if not path.is_socket():
        raise TierError(f"{path} exists and is no socket", "set daemon.socket to another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise TierError(f"cannot tell who serves {path}: {error.strerror}") from error
    raise TierError(f"another daemon serves {path}", "stop it, or set daemon.socket to another path")
