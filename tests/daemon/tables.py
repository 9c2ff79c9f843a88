"""Clients with a presence table, and what they ask nonetheless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import presence_tables
from kvstore.client.aio import AsyncConnection
from kvstore.client.sync import Connection
from tests.daemons import eventually, names

KEYS = names(24, "presence")


def with_table(client: Any, ns: Any, owner: str = "default") -> Any:
    """The namespace, after lookups until its table answers."""

    def ready() -> bool:
        ns.lookup(KEYS)
        table = client._maps.presence.get(ns.layout.fingerprint(owner))
        return table is not None and table.find(KEYS[:1], False) is not None

    eventually(ready)
    return ns


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that clients send from now on, by name. None is sent to see whether the daemon hangs."""
    monkeypatch.setattr(presence_tables, "HEARD_S", 60.0)
    sent: list[str] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: Any, message: Any, ends_s: float) -> Any:
            sent.extend(type(each).__name__ for each in (message if isinstance(message, list) else [message]))
            return call(self, message, ends_s)

        return noting

    for kind in (Connection, AsyncConnection):
        for name in ("call", "call_all"):
            monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    return sent
