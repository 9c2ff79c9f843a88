"""Reads a peer's frames. A frame that does not end is bounded in time, and in bytes of its tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.daemon.server.connection_table import TenantBytes
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames

_FRAME_WITHIN_S = 10.0
_UNFINISHED_BYTES = 32 << 20
"""The most that the unfinished frames of a tenant take."""

STRANGERS_BYTES = 4096
"""The most that a frame of a stranger takes."""


class FrameReader:
    """Cuts what one connection receives into messages."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        unfinished: TenantBytes,
        held_up: Callable[[], bool],
        fail: Callable[[str, str], None],
    ) -> None:
        """`held_up` tells whether the daemon itself does not read on. `fail` ends the connection."""
        self._loop = loop
        self._unfinished = unfinished
        self._held_up = held_up
        self._fail = fail
        self._most_values = m.MOST_VALUES
        self._frames = Frames(STRANGERS_BYTES, self._decode)
        self._timer: asyncio.TimerHandle | None = None

    def greet(self, tenant: int, limit_bytes: int) -> None:
        """Sets the bounds of a greeted peer: frames of `limit_bytes` at most."""
        self._frames.limit_bytes = limit_bytes
        self._unfinished.tenant = tenant

    def allow(self, most_values: int) -> None:
        """Sets how many values the lists and maps of one message may have."""
        self._most_values = most_values

    def _decode(self, body: memoryview) -> Any:
        return m.decode_request(body, self._most_values)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that are complete. Raises RemoteProtocolError."""
        return self._frames.feed(data)

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._frames.unfinished

    def count(self) -> None:
        """Counts the bytes of the unfinished frame, and has it end in time."""
        nbytes = self._frames.waiting_bytes
        if nbytes and self._timer is None:
            self._timer = self._loop.call_later(_FRAME_WITHIN_S, self._look, self._frames.ended)
        before = self._unfinished.nbytes
        if nbytes == before:
            return
        of_tenant = self._unfinished.set(nbytes)
        if nbytes > before and of_tenant > _UNFINISHED_BYTES:
            why = f"frames of this tenant that have not ended take {of_tenant} bytes"
            self._fail(why, f"at most {_UNFINISHED_BYTES}")

    def _look(self, ended: int) -> None:
        """Fails if the frame that had begun when `ended` others had ended is still unfinished."""
        self._timer = None
        if not self._frames.unfinished:
            return
        if ended == self._frames.ended and not self._held_up():
            self._fail(f"a frame has not ended within {_FRAME_WITHIN_S:g} s", "send it in one go")
        else:
            self.count()

    def close(self) -> None:
        """Drops the unfinished frame."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._unfinished.set(0)
        # Bound methods close circles of references. Without them, memory is free before the collector runs.
        self._frames = Frames(STRANGERS_BYTES)
        del self._held_up, self._fail
