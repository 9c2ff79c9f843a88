"""The addresses of a host, asked for on a thread of their own: the system's resolver can't be stopped."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, TypeAlias

Address: TypeAlias = tuple[int, Any]
"""Family, and what `connect` takes."""

_KEPT_S = 30.0


class Addresses:
    """What the resolver last said of a host, for some time. Any number of threads may ask."""

    def __init__(self, host: str, port: int) -> None:
        """Asks nothing yet."""
        self._host, self._port = host, port
        self._changed = threading.Condition()
        self._known: list[Address] = []
        self._until = 0.0
        self._asking = False

    def known(self, ends: float) -> list[Address]:
        """The addresses; none if the resolver has none by then. Those of before, while it is asked again."""
        with self._changed:
            if time.monotonic() >= self._until and not self._asking:
                self._asking = True
                threading.Thread(target=self._ask, name="kvstore-resolve", daemon=True).start()
            while self._asking and not self._known and (left := ends - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._known

    def _ask(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        with self._changed:
            self._asking = False
            self._known = [(family, address) for family, _, _, _, address in found]
            self._until = time.monotonic() + (_KEPT_S if found else 0.0)
            self._changed.notify_all()
