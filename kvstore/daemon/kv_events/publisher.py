"""Publishes KV events on ZeroMQ in vLLM's format. A thread packs, sends and repeats batches.

Frames are topic, sequence number (8 bytes, big-endian) and a MessagePack array: Unix time (s), events, rank.
An event is an array that begins with its name. Dynamo and llm-d read this form. A peer that sends a sequence
number to the replay socket gets the kept batches from this number on, and at last the number -1.
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
from kvstore.wire.messages import PACKER_BYTES

_log = logging.getLogger(__name__)

_MOST_WAITING = 1024
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_UNSENT_BATCHES = 10_000
"""The most batches that wait for a slow subscriber. It misses further ones."""
_END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_WITHIN_S = 1.0


@dataclass(slots=True)
class Stored:
    """A chain of blocks is in a medium. `parent`: of the first block."""

    names: list[int]
    parent: int | None
    tokens: list[bytes]
    medium: str

    def takes(self, parent: int | None, medium: str, nbytes: int) -> bool:
        """Returns whether a block with `nbytes` of tokens is the next one of this chain."""
        return parent == self.names[-1] and medium == self.medium and nbytes == len(self.tokens[0])

    def packed(self) -> list[Any]:
        """Returns the wire form: hashes, parent, tokens, tokens per block, adapter's id, medium, adapter."""
        tokens = np.frombuffer(b"".join(self.tokens), "<u4").tolist()
        size = len(self.tokens[0]) // 4
        return ["BlockStored", self.names, self.parent, tokens, size, None, self.medium, None]


@dataclass(slots=True)
class Removed:
    """Blocks are no longer in a medium."""

    names: list[int]
    medium: str

    def packed(self) -> list[Any]:
        """Returns the wire form."""
        return ["BlockRemoved", self.names, self.medium]


class Cleared:
    """All earlier events are void."""

    def packed(self) -> list[Any]:
        """Returns the wire form."""
        return ["AllBlocksCleared"]


CLEARED = Cleared()
Event = Stored | Removed | Cleared


class Publisher:
    """One pair of sockets and their thread. Peers never delay a caller of `put`.

    `address`: for subscribers. `counts`: events and batches sent, dropped and replayed.
    """

    def __init__(self, listen: str, replay: str | None, subscribed: Callable[[], None]) -> None:
        """Binds both sockets. Raises ConfigError if this fails, or without pyzmq.

        `subscribed` is called on the thread after each subscription.
        """
        try:
            import zmq  # noqa: PLC0415  optional
        except ImportError:
            raise ConfigError("events.listen needs pyzmq", "pip install 'kvstore[events]'") from None
        self._zmq = zmq
        self._subscribed = subscribed
        self._queue: queue.Queue[tuple[str, list[Event]]] = queue.Queue(_MOST_WAITING)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        # Dynamo takes known numbers for repeated batches: numbers are larger after a restart.
        self._next = time.time_ns() // 1000
        self.counts = {"batches": 0, "stored": 0, "removed": 0, "dropped_batches": 0, "replays": 0}
        self._context = zmq.Context()
        self._out = self._bind(zmq.XPUB, "events.listen", listen)
        # Reports each subscriber, not only the first one of a topic.
        self._out.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = None if replay is None else self._bind(zmq.ROUTER, "events.replay", replay)
        self.address: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, key: str, address: str) -> Any:
        bound = self._context.socket(kind)
        bound.setsockopt(self._zmq.LINGER, 0)
        # A replay is longer than ZeroMQ's default limit.
        bound.setsockopt(self._zmq.SNDHWM, _UNSENT_BATCHES + 1)
        try:
            bound.bind(address)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{key} = {address!r}: {error}", "another port or address") from None
        return bound

    @property
    def waiting(self) -> int:
        """The number of batches that are not sent yet."""
        return self._queue.qsize()

    def put(self, topic: str, events: list[Event]) -> bool:
        """Queues a batch. Drops it and returns False if too many wait."""
        try:
            self._queue.put_nowait((topic, events))
        except queue.Full:
            self.counts["dropped_batches"] += 1
            return False
        os.eventfd_write(self._wake, 1)
        return True

    def close(self) -> None:
        """Sends waiting batches and ends the thread. Waits at most 1 s."""
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
                # A message is 1 and a topic for a subscription, 0 and a topic for its end.
                if self._out in ready and self._out.recv(zmq.NOBLOCK)[:1] == b"\x01":
                    self._subscribed()
                self._send_all()
                if self._replay in ready:
                    self._answer_replay()
            except (zmq.ZMQError, BlockingIOError):
                _log.exception("KV events: a peer has disconnected, or its request cannot be answered")
        self._send_all()
        self._context.destroy(linger=int(_CLOSE_WITHIN_S * 500))

    def _send_all(self) -> None:
        while True:
            try:
                topic, events = self._queue.get_nowait()
            except queue.Empty:
                return
            for event in events:
                if not isinstance(event, Cleared):
                    self.counts["stored" if isinstance(event, Stored) else "removed"] += len(event.names)
            packed = [event.packed() for event in events]
            payload = msgpack.packb([time.time(), packed, 0], buf_size=PACKER_BYTES)
            self._keep(payload)
            self._out.send_multipart([topic.encode(), _packed(self._next), payload], self._zmq.NOBLOCK)
            self._next += 1
            self.counts["batches"] += 1

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_replay(self) -> None:
        """Sends one peer all kept batches from the requested number on."""
        assert self._replay is not None
        peer, *rest = self._replay.recv_multipart(self._zmq.NOBLOCK)
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            return
        self.counts["replays"] += 1
        first = int.from_bytes(rest[1], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart([peer, b"", _packed(number), payload], self._zmq.NOBLOCK)
        self._replay.send_multipart([peer, b"", _END, b""], self._zmq.NOBLOCK)


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "big")
