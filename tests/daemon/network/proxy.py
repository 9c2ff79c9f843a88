"""A relay between a daemon and a network tier on the loopback: it can delay what it relays, or stop."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_PIECE_BYTES = 1 << 18
_LOOK_EVERY_S = 0.05


class Proxy:
    """Relays to a port of the loopback from its creation until `close`.

    While it is `split`, nothing passes and nobody is told. The connections of that time end afterwards.
    `delay_s`: the time before each piece is passed on.
    """

    def __init__(self, target: int) -> None:
        self.split = False
        self.delay_s = 0.0
        self._target = target
        self._closing = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closing = True
        self._end(self._listener, *self._open)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._open |= {here, there}
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._relay, args=pair, daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            source.settimeout(_LOOK_EVERY_S)
            while not self._closing:
                if self._waits():
                    break
                with suppress(TimeoutError):
                    piece = source.recv(_PIECE_BYTES)
                    if not piece or self._waits():
                        break
                    time.sleep(self.delay_s)
                    target.settimeout(None)
                    target.sendall(piece)
                    target.settimeout(_LOOK_EVERY_S)
        self._end(source, target)

    def _waits(self) -> bool:
        """Waits for the end of a split. Returns whether there was one."""
        was_split = self.split
        while self.split and not self._closing:
            time.sleep(_LOOK_EVERY_S)
        return was_split

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._open.discard(each)
