"""Names are looked up on threads of their own: whoever is known already is never waited for."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from kvstore.tiers.network import resolver as resolver_module
from kvstore.tiers.network.resolver import Address, NoAnswer, Resolver
from tests.tiers.network.contract import ends

HERE = Address("a-host", 6379)


def test_a_hanging_resolver_delays_only_unknown_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        released.wait(20)
        return []

    def knows(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 6379))]

    monkeypatch.setattr(resolver_module, "KEPT_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", knows)
    resolver = Resolver()
    expected = [(socket.AF_INET, ("127.0.0.1", 6379))]
    assert resolver.resolve(HERE, ends()) == expected
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    began = time.monotonic()
    assert resolver.resolve(HERE, ends()) == resolver.resolve(HERE, ends()) == expected
    assert time.monotonic() - began < 5
    with pytest.raises(NoAnswer, match="another takes too long"):
        resolver.resolve(Address("another", 1), ends(0.1))
    released.set()


def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"cannot resolve a-host.*no such name"):
        Resolver().resolve(HERE, ends())
