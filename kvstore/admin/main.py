"""The process of `kvstore admin`: opens a Unix socket and, if configured, a TCP port; serves until a signal.

`_Http` bounds connections in number and time, so that idle or slow clients never keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore import logs
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
"""Open connections per server. Beyond it, idle connections are closed."""

_LINGER_S = 0.5
_MOST_LINGERING = 128
_REQUEST_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5
_NICENESS = 10


def run(path: Path | None) -> int:
    """Serves with the configuration at `path` until SIGTERM or SIGINT. SIGHUP reloads tokens and rates.

    Returns the exit code. Raises KVStoreError if it cannot start.
    """
    config = load(path)
    logs.start(config.daemon.log_level, config.daemon.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it logs everything once per socket
    # The daemon and engines have priority. The systemd unit sets the same and forbids these calls.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(_NICENESS)
    with new_runner() as runner:
        return runner.run(_serve(config, path))


async def _serve(config: Config, path: Path | None) -> int:
    loop, admin = asyncio.get_running_loop(), config.admin
    app = application.make(config, f"unix://{config.daemon.for_operators}")
    listeners = [listen(admin.socket, admin.socket_mode, "admin.socket")]
    own_socket = identity(admin.socket)
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
        recording = loop.create_task(history.keep(app.state.history, app.state.daemon_state))
        recording.add_done_callback(_log_end)
        where = f"{admin.socket}{f' and {admin.listen}' if admin.listen else ''}"
        _log.info("serving on %s", where)
        notify("READY=1", f"STATUS=serving on {where}")
        await stopping.wait()
        notify("STOPPING=1")
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        await app.state.recorder.end()
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        await app.state.daemon_state.close()
    finally:
        for listener in listeners:
            listener.close()
        unlink_own(admin.socket, own_socket)
    return 0


def _log_end(recording: asyncio.Task[None]) -> None:
    if not recording.cancelled():
        _log.error("the history of the last hour has stopped", exc_info=recording.exception())


def _reload(app: Any, path: Path | None) -> None:
    try:
        app.state.authenticator.admin = load(path).admin
        _log.info("reloaded: tokens and rates")
    except KVStoreError as error:
        _log.error("not reloaded: %s", error)
    except Exception:
        _log.exception("not reloaded because of a bug: the previous tokens and rates stay valid")


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TierError(*_explained(host, port, error)) from error
    return listener


def _explained(host: str, port: int, error: OSError) -> tuple[str, str]:
    """Returns the message and the hint for an address that cannot be used."""
    failed = f"cannot listen on {host} port {port}"
    if error.errno == errno.EADDRINUSE:
        hint = f"set admin.listen to another port; `ss -ltnp sport = :{port}` shows that process"
        return f"{failed}: another process uses this port", hint
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "set admin.listen to an address of this machine; `ip address` lists them"
        return f"{failed}: this machine does not have this address", hint
    if isinstance(error, PermissionError):
        hint = "set admin.listen to a port from 1024 on"
        return f"{failed}: permission denied, uid {os.geteuid()} may not use this port", hint
    return f"{failed}: {error.strerror}", "set admin.listen"


def server_of(app: Any, certificate: Path | None = None, key: Path | None = None) -> uvicorn.Server:
    """Returns a server for sockets passed to its `serve`. Raises TierError for an unusable certificate."""
    config = uvicorn.Config(
        app,
        http=_Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else os.fspath(key),
    )
    try:
        config.load()
    except OSError as error:
        hint = "set admin.certificate and admin.key to PEM files that this user may read"
        raise TierError(f"cannot use {certificate} and {key}: {error.strerror or error}", hint) from error
    return _Server(config)


class _Server(uvicorn.Server):
    """Installs no signal handlers: one process runs two servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


_ticks = itertools.count()


class _Http(H11Protocol):
    """HTTP connection that knows its peer's uid and is bounded in time and number."""

    _idle_since = 0
    _timer: asyncio.TimerHandle | None = None
    _lingering: ClassVar[dict[_Http, asyncio.TimerHandle]] = {}

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer.family == socket.AF_UNIX:
            self.client = PEER, peer_of(peer.fileno()).uid
        self._idle_since = next(_ticks)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        self._idle_since = next(_ticks)
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop_timer()
        timer = self._lingering.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _expects_data(self) -> bool:
        """Returns whether a request, or the rest of one, has yet to arrive."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        """Closes the connection if no whole request arrives in time after the previous one."""
        if not self._expects_data():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(_REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        """Above the bound, closes the longest idle connection of the peer with the most idle connections."""
        if len(self.connections) <= _MOST_CONNECTIONS:
            return
        idle = [other for other in self.connections if isinstance(other, _Http) and other._is_idle()]
        by_peer = Counter(other._peer() for other in idle)
        victim = min(idle, key=lambda other: (-by_peer[other._peer()], other._idle_since))
        self.connections.discard(victim)
        victim._linger()

    def _linger(self) -> None:
        """Closes the connection after a delay, which slows clients that reconnect at once."""
        self.transport.pause_reading()
        self._lingering[self] = self.loop.call_later(_LINGER_S, self.transport.abort)
        if len(self._lingering) > _MOST_LINGERING:
            oldest = next(iter(self._lingering))
            self._lingering.pop(oldest).cancel()
            oldest.transport.abort()

    def _is_idle(self) -> bool:
        return self._expects_data() or self.cycle is None or self.cycle.response_complete

    def _peer(self) -> tuple[str, int]:
        """Returns the peer: a local user by uid, or a host."""
        host, port = self.client or ("", 0)
        return (host, port) if host == PEER else (host, 0)
