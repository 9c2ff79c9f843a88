"""One connection's conversation, without the connection: ids, handshake, what the daemon said so far.

`Maps` keeps the extents that were mapped, for all connections of one client to one run of the daemon.
"""

from __future__ import annotations

import os
from typing import Any

from kvstore.arena import Mapping
from kvstore.errors import RemoteProtocolError
from kvstore.types import HEADER_BYTES, LABEL_BYTES, Geometry, Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import DEFAULT_FRAME_BYTES, Frames, pack


class MappedExtent:
    """A mapped extent and where its slots are, worked out once for each slot size it was cut to."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._cuts: dict[int, tuple[int, memoryview]] = {}

    def _cut(self, slot_bytes: int) -> tuple[int, memoryview]:
        cut = self._cuts.get(slot_bytes)
        if cut is None:
            geometry = Geometry(self.mapping.nbytes, slot_bytes, table=True)
            table = self.mapping.view[LABEL_BYTES:][: geometry.slots * HEADER_BYTES].cast("Q")
            cut = self._cuts[slot_bytes] = (geometry.payload_offset, table)
        return cut

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot's payload."""
        start = self._cut(slot_bytes)[0] + index * slot_bytes
        return self.mapping.view[start : start + nbytes]

    def version(self, slot_bytes: int, index: int) -> int:
        """The version in a slot's header: one aligned 8-byte load, which never tears."""
        return self._cut(slot_bytes)[1][index * (HEADER_BYTES // 8) + 1]


class Maps:
    """Mapped extents of the latest run of the daemon, by (extent, writable)."""

    def __init__(self) -> None:
        self.instance = b""
        self._mapped: dict[tuple[int, bool], MappedExtent] = {}

    def of(self, instance: bytes) -> Maps:
        """What is mapped of that run, shared by all connections to it, whoever connects to the next one."""
        if instance != self.instance:
            self.instance, self._mapped = instance, {}
        maps = Maps()
        maps.instance, maps._mapped = self.instance, self._mapped
        return maps

    def get(self, extent: int, writable: bool) -> MappedExtent | None:
        """A mapped extent, or None."""
        return self._mapped.get((extent, writable))

    def add(self, extent: int, writable: bool, fd: int, nbytes: int) -> MappedExtent:
        """Maps a received descriptor and closes it."""
        try:
            mapped = MappedExtent(Mapping(fd, nbytes, writable))
        finally:
            os.close(fd)
        self._mapped[extent, writable] = mapped
        return mapped


class Session:
    """What one connection knows. `send` and `receive` turn messages to bytes and back."""

    def __init__(self, token: str, maps: Maps) -> None:
        self.maps = maps
        self.namespaces: dict[tuple[int, str, float], tuple[int, bytes, Layout]] = {}
        self.batch_keys = 0
        self.reserve_keys = 0
        self.holds: set[int] = set()
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self._frames = Frames(1 << 30)
        self._token = token
        self._last_id = 0

    def hello(self) -> bytes:
        """The first bytes to send."""
        return pack(m.Hello(m.MAGIC, m.VERSION, self._token))

    def welcome(self, message: Any) -> None:
        """Takes in the answer to hello. Raises RemoteProtocolError if the two cannot talk."""
        if not isinstance(message, m.Welcome):
            raise RemoteProtocolError(f"the daemon greets with {type(message).__name__}")
        if message.version != m.VERSION:
            raise RemoteProtocolError(f"the daemon speaks version {message.version}, this client {m.VERSION}")
        self.batch_keys, self.reserve_keys = message.batch_keys, message.reserve_keys
        self.frame_bytes = message.frame_bytes
        self.maps = self.maps.of(message.instance)

    def send(self, message: Any) -> bytes:
        """The bytes of a message; a request gets its id here."""
        if hasattr(message, "id"):
            self._last_id += 1
            message.id = self._last_id
        return pack(message, self.frame_bytes)

    def post(self, message: Any) -> bytes:
        """The bytes of a message that needs no answer."""
        return pack(message, self.frame_bytes)

    def receive(self, data: bytes) -> Any:
        """The message that is complete with `data`, or None. Raises RemoteProtocolError at a Failure."""
        message = None
        for message in self._frames.feed(data):
            if isinstance(message, m.Failure):
                raise RemoteProtocolError(message.why, message.hint)
            if isinstance(message, m.Denied):
                # A namespace may have been taken back, or be there again: the next call opens it anew.
                self.namespaces.clear()
        return message
