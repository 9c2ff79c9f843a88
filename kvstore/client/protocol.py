"""One connection's conversation, without the connection: ids, handshake, frames to be sent, what the daemon
said so far.

`Maps` keeps the extents that were mapped, for all connections of one client to one run of the daemon.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore.arena import Mapping
from kvstore.cuda.buffer import DeviceBuffer
from kvstore.cuda.device import Gpu
from kvstore.cuda.errors import CudaError
from kvstore.errors import KVStoreError, RemoteProtocolError, printable
from kvstore.types import HEADER_BYTES, LABEL_BYTES, Geometry, Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import DEFAULT_FRAME_BYTES, Frames, pack

_log = logging.getLogger(__name__)


class MappedExtent:
    """A mapped extent and where its slots are, worked out once for each slot size it was cut to."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.pinned = False
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

    def pin(self, gpu: Gpu) -> None:
        """Has CUDA know the extent, once: copies between it and GPUs are fast then."""
        if not self.pinned:
            self.pinned = True
            view = self.mapping.view
            if gpu.register(view, readonly=view.readonly):
                # Ends before the memory is unmapped, which the finalizer's own view keeps.
                weakref.finalize(self, quietly, gpu.unregister, view).atexit = False


class DeviceExtent:
    """An extent in a GPU's memory, mapped until nobody looks at it any more."""

    def __init__(self, gpu: Gpu, handle: bytes, nbytes: int) -> None:
        """Opens it. CudaError where CUDA IPC does not work."""
        whole = gpu.open_export(handle, nbytes)
        self._memory = _Export(whole)
        weakref.finalize(self._memory, quietly, gpu.close_export, whole).atexit = False

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> DeviceBuffer:
        """The first `nbytes` of a slot's payload."""
        start, whole = index * slot_bytes, self._memory.whole
        return DeviceBuffer(whole.address + start, nbytes, whole.gpu, self._memory)

    def version(self, slot_bytes: int, index: int) -> int:
        """There are no headers: who reads from here verifies what it has read."""
        raise NotImplementedError


class _Export:
    """What views of an extent keep, and with it the extent."""

    def __init__(self, whole: DeviceBuffer) -> None:
        self.whole = whole


def quietly(call: Callable[[Any], None], what: Any) -> None:
    """What is given back to a GPU that is lost is gone anyway."""
    try:
        call(what)
    except CudaError as error:
        _log.debug("%s", error)


class Maps:
    """Mapped extents of the latest run of the daemon, by (extent, writable)."""

    def __init__(self) -> None:
        self.instance = b""
        self._mapped: dict[tuple[int, bool], MappedExtent | DeviceExtent] = {}
        self._without_pool: set[str] = set()

    def of(self, instance: bytes) -> Maps:
        """What is mapped of that run, shared by all connections to it, whoever connects to the next one."""
        if instance != self.instance:
            self.instance, self._mapped, self._without_pool = instance, {}, set()
        maps = Maps()
        maps.instance, maps._mapped, maps._without_pool = self.instance, self._mapped, self._without_pool
        return maps

    def get(self, extent: int, writable: bool) -> MappedExtent | DeviceExtent | None:
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

    def keep(self, extent: int, mapped: DeviceExtent) -> None:
        """One in a GPU's memory, which is mapped for reading and writing alike."""
        self._mapped[extent, False] = self._mapped[extent, True] = mapped

    def pool_of(self, gpu: Gpu | None) -> str:
        """The GPU whose pool a request may ask for; empty if there is none that can be mapped."""
        return "" if gpu is None or gpu.uuid in self._without_pool else gpu.uuid

    def leave_pool(self, gpu: Gpu | None, error: KVStoreError) -> bool:
        """A pool can't be mapped: from now on blocks come from DRAM. False if they did already."""
        if gpu is None or gpu.uuid in self._without_pool:
            return False
        self._without_pool.add(gpu.uuid)
        _log.warning("blocks for %s come from DRAM: %s", gpu.uuid, error)
        return True


_Name = tuple[int, str, float]
"""A namespace as callers name it: its layout's id, its owner, its TTL (s)."""

_Opened = tuple[int, bytes, Layout]
"""Its number on the connection, its fingerprint, and the layout, so that its id stays its own."""


POST_WAIT_S = 5.0
"""Longest that a post waits for the daemon to read it."""

POST_BYTES = 256 << 10
"""Most bytes of posts that wait on one connection."""


class Outbox:
    """Frames on their way to the daemon: they leave in order, each whole before the next one begins.

    A *post* is a message without an answer. Posts may wait `POST_WAIT_S` and take `POST_BYTES` together;
    beyond that the connection has to be closed, which makes the daemon end its leases. Thread-safe, except
    that one thread at a time may be between `head` and `sent`.
    """

    def __init__(self) -> None:
        # Reentrant: a lease may be released by a finalizer that runs while its thread is in here.
        self._lock = threading.RLock()
        self._frames: deque[tuple[memoryview, float | None]] = deque()
        self._post_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, frame: bytes) -> None:
        """A request's frame, behind what waits."""
        self._frames.append((memoryview(frame), None))

    def post(self, frame: bytes, now_s: float) -> bool:
        """A post's frame, behind what waits. False if that is too much."""
        with self._lock:
            self._post_bytes += len(frame)
            self._frames.append((memoryview(frame), now_s))
            return self._post_bytes <= POST_BYTES

    def head(self) -> memoryview | None:
        """The bytes to send next, None if nothing waits."""
        with self._lock:
            return self._frames[0][0] if self._frames else None

    def sent(self, nbytes: int) -> None:
        """The first `nbytes` of the head are sent."""
        with self._lock:
            if not self._frames:
                return
            frame, posted_s = self._frames[0]
            self._post_bytes -= 0 if posted_s is None else nbytes
            if nbytes < len(frame):
                self._frames[0] = frame[nbytes:], posted_s
            else:
                self._frames.popleft()

    def waited_s(self, now_s: float) -> float:
        """How long the oldest post has been waiting; 0 if none is."""
        with self._lock:
            return next((now_s - posted_s for _, posted_s in self._frames if posted_s is not None), 0.0)

    def clear(self) -> None:
        """Forgets all that waits: the connection has ended."""
        with self._lock:
            self._frames.clear()
            self._post_bytes = 0


class ProtocolState:
    """What one connection knows. `send` and `receive` turn messages to bytes and back."""

    def __init__(self, token: str, maps: Maps) -> None:
        self.maps = maps
        self._namespaces: dict[_Name, _Opened] = {}
        self.batch_keys = 0
        self.reserve_keys = 0
        self.holds: set[int] = set()
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.version = m.VERSION
        self.outbox = Outbox()
        self._frames = Frames(1 << 30)
        self._token = token
        self._last_id = 0

    def namespace(self, name: _Name) -> _Opened | None:
        """What the daemon said when this namespace was opened; None if it is to be opened."""
        known = self._namespaces.pop(name, None)
        return None if known is None else self.opened(name, known)

    def opened(self, name: _Name, known: _Opened) -> _Opened:
        """Remembers that; fewer than the daemon does, so that no number is used that it has forgotten."""
        self._namespaces[name] = known
        if len(self._namespaces) > m.NAMESPACES // 2:
            del self._namespaces[next(iter(self._namespaces))]
        return known

    def hello(self) -> bytes:
        """The first bytes to send."""
        return pack(m.Hello(m.MAGIC, m.OLDEST, self._token, (m.VERSION,)))

    def welcome(self, message: Any) -> None:
        """Takes in the answer to hello. Raises RemoteProtocolError if the two cannot talk."""
        if not isinstance(message, m.Welcome):
            raise RemoteProtocolError(f"the daemon greets with {type(message).__name__}")
        if not m.OLDEST <= message.version <= m.VERSION:
            raise RemoteProtocolError(
                f"the daemon speaks version {message.version}, this client {m.span(m.OLDEST, m.VERSION)}"
            )
        self.version = message.version
        if message.instance != self.maps.instance:
            release = printable(message.release or "(older)")
            _log.info("connected to kvstore %s, version %d of the wire", release, message.version)
        self.batch_keys, self.reserve_keys = message.batch_keys, message.reserve_keys
        self.frame_bytes = message.frame_bytes
        self.maps = self.maps.of(message.instance)

    def send(self, message: Any) -> bytes:
        """The bytes of a message; a request gets its id here."""
        if hasattr(message, "id"):
            self._last_id += 1
            message.id = self._last_id
        return pack(message, self.frame_bytes, self.version)

    def post(self, message: Any) -> bytes:
        """The bytes of a message that needs no answer."""
        return pack(message, self.frame_bytes, self.version)

    def receive(self, data: bytes) -> Any:
        """The message that is complete with `data`, or None. Raises RemoteProtocolError at a Failure."""
        message = None
        for message in self._frames.feed(data):
            if isinstance(message, m.Failure):
                raise RemoteProtocolError(message.why, message.hint)
            if isinstance(message, m.Denied):
                # A namespace may have been taken back, or be there again: the next call opens it anew.
                self._namespaces.clear()
        return message
