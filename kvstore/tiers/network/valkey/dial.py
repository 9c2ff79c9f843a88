"""Where a server is: addresses, and names looked up on a thread, since that may hang."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import TypeAlias

KEPT_S = 60.0
"""For so long an answer of the resolver is good; longer, where it has no other."""

Place: TypeAlias = "tuple[socket.AddressFamily, str | tuple[str | int | bytes, ...]]"
"""A family of addresses and one of it, as sockets take it."""


class NoAnswer(Exception):
    """The time is up, or the backend is closed."""


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
    """Places of addresses. One look-up a host at a time, on a thread that nobody waits for too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Address, tuple[float, list[Place]]] = {}
        self._asked: dict[Address, _LookUp] = {}

    def places(self, address: Address, ends: float) -> list[Place]:
        """Where to connect to, best first. Raises OSError, or NoAnswer by `ends`."""
        if not address.port:
            return [(socket.AF_UNIX, address.host)]
        if place := _numeric(address):
            return [place]
        with self._lock:
            at, places = self._known.get(address, (0.0, []))
            if places and time.monotonic() - at < KEPT_S:
                return places
            asked = self._asked.get(address)
            if asked is None or asked.ended.is_set():
                asked = self._asked[address] = _LookUp(address)
        if not asked.ended.wait(max(0.0, ends - time.monotonic())):
            if places:
                return places
            raise NoAnswer(f"looking up {address.host} takes too long")
        if asked.places:
            with self._lock:
                self._known[address] = time.monotonic(), asked.places
            return asked.places
        if places:
            return places
        raise OSError(f"looking up {address.host}: {asked.error}")


class _LookUp:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.places: list[Place] = []
        self.error: OSError | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._work, name="kvstore-look-up", daemon=True).start()

    def _work(self) -> None:
        try:
            found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
            self.places = [(entry[0], entry[4]) for entry in found]
        except OSError as error:
            self.error = error
        except UnicodeError as error:
            self.error = OSError(str(error))
        self.ended.set()


def _numeric(address: Address) -> Place | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return family, (address.host, address.port)
    return None
