"""KV events on ZeroMQ, in vLLM's format: a thread of its own packs, sends, and repeats what was missed.

Frames are topic, sequence number (8 bytes, big-endian) and a MessagePack array: Unix time (s), events, rank.
An event is an array too, its name first: what Dynamo reads as well as llm-d. Who sends a sequence number to
the replay socket gets what has been kept from there on, and at last the number -1.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvstore.errors import ConfigError

_log = logging.getLogger(__name__)

_MOST_WAITING = 1024
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_UNSENT_BATCHES = 10_000
"""What may wait for a subscriber that does not read; what is more, it misses."""
_END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_WITHIN_S = 1.0


@dataclass(slots=True)
class Stored:
    """A chain of blocks is in a medium, each the parent of the next. `parent`: of the first one."""

    names: list[int]
    parent: int | None
    tokens: list[bytes]
    medium: str

    def takes(self, parent: int | None, medium: str, nbytes: int) -> bool:
        """Whether a block with so many bytes of tokens is the next one of this chain."""
        return parent == self.names[-1] and medium == self.medium and nbytes == len(self.tokens[0])

    def packed(self) -> list[Any]:
        """As it is sent: hashes, parent, tokens, tokens a block, adapter's number, medium, adapter's name."""
        tokens = np.frombuffer(b"".join(self.tokens), "<u4").tolist()
        size = len(self.tokens[0]) // 4
        return ["BlockStored", self.names, self.parent, tokens, size, None, self.medium, None]


@dataclass(slots=True)
class Removed:
    """Blocks are in a medium no longer."""

    names: list[int]
    medium: str

    def packed(self) -> list[Any]:
        """As it is sent."""
        return ["BlockRemoved", self.names, self.medium]


class Cleared:
    """Nothing that was said before holds."""

    def packed(self) -> list[Any]:
        """As it is sent."""
        return ["AllBlocksCleared"]


CLEARED = Cleared()
Event = Stored | Removed | Cleared


class Publisher:
    """One pair of sockets and their thread. Nothing that peers do holds up whoever calls `put`."""

    def __init__(self, listen: str, replay: str | None, subscribed: Callable[[], None]) -> None:
        """Binds both. ConfigError if they can't be bound, or pyzmq is missing.

        `subscribed` is called on the thread whenever somebody has subscribed.
        """
        try:
            import zmq  # noqa: PLC0415 - only who publishes needs it
        except ImportError:
            raise ConfigError("events.listen needs pyzmq", "pip install 'kvstore[events]'") from None
        self._zmq = zmq
        self._subscribed = subscribed
        self._queue: queue.Queue[tuple[str, list[Event]]] = queue.Queue(_MOST_WAITING)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        # Dynamo takes numbers that it has seen for repeated ones: another life of the daemon starts above.
        self._next = time.time_ns() // 1000
        self._counts = {"batches": 0, "stored": 0, "removed": 0, "dropped_batches": 0, "replays": 0}
        self._context = zmq.Context()
        self._out = self._bind(zmq.XPUB, "events.listen", listen)
        # So that of each subscriber is heard, not only of the first one.
        self._out.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = None if replay is None else self._bind(zmq.ROUTER, "events.replay", replay)
        self._address: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, key: str, address: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.LINGER, 0)
        # A replay is longer than what ZeroMQ lets wait by itself.
        made.setsockopt(self._zmq.SNDHWM, _UNSENT_BATCHES + 1)
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{key} = {address!r}: {error}", "another port or address") from None
        return made

    @property
    def address(self) -> str:
        """Where subscribers connect."""
        return self._address

    @property
    def waiting(self) -> int:
        """Batches that are not sent yet."""
        return self._queue.qsize()

    def put(self, topic: str, events: list[Event]) -> bool:
        """Sends a batch, soon; False if too many wait, and it is dropped."""
        try:
            self._queue.put_nowait((topic, events))
        except queue.Full:
            self._counts["dropped_batches"] += 1
            return False
        os.eventfd_write(self._wake, 1)
        return True

    def figures(self) -> dict[str, int]:
        """What has been sent so far."""
        return dict(self._counts)

    def close(self) -> None:
        """Sends what waits, and ends the thread; not longer than a second."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_WITHIN_S)

    # -- the thread

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for each in filter(None, (self._out, self._replay)):
            poller.register(each, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            try:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._out in ready:
                    self._hear()
                self._send_all()
                if self._replay in ready:
                    self._repeat()
            except (zmq.ZMQError, BlockingIOError):
                _log.exception("KV events: a peer has gone, or asks for what there is not")
        self._send_all()
        self._context.destroy(linger=int(_CLOSE_WITHIN_S * 500))

    def _hear(self) -> None:
        """Takes in who subscribes (1 and a topic) and who leaves (0 and a topic)."""
        if self._out.recv(self._zmq.NOBLOCK)[:1] == b"\x01":
            self._subscribed()

    def _send_all(self) -> None:
        while True:
            try:
                topic, events = self._queue.get_nowait()
            except queue.Empty:
                return
            for event in events:
                if not isinstance(event, Cleared):
                    self._counts["stored" if isinstance(event, Stored) else "removed"] += len(event.names)
            payload = msgpack.packb([time.time(), [event.packed() for event in events], 0])
            self._keep(payload)
            self._out.send_multipart([topic.encode(), self._number(self._next), payload], self._zmq.NOBLOCK)
            self._next += 1
            self._counts["batches"] += 1

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _repeat(self) -> None:
        """Answers one peer: all that is kept from the number on that it names."""
        assert self._replay is not None
        who, *rest = self._replay.recv_multipart(self._zmq.NOBLOCK)
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            return
        self._counts["replays"] += 1
        first = int.from_bytes(rest[1], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart([who, b"", self._number(number), payload], self._zmq.NOBLOCK)
        self._replay.send_multipart([who, b"", _END, b""], self._zmq.NOBLOCK)

    @staticmethod
    def _number(number: int) -> bytes:
        return number.to_bytes(8, "big")
