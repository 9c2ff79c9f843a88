"""From configuration to a running process: a Unix socket, a port if there is to be one, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.admin import app as application
from kvstore.admin import history
from kvstore.admin.access.auth import PEER
from kvstore.config import Config, load, parse_listen
from kvstore.daemon.main import new_runner
from kvstore.daemon.server.listener import identity, listen, unlink_own
from kvstore.daemon.server.peer_credentials import peer_of
from kvstore.daemon.systemd import notify
from kvstore.errors import KVStoreError, TierError

_log = logging.getLogger("kvstore.admin")

_MOST_CONNECTIONS = 128
"""Of one socket; beyond, those that wait for nothing but their peer make room."""

_LINGERS_S = 0.5
_MOST_LINGER = 128
_REQUEST_WITHIN_S = 10.0
_STOP_WITHIN_S = 5
_NICER = 10


def run(path: Path | None) -> int:
    """Serves by the configuration at `path` until SIGTERM or SIGINT; SIGHUP reads tokens again.

    Returns the exit code. Raises KVStoreError if it cannot start.
    """
    config = load(path)
    level = config.daemon.log_level.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it would say everything once a socket
    # The daemon and engines come first. The unit says the same, and forbids to say it here.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(_NICER)
    with new_runner() as runner:
        return runner.run(_serve(config, path))


async def _serve(config: Config, path: Path | None) -> int:
    loop, admin = asyncio.get_running_loop(), config.admin
    app = application.make(config, f"unix://{config.daemon.for_operators}")
    listeners = [listen(admin.socket, admin.socket_mode)]
    made = identity(admin.socket)
    servers = [server_of(app)]
    try:
        if admin.listen:
            listeners.append(_listen_tcp(*parse_listen(admin.listen)))
            servers.append(server_of(app, certificate=admin.certificate, key=admin.key))
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, _reload, app, path)
        running = [
            loop.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, listeners, strict=True)
        ]
        keeping = loop.create_task(history.keep(app.state.hour, app.state.snapshots))
        keeping.add_done_callback(_tell)
        where = f"{admin.socket}{f' and {admin.listen}' if admin.listen else ''}"
        _log.info("serving on %s", where)
        notify("READY=1", f"STATUS=serving on {where}")
        await stopping.wait()
        notify("STOPPING=1")
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        await app.state.recorder.end()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await app.state.snapshots.close()
    finally:
        for listener in listeners:
            listener.close()
        unlink_own(admin.socket, made)
    return 0


def _tell(keeping: asyncio.Task[None]) -> None:
    if not keeping.cancelled():
        _log.error("the last hour is kept no longer", exc_info=keeping.exception())


def _reload(app: Any, path: Path | None) -> None:
    try:
        app.state.callers.admin = load(path).admin
        _log.info("reloaded: tokens and rates")
    except KVStoreError as error:
        _log.error("not reloaded: %s", error)
    except Exception:
        _log.exception("not reloaded, because of a bug: tokens and rates from before hold")


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TierError(
            f"cannot listen on {host} port {port}: {error.strerror}", "set admin.listen"
        ) from error
    return listener


def server_of(app: Any, certificate: Path | None = None, key: Path | None = None) -> uvicorn.Server:
    """A server of an app, for sockets that are passed to `serve`. Raises TierError for files of no use."""
    config = uvicorn.Config(
        app,
        http=_Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_WITHIN_S,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else os.fspath(key),
    )
    try:
        config.load()
    except OSError as error:
        raise TierError(f"cannot use {certificate} and {key}: {error}", "see admin.certificate") from error
    return _Server(config)


class _Server(uvicorn.Server):
    """Leaves signals to us: there may be two of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


_turns = itertools.count()


class _Http(H11Protocol):
    """Says who is at the other end of a Unix socket. Waits for peers within bounds of time and number."""

    _waits_since = 0
    _timer: asyncio.TimerHandle | None = None
    _lingering: ClassVar[dict[_Http, asyncio.TimerHandle]] = {}

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer.family == socket.AF_UNIX:
            self.client = PEER, peer_of(peer.fileno()).uid
        self._waits_since = next(_turns)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        self._waits_since = next(_turns)
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop_timer()
        lingers = self._lingering.pop(self, None)
        if lingers is not None:
            lingers.cancel()

    def _owed(self) -> bool:
        """Whether the rest of a request, or all of it, is still to come."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        """A request is whole within some time of the one before."""
        if not self._owed():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(_REQUEST_WITHIN_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        """Closes the connection that has waited longest, of the peer with most that wait."""
        if len(self.connections) <= _MOST_CONNECTIONS:
            return
        waiting = [other for other in self.connections if isinstance(other, _Http) and other._waits()]
        of_peer = Counter(other._peer() for other in waiting)
        gone = min(waiting, key=lambda other: (-of_peer[other._peer()], other._waits_since))
        self.connections.discard(gone)
        gone._linger()

    def _linger(self) -> None:
        """Ends the connection, but not at once: who only waits to connect again waits longer then."""
        self.transport.pause_reading()
        self._lingering[self] = self.loop.call_later(_LINGERS_S, self.transport.abort)
        if len(self._lingering) > _MOST_LINGER:
            oldest = next(iter(self._lingering))
            self._lingering.pop(oldest).cancel()
            oldest.transport.abort()

    def _waits(self) -> bool:
        return self._owed() or self.cycle is None or self.cycle.response_complete

    def _peer(self) -> tuple[str, int]:
        """A user of this machine, or a host."""
        host, port = self.client or ("", 0)
        return (host, port) if host == PEER else (host, 0)
