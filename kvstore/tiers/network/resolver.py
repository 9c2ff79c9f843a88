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
        self._changed = threading.Condition()
        self._known: dict[Address, tuple[float, list[Place]]] = {}
        self._errors: dict[Address, OSError] = {}
        self._asking: set[Address] = set()

    def places(self, address: Address, ends: float) -> list[Place]:
        """Where to connect to, best first: at once if that was known before, which is looked up again then.

        Raises OSError, or NoAnswer by `ends`.
        """
        if not address.port:
            return [(socket.AF_UNIX, address.host)]
        if place := _numeric(address):
            return [place]
        with self._changed:
            until, places = self._known.get(address, (0.0, []))
            if time.monotonic() >= until and address not in self._asking:
                self._asking.add(address)
                threading.Thread(
                    target=self._ask, args=(address,), name="kvstore-look-up", daemon=True
                ).start()
            if places:
                return places
            left_s = max(0.0, ends - time.monotonic())
            if not self._changed.wait_for(lambda: address not in self._asking, left_s):
                raise NoAnswer(f"looking up {address.host} takes too long")
            if address in self._known:
                return self._known[address][1]
            raise OSError(f"looking up {address.host}: {self._errors[address]}")

    def _ask(self, address: Address) -> None:
        places: list[Place] = []
        error = OSError("it has no address")
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            places = [(entry[0], entry[4]) for entry in found]
        except OSError as failed:
            error = failed
        except UnicodeError as failed:
            error = OSError(str(failed))
        with self._changed:
            self._asking.discard(address)
            self._errors[address] = error
            if places:
                self._known[address] = time.monotonic() + KEPT_S, places
            self._changed.notify_all()


def _numeric(address: Address) -> Place | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return family, (address.host, address.port)
    return None
