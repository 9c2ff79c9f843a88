"""Sends messages to one peer. Answers that the peer does not read are bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

from kvstore.daemon.server.connection_table import TenantBytes
from kvstore.daemon.server.request_timer import RequestTimer
from kvstore.wire import messages as m
from kvstore.wire.frames import pack

_log = logging.getLogger(__name__)

_FRAME_BYTES = 1 << 30
_UNREAD_BYTES = 16 << 20
"""The most bytes of unread answers of one connection. A tenant may have twice that."""


class Outbox:
    """The sending half of one connection."""

    def __init__(
        self, number: int, transport: asyncio.Transport, unread: TenantBytes, timer: RequestTimer
    ) -> None:
        self.number = number
        self.version = m.VERSION
        self.unread = unread
        self._transport = transport
        self._timer = timer
        self._paused = False

    @property
    def waiting_bytes(self) -> int:
        """The bytes that the peer has not read yet."""
        return self._transport.get_write_buffer_size()

    def send(self, message: Any) -> None:
        """Sends a message. Disconnects a peer that has too many unread answers."""
        if self._transport.is_closing():
            return
        self._timer.answered(message)
        self._transport.write(pack(message, _FRAME_BYTES, self.version))
        if self._paused:
            self._count(self._transport.get_write_buffer_size())

    def send_with_descriptor(self, message: m.Mapped | m.MappedPresence, fd: int) -> None:
        """Sends a short frame with a descriptor directly to the socket: transports carry none.

        Allowed only while `waiting_bytes` is 0. Waiting bytes would arrive after the frame.
        """
        self._timer.answered(message)
        number = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as sock:
            frame = pack(message, version=self.version)
            try:
                sent = socket.send_fds(sock, [frame], [fd])
            except OSError as error:
                _log.info("connection %d: no descriptor can be sent: %s", self.number, error)
                self._transport.abort()
                return
        if sent < len(frame):
            self._transport.write(frame[sent:])

    def fail(self, why: str, hint: str) -> None:
        """Sends the reason and closes the connection once everything is sent."""
        _log.info("connection %d: %s", self.number, why)
        if not self._transport.is_closing():
            self._transport.write(pack(m.Failure(why, hint)))
            self._transport.close()

    def pause(self) -> None:
        """Counts unread answers from now on: the transport's buffer is full."""
        self._paused = True

    def resume(self) -> None:
        """Stops counting: the peer has read its answers."""
        self._paused = False
        self.unread.set(0)

    def _count(self, nbytes: int) -> None:
        if self.unread.tenant is None:
            return
        if self.unread.set(nbytes) > 2 * _UNREAD_BYTES or nbytes > _UNREAD_BYTES:
            _log.warning("connection %d does not read its answers: disconnected", self.number)
            self._transport.abort()
