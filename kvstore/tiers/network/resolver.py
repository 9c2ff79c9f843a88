"""Addresses of servers, and host names resolved on a thread, because that may hang."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import TypeAlias

KEPT_S = 60.0
"""Results are cached for this time, and longer if the host cannot be resolved again."""

SocketAddress: TypeAlias = "tuple[socket.AddressFamily, str | tuple[str | int | bytes, ...]]"
"""An address family and an address, as sockets take it."""


class NoAnswer(Exception):
    """There is no answer by the deadline, or the backend is closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and its port, or the path of a Unix socket (port 0)."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Resolver:
    """Resolves addresses, with one thread per address at a time. Callers wait until their deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: dict[Address, tuple[float, list[SocketAddress]]] = {}
        self._errors: dict[Address, OSError] = {}
        self._resolving: set[Address] = set()

    def resolve(self, address: Address, ends: float) -> list[SocketAddress]:
        """Returns the socket addresses to connect to, best first.

        Returns a cached result at once, and starts to refresh an old one. Raises OSError, and NoAnswer at
        `ends`.
        """
        if not address.port:
            return [(socket.AF_UNIX, address.host)]
        if resolved := _numeric(address):
            return [resolved]
        with self._changed:
            until, found = self._known.get(address, (0.0, []))
            if time.monotonic() >= until and address not in self._resolving:
                self._resolving.add(address)
                threading.Thread(
                    target=self._resolve, args=(address,), name="kvstore-resolve", daemon=True
                ).start()
            if found:
                return found
            left_s = max(0.0, ends - time.monotonic())
            if not self._changed.wait_for(lambda: address not in self._resolving, left_s):
                raise NoAnswer(f"resolving {address.host} takes too long")
            if address in self._known:
                return self._known[address][1]
            raise OSError(f"cannot resolve {address.host}: {self._errors[address]}")

    def _resolve(self, address: Address) -> None:
        addresses: list[SocketAddress] = []
        error = OSError("the host has no address")
        try:
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            addresses = [(entry[0], entry[4]) for entry in entries]
        except OSError as failed:
            error = failed
        except UnicodeError as failed:
            error = OSError(str(failed))
        with self._changed:
            self._resolving.discard(address)
            self._errors[address] = error
            if addresses:
                self._known[address] = time.monotonic() + KEPT_S, addresses
            self._changed.notify_all()


def _numeric(address: Address) -> SocketAddress | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return family, (address.host, address.port)
    return None
