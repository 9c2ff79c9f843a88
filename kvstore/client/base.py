"""The part that both clients share: settings, idle connections, retries, and failures as misses.

It consists of flows. A driver (`sync`, `aio`) opens connections, exchanges messages and runs copies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.client.calls.call import Call, Connect, Exchange, Flow, returns
from kvstore.client.calls.client import ClientCalls
from kvstore.client.calls.scope import Scope
from kvstore.client.calls.tracing import traced
from kvstore.client.checks import (
    check_deadline,
    check_namespace_ttl,
    check_owner,
    check_speed,
    check_token,
    socket_path,
)
from kvstore.client.connection import Backoff, BaseConnection
from kvstore.client.extents import Maps
from kvstore.client.leases import PutResult
from kvstore.client.prompts import Prompts
from kvstore.client.unavailable import unavailable
from kvstore.errors import (
    DeniedError,
    KVStoreError,
    MisuseError,
    RemoteProtocolError,
    TierError,
    UnavailableError,
)
from kvstore.socket_paths import find_daemon
from kvstore.types import Layout

R = TypeVar("R")

IDLE_CONNECTIONS = 64
"""Most idle connections of a client. Connections with leases are kept beyond this number."""


class BaseClient(ClientCalls):
    """Base of both clients. Their `_drive` waits for connections and answers."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        deadline_s: float = 1.0,
        strict: bool = False,
        recompute_tokens_per_s: float | None = None,
    ) -> None:
        """Makes a client of the daemon at `url` (`unix:///path`; None: KVSTORE_SOCKET, or the default path).

        Needs no daemon yet. `deadline_s` bounds every call without a deadline of its own. If the daemon is
        away, late or full, a call misses or is denied; with `strict`, it raises UnavailableError or
        DeniedError instead. `PutResult.denied` counts blocks that were not stored either way. Bad arguments
        always raise MisuseError. `token` authenticates the tenant (None: KVSTORE_TOKEN).
        `recompute_tokens_per_s` is the speed at which the engine computes KV: `acquire`, `get` and `lookup`
        then leave out blocks that are slower to load than to compute.
        """
        self._path = socket_path(url)
        self.deadline_s = check_deadline(deadline_s)
        self.strict = strict
        self.recompute_tokens_per_s = check_speed(recompute_tokens_per_s)
        self._token = check_token(os.environ.get("KVSTORE_TOKEN", "") if token is None else token)
        self._prompts = Prompts()
        self._closed = False
        self._reset()

    @property
    def path(self) -> str:
        """The socket to connect to. The default one may differ once another daemon has started."""
        return self._path or str(find_daemon())

    def _reset(self) -> None:
        """Drops all connections, at construction and in a forked process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[BaseConnection] = []
        self._maps = Maps()
        self._backoff = Backoff(logs=not self.strict)

    def _scope(self, layout: Layout, owner: str, ttl_s: float) -> Scope:
        return Scope(layout, check_owner(owner), check_namespace_ttl(ttl_s), self._prompts)

    def _drive(self, exchange: Exchange, flow: Flow[Any]) -> Any:
        """Performs the steps of a flow; returns its result, or a coroutine of it. The driver's part."""
        raise NotImplementedError

    # -- flows around a call

    def _perform(self, call: Call[Any]) -> Any:
        """Makes a call; returns its result, or a coroutine of it."""
        exchange = Exchange(0.0, self._resume, self._give_back)
        flow = self._flow(exchange, call)
        if call.made_by is not None:
            flow = traced(exchange, flow, call.made_by)
        return self._drive(exchange, flow)

    def answer(self, value: Any) -> Any:
        """Returns a result that needs no daemon: the value, or a coroutine of it."""
        return self._drive(Exchange(0.0, self._resume, self._give_back), returns(value))

    def _flow(self, exchange: Exchange, call: Call[R]) -> Flow[R]:
        """Makes a call on an idle connection; on a new one if there is none, or if the idle one has ended.

        A call with a miss raises only MisuseError, unless strict.
        """
        deadline_s = self.deadline_s if call.deadline_s is None else check_deadline(call.deadline_s)
        exchange.ends_s = time.monotonic() + deadline_s
        try:
            connection = self._borrow()
            if connection is not None:
                try:
                    return (yield from self._attempt(exchange, connection, call))
                except (ConnectionError, RemoteProtocolError):
                    # A daemon that restarts or reloads its tenants closes idle connections: try a new one.
                    pass
            self._backoff.check()
            return (yield from self._attempt(exchange, (yield Connect()), call))
        except (OSError, RemoteProtocolError) as error:
            return self._missed(exchange, self._gone(error), call.miss)
        except (UnavailableError, DeniedError, TierError) as error:
            return self._missed(exchange, error, call.miss)

    def _attempt(self, exchange: Exchange, connection: BaseConnection, call: Call[R]) -> Flow[R]:
        exchange.use(connection)
        try:
            result = yield from call.flow(exchange)
        except (MisuseError, DeniedError, TierError):
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        if not exchange.kept:
            self._give_back(connection)
        self._backoff.succeeded()
        return result

    def _missed(self, exchange: Exchange, error: KVStoreError, miss: Callable[[], R] | None) -> R:
        """Returns the miss of a failed call. Raises the error if there is none, or if strict."""
        exchange.failure = "refused" if isinstance(error, DeniedError) else "failed", error.message
        if miss is None or self.strict:
            raise error
        result = miss()
        if isinstance(result, PutResult):
            result.why = result.why or error.message
        return result

    def _gone(self, error: Exception) -> UnavailableError:
        self._backoff.failed(error)
        return unavailable(self.path, error)

    def _resume(self, exchange: Exchange, flow: Flow[Any], lost: Any) -> Any:
        """Drives a later flow of a call, its commit, on its kept connection."""
        exchange.context = exchange.failure = None
        later = traced(exchange, self._resumed(exchange, flow, lost), ("commit", None, (), {}))
        exchange.use(exchange.connection)
        return self._drive(exchange, later)

    def _resumed(self, exchange: Exchange, flow: Flow[R], lost: R) -> Flow[R]:
        exchange.ends_s = time.monotonic() + self.deadline_s
        try:
            return (yield from flow)
        except (OSError, RemoteProtocolError, DeniedError) as error:
            exchange.connection.close()
            return self._missed(exchange, UnavailableError(str(error)), lambda: lost)
        finally:
            exchange.finish()

    # -- connections

    def _borrow(self) -> BaseConnection | None:
        """Returns an idle connection, None without one. Raises UnavailableError if the client is closed."""
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            while self._idle:
                connection = self._idle.pop()
                if not connection.closed:
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: BaseConnection) -> None:
        """Makes a connection idle. Closes it if it is broken or too many are idle."""
        if connection.pid != os.getpid():
            return
        with self._lock:
            # Leases end with their connection.
            full = len(self._idle) >= IDLE_CONNECTIONS and not connection.protocol.leases
            if self._closed or connection.closed or full:
                connection.send_reports()
                connection.close()
            else:
                self._idle.append(connection)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._idle = self._idle, []
        for connection in connections:
            connection.send_reports()
            connection.close()
