"""The server of one daemon: its connections, and the scheduler and bounds that they share."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from kvstore.daemon.requests.services import Services
from kvstore.daemon.server.connection import VERSION, Connection
from kvstore.daemon.server.connection_table import ConnectionTable
from kvstore.daemon.server.request_scheduler import RequestScheduler
from kvstore.daemon.tenancy.auth import Principal

_CLOSE_ROUNDS = 1000


class Server:
    """Serves connections until `close`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.scheduler = RequestScheduler(
            services.core.loop, services.stopwatch, services.config().limits.queued_requests
        )
        self.table = ConnectionTable(self.scheduler)
        self._set_shares()

    def connect(self, among_operators: bool = False) -> Connection:
        """Returns the protocol of a new peer. `among_operators`: it connected to the operators' socket."""
        return Connection(self.table, self.services, among_operators)

    def reconfigure(self) -> None:
        """Applies a changed configuration. Disconnects peers whose tenant has changed."""
        self._set_shares()
        for connection in list(self.table.connections):
            connection.check()

    def _set_shares(self) -> None:
        config, registry = self.services.config(), self.services.authenticator
        self.scheduler.queued_requests = config.limits.queued_requests
        for name in registry.names():
            tenant = config.tenants.get(name)
            weight, requests = (tenant.share, tenant.requests) if tenant is not None else (1.0, None)
            self.scheduler.set(registry.add(name), weight, float(requests or 0))

    def status(self, who: Principal | None) -> dict[str, Any]:
        """Returns the server's part of the status: all of it for operators (None), else the tenant's own."""
        connections = self.table.connections
        if who is not None and not who.operator:
            mine = [c for c in connections if c.session and c.session.principal.tenant == who.tenant]
            return {"version": VERSION, "connections": len(mine)}
        spoken = Counter(str(c.version) for c in connections if c.session is not None)
        return {
            "version": VERSION,
            "connections": len(connections),
            "queued_requests": self.scheduler.waiting,
            "refused_requests": self.scheduler.refused,
            "wire_versions": dict(sorted(spoken.items())),
        }

    async def close(self) -> None:
        """Disconnects all peers. Returns when their leases and reservations are freed."""
        for connection in list(self.table.connections):
            connection.abort()
        for _ in range(_CLOSE_ROUNDS):
            if not self.table.connections:
                return
            await asyncio.sleep(0.001)
