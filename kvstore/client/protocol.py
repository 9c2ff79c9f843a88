"""Protocol state of one connection, without a socket: ids, handshake, frames to send, namespaces.

Not covered: sockets, threads and time (`connection`, `sync`, `aio`), mapped extents (`extents`).
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from kvstore.client.extents import Maps
from kvstore.errors import RemoteProtocolError, printable
from kvstore.types import MOST_TIERS, Key, Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import DEFAULT_FRAME_BYTES, Frames, pack

_log = logging.getLogger(__name__)


_Name = tuple[int, str, float]
"""A namespace as callers name it: the id of its layout, its owner, its TTL (s)."""

_Opened = tuple[int, bytes, Layout]
"""An open namespace: number on the connection, fingerprint, layout (kept so that its id stays unique)."""

POST_WAIT_S = 5.0
"""Longest time in seconds that a post waits in the outbox."""

POST_BYTES = 256 << 10
"""Most bytes of waiting posts of one connection."""

_KEYS_WAIT = 1024
"""Reports of blocks that were read wait while they have fewer keys."""

_MOST_BLOCKS = (1 << 32) - 1

TRACES_SINCE = 13
"""The version of the wire that introduced trace contexts."""


class Outbox:
    """Frames to send to the daemon, in order. Each frame is sent whole before the next one begins.

    A *post* is a message without an answer. Posts may wait for `POST_WAIT_S` and have `POST_BYTES` in total;
    beyond these limits the connection must be closed, so that the daemon ends its leases. Thread-safe,
    except that only one thread at a time may be between `head` and `sent`.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that releases a lease may run while its thread holds the lock.
        self._lock = threading.RLock()
        self._frames: deque[tuple[memoryview, float | None]] = deque()
        self._post_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, frame: bytes) -> None:
        """Appends the frame of a request."""
        self._frames.append((memoryview(frame), None))

    def post(self, frame: bytes, now_s: float) -> bool:
        """Appends the frame of a post. Returns False if waiting posts exceed `POST_BYTES`."""
        with self._lock:
            self._post_bytes += len(frame)
            self._frames.append((memoryview(frame), now_s))
            return self._post_bytes <= POST_BYTES

    def head(self) -> memoryview | None:
        """Returns the bytes to send next, None if no frame waits."""
        with self._lock:
            return self._frames[0][0] if self._frames else None

    def sent(self, nbytes: int) -> None:
        """Removes the first `nbytes` bytes of the head, which have been sent."""
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
        """Returns the seconds that the oldest post has waited, 0 if none waits."""
        with self._lock:
            return next((now_s - posted_s for _, posted_s in self._frames if posted_s is not None), 0.0)

    def clear(self) -> None:
        """Drops all frames."""
        with self._lock:
            self._frames.clear()
            self._post_bytes = 0


class Reports:
    """What the daemon is told of calls that needed no request, by number of the namespace. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant, as that of the outbox.
        self._lock = threading.RLock()
        self._lookups: dict[int, list[int]] = {}
        self._reads: dict[tuple[int, int], dict[Key, None]] = {}
        self._blocks = Counter[tuple[int, int]]()

    def add_lookup(self, namespace: int, asks: int, tiers: bytes) -> None:
        """Adds a lookup: of `asks` new blocks, and of blocks found in these tiers."""
        with self._lock:
            counts = self._lookups.setdefault(namespace, [0] * (MOST_TIERS + 1))
            counts[-1] += asks
            while tiers:
                rest = tiers.translate(None, tiers[:1])
                counts[tiers[0]] += len(tiers) - len(rest)
                tiers = rest

    def add_read(self, namespace: int, keys: Sequence[Key], key_bytes: int) -> bool:
        """Adds blocks that were read. Returns False if the reports have become too long to wait."""
        with self._lock:
            known = self._reads.setdefault((namespace, key_bytes), {})
            known.update(dict.fromkeys(keys))
            self._blocks[namespace, key_bytes] += len(keys)
            return len(known) < _KEYS_WAIT

    def take(self, batch_keys: int) -> list[Any]:
        """Returns the messages of all reports, which wait no longer."""
        if not self._lookups and not self._reads:
            return []
        with self._lock:
            lookups, reads, blocks = self._lookups, self._reads, self._blocks
            self._lookups, self._reads, self._blocks = {}, {}, Counter()
        messages: list[Any] = [
            m.LookedUp(namespace, asks, struct.pack(f"<{MOST_TIERS}I", *found))
            for namespace, (*found, asks) in lookups.items()
        ]
        for (namespace, size), known in reads.items():
            keys = b"".join(known)
            for at in range(0, len(keys), batch_keys * size):
                part = keys[at : at + batch_keys * size]
                n = blocks.pop((namespace, size), 0)  # all in the first message
                messages.append(m.BlocksRead(namespace, size, part, min(n, _MOST_BLOCKS)))
        return messages


class ProtocolState:
    """The state of one connection. `send` and `receive` convert messages to bytes and back.

    `leases`: the numbers of the connection's leases. `context`: trace id, span id and flags of the span of
    the running call; None: it is not traced.
    """

    def __init__(self, token: str, maps: Maps) -> None:
        self.maps = maps
        self._namespaces: dict[_Name, _Opened] = {}
        self.batch_keys = 0
        self.reserve_keys = 0
        self.leases: set[int] = set()
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.version = m.VERSION
        self.outbox = Outbox()
        self._frames = Frames(1 << 30)
        self._received: deque[Any] = deque()
        self._token = token
        self._last_id = 0
        self.context: tuple[bytes, bytes, int] | None = None
        self.reports = Reports()

    def namespace(self, name: _Name) -> _Opened | None:
        """Returns the open namespace of this name, None if it must be opened first."""
        known = self._namespaces.pop(name, None)
        return None if known is None else self.opened(name, known)

    def opened(self, name: _Name, known: _Opened) -> _Opened:
        """Keeps an open namespace; returns it. Keeps fewer than the daemon, which so knows all of them."""
        self._namespaces[name] = known
        if len(self._namespaces) > m.NAMESPACES // 2:
            del self._namespaces[next(iter(self._namespaces))]
        return known

    def hello(self) -> bytes:
        """Returns the first bytes to send."""
        return pack(m.Hello(m.MAGIC, m.OLDEST, self._token, (m.VERSION,)))

    def welcome(self, message: Any) -> None:
        """Processes the answer to hello. Raises RemoteProtocolError if there is no common version."""
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
        """Returns the bytes of a request, after waiting reports and its trace context. Sets its id."""
        self._last_id += 1
        message.id = self._last_id
        frame = pack(message, self.frame_bytes, self.version)
        if self.context is not None and self.version >= TRACES_SINCE:
            frame = pack(m.TraceContext(self._last_id, *self.context), version=self.version) + frame
        return self.reported() + frame

    def post(self, message: Any) -> bytes:
        """Returns the bytes of a message without an answer, after those of waiting reports."""
        return self.reported() + pack(message, self.frame_bytes, self.version)

    def reported(self) -> bytes:
        """Returns the bytes of the waiting reports, which wait no longer."""
        messages = self.reports.take(self.batch_keys)
        return b"".join(pack(each, self.frame_bytes, self.version) for each in messages)

    def receive(self, data: bytes) -> Any:
        """Returns the first message that is complete with `data` and not returned yet, or None.

        Raises RemoteProtocolError for a Failure, ConnectionResetError at the end of the stream (no data).
        """
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        self.maps.presence.heard()
        for message in self._frames.feed(data):
            if isinstance(message, m.Failure):
                raise RemoteProtocolError(message.why, message.hint)
            if isinstance(message, m.Denied):
                # A namespace may have been unpublished or deleted: the next call opens it again.
                self._namespaces.clear()
            self._received.append(message)
        return self.received()

    def received(self) -> Any:
        """Returns the first message that came together with an earlier one, or None."""
        return self._received.popleft() if self._received else None
