"""The clients of the tenants that requests name, by token.

A token of a request is used for nothing but its blocks. The engine's own tenant has the client that the
connector has made.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore import Layout, Namespace
from kvstore.errors import KVStoreError, RemoteProtocolError, UnavailableError
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.identity import in_epoch, with_ttl
from kvstore_vllm.options import Scope

T = TypeVar("T")

_MOST = 32
"""Most clients beside the engine's own."""
_UNUSED_S = 300.0
"""A client is closed when it has not been used for so long, in seconds."""
_REFUSED = 1024
"""Most refused tokens that are remembered."""
_REFUSED_S = 10.0
"""A refused token is not tried again for so long, in seconds."""


class RefusedError(KVStoreError):
    """The daemon refuses the token of a request."""


@dataclass(slots=True)
class _Tenant:
    daemons: Daemons
    used_s: float = 0.0
    epoch: str = ""
    opened: dict[Any, Any] = field(default_factory=dict)


class Tenants:
    """Clients by token, like `own`, the engine's. Thread-safe.

    `deadline_s`: of their calls, which raise. `tries`: a token is tried before its client is one of the few
    that are kept. Transfers of a client that is closed are misses.
    """

    def __init__(
        self,
        own: Daemons,
        deadline_s: float,
        tries: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = _Tenant(own)
        self._deadline_s = deadline_s
        self._tries = tries
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def opened(self, scope: Scope, epoch: str, what: object, make: Callable[[Daemons], T]) -> T:
        """Returns what `make` makes of the scope's clients for `what`, once since the reset named `epoch`.

        Raises RefusedError for a token that the daemon refuses.
        """
        tenant = self._tenant(scope.token)
        with self._lock:
            if tenant.epoch != epoch:
                tenant.epoch = epoch
                tenant.opened.clear()
            key = scope.ttl_s, what
            if key not in tenant.opened:
                tenant.opened[key] = make(tenant.daemons)
            result: T = tenant.opened[key]
            return result

    def namespace(self, scope: Scope, epoch: str, layout: Layout) -> Namespace:
        """Returns the blocks of a scope with this layout."""
        return self.opened(scope, epoch, layout, lambda daemons: namespace(daemons, scope, epoch, layout))

    def daemons(self, scope: Scope) -> Daemons:
        """Returns the clients of a scope. Raises RefusedError for a token that the daemon refuses."""
        return self._tenant(scope.token).daemons

    def check(self, scope: Scope, error: Exception) -> None:
        """Takes the error of a call of the scope's client. Raises RefusedError if its token is refused."""
        if not isinstance(error.__cause__, RemoteProtocolError):
            return
        why = error.__cause__.message
        with self._lock:
            self._refused[scope.token] = self._clock() + _REFUSED_S, why
            if len(self._refused) > _REFUSED:
                self._refused.popitem(last=False)
            tenant = self._tenants.pop(scope.token, None)
        if tenant is not None:
            tenant.daemons.close()
        raise RefusedError(f"the daemon refuses the token of a request: {why}") from error

    def close(self) -> None:
        """Closes all clients but the engine's own."""
        with self._lock:
            tenants, self._tenants = self._tenants, OrderedDict()
        for tenant in tenants.values():
            tenant.daemons.close()

    def __len__(self) -> int:
        """Returns the number of clients beside the engine's own."""
        return len(self._tenants)

    def _tenant(self, token: str) -> _Tenant:
        if not token:
            return self._own
        now = self._clock()
        with self._lock:
            tenant = self._tenants.get(token)
            until, why = self._refused.get(token, (0.0, ""))
        if tenant is None:
            if now < until:
                raise RefusedError(f"the daemon refuses the token of a request: {why}")
            tenant = self._made(token)
        with self._lock:
            tenant = self._tenants.setdefault(token, tenant)
            tenant.used_s = now
            self._tenants.move_to_end(token)
            closed = self._unused(now)
        for each in closed:
            each.daemons.close()
        return tenant

    def _made(self, token: str) -> _Tenant:
        daemons = self._own.daemons.for_token(token, self._deadline_s)
        if self._tries:
            try:
                daemons.ping()
            except UnavailableError as error:
                # Of a daemon that is away nothing is known: later calls will tell.
                self.check(Scope(token), error)
        return _Tenant(daemons)

    def _unused(self, now: float) -> list[_Tenant]:
        """Forgets clients that have not been used for long, or are too many; returns them."""
        closed = []
        while self._tenants:
            oldest = next(iter(self._tenants))
            if len(self._tenants) <= _MOST and self._tenants[oldest].used_s + _UNUSED_S > now:
                break
            closed.append(self._tenants.pop(oldest))
        return closed


def namespace(daemons: Daemons, scope: Scope, epoch: str, layout: Layout) -> Namespace:
    """Returns the namespace of a scope's client."""
    return daemons.of(layout).namespace(with_ttl(in_epoch(layout, epoch), scope.ttl_s), ttl_s=scope.ttl_s)
