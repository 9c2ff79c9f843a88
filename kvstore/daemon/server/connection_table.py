"""The connections of one daemon, and the bounds on their number and on the bytes that they hold.

A peer is a stranger until its Hello. Strangers are bounded in number by user, greeted peers by tenant.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvstore.config import Config
from kvstore.daemon.server.request_scheduler import RequestScheduler
from kvstore.daemon.tenancy.auth import Principal
from kvstore.wire import messages as m

_log = logging.getLogger(__name__)

STRANGERS = 256
"""The most connections without a Hello: more than are accepted before one of them is read."""

_FOR_OPERATORS = 16
_SHARE_OF_FREE = 2
_READ_BYTES = 64 << 10


@dataclass(slots=True)
class TenantBytes:
    """One connection's share of the bytes of a tenant's connections. Counts nothing without a tenant."""

    _by_tenant: Counter[int]
    tenant: int | None = None
    nbytes: int = 0

    def set(self, nbytes: int) -> int:
        """Sets this connection's bytes. Returns the sum of the tenant."""
        if self.tenant is None:
            return 0
        self._by_tenant[self.tenant] += nbytes - self.nbytes
        self.nbytes = nbytes
        return self._by_tenant[self.tenant]


class ConnectionTable:
    """All connections, and the strangers among them by age. Elements are of type `Connection`."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.scheduler = scheduler
        self.connections: set[Any] = set()
        self.strangers: dict[Any, None] = {}
        self.unfinished_bytes: Counter[int] = Counter()
        self.unread_bytes: Counter[int] = Counter()
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self._logged: set[tuple[int, int, int]] = set()

    def add(self, stranger: Any) -> None:
        """Adds a connection that has not said Hello."""
        self.connections.add(stranger)
        self.strangers[stranger] = None

    def remove(self, connection: Any) -> None:
        """Removes a connection that has ended."""
        self.connections.discard(connection)
        self.strangers.pop(connection, None)

    def crowded_out(self, uid: int) -> Any:
        """Returns the stranger to disconnect after user `uid` has connected, None if there are few strangers.

        Returns the oldest stranger of that user, or of the user with most strangers if this is its only one.
        """
        if len(self.strangers) <= STRANGERS:
            return None
        count = Counter(stranger.uid for stranger in self.strangers)
        crowd = uid if count[uid] > 1 else count.most_common(1)[0][0]
        return next(stranger for stranger in self.strangers if stranger.uid == crowd)

    def why_full(self, who: Principal, config: Config) -> str:
        """Returns why there is no connection left for a peer, "" if there is one.

        The last connections, at most 16, are reserved for operators. If tenants are configured, each may have
        twice the number of free connections. So one more tenant can always connect.
        """
        limit, greeted = config.limits.connections, len(self.connections) - len(self.strangers)
        left = limit - greeted
        if not who.operator:
            left -= min(_FOR_OPERATORS, limit // 8)
        if left <= 0:
            return f"{greeted} clients are connected"
        mine = self.scheduler.connected[who.tenant]
        if config.tenants and not who.operator and mine >= _SHARE_OF_FREE * left:
            return f"{mine} clients of tenant {who.name} are connected"
        return ""

    def log_version(self, uid: int, hello: m.Hello) -> None:
        """Logs that a client is too old or too new, once for each user and version: clients try again."""
        client = uid, hello.version, hello.newest
        if client not in self._logged and len(self._logged) < STRANGERS:
            self._logged.add(client)
            theirs, ours = m.span(*client[1:]), m.span(m.OLDEST, m.VERSION)
            _log.warning("clients of user %d speak %s, this daemon %s: they get nothing", uid, theirs, ours)
