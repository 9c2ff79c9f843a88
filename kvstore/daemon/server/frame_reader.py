"""Splits a peer's bytes into frames. Bounds the time of a frame, and a tenant's unfinished frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvstore.daemon.server.connection_table import TenantBytes
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames

_FRAME_WITHIN_S = 10.0
_UNFINISHED_BYTES = 32 << 20
"""The most bytes in unfinished frames of a tenant."""

STRANGERS_BYTES = 4096
"""The most bytes in a frame of a stranger."""


class FrameReader:
    """Decodes the messages of one connection: `frames.feed`, then `count`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        unfinished: TenantBytes,
        held_up: Callable[[], bool],
        fail: Callable[[str, str], None],
    ) -> None:
        """`held_up` returns whether the daemon has paused reading. `fail` ends the connection."""
        self._loop = loop
        self._unfinished = unfinished
        self._held_up = held_up
        self._fail = fail
        self._most_values = m.MOST_VALUES
        self.frames = Frames(STRANGERS_BYTES, self._decode)
        self._timer: asyncio.TimerHandle | None = None

    def greet(self, tenant: int, limit_bytes: int) -> None:
        """Sets the bounds of a greeted peer: frames of `limit_bytes` at most."""
        self.frames.limit_bytes = limit_bytes
        self._unfinished.tenant = tenant

    def allow(self, most_values: int) -> None:
        """Sets the most values in lists and maps of one message."""
        self._most_values = most_values

    def _decode(self, body: memoryview) -> Any:
        return m.decode_request(body, self._most_values)

    def count(self) -> None:
        """Counts the bytes of the unfinished frame, and starts its timer."""
        nbytes = self.frames.waiting_bytes
        if nbytes and self._timer is None:
            self._timer = self._loop.call_later(_FRAME_WITHIN_S, self._look, self.frames.ended)
        before = self._unfinished.nbytes
        if nbytes == before:
            return
        of_tenant = self._unfinished.set(nbytes)
        if nbytes > before and of_tenant > _UNFINISHED_BYTES:
            why = f"frames of this tenant that have not ended take {of_tenant} bytes"
            self._fail(why, f"at most {_UNFINISHED_BYTES}")

    def _look(self, ended: int) -> None:
        """Fails if the frame after the first `ended` frames is still unfinished."""
        self._timer = None
        if not self.frames.unfinished:
            return
        if ended == self.frames.ended and not self._held_up():
            self._fail(f"a frame has not ended within {_FRAME_WITHIN_S:g} s", "send it in one go")
        else:
            self.count()

    def close(self) -> None:
        """Drops the unfinished frame."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._unfinished.set(0)
        # Bound methods make reference cycles. Without these, memory is freed before the collector runs.
        self.frames = Frames(STRANGERS_BYTES)
        del self._held_up, self._fail
