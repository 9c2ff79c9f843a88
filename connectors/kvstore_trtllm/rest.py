"""A pause after a call that took its whole deadline: a daemon that hangs is not asked for every request."""

from __future__ import annotations

import time

from kvstore_trtllm.weights import logger

_REST_S = 5.0


class Rest:
    """Whether the daemon is asked at present. Thread-safe."""

    def __init__(self) -> None:
        self._ends_s = 0.0

    def is_on(self) -> bool:
        """Returns whether the pause lasts."""
        return time.monotonic() < self._ends_s

    def note(self, began_s: float, deadline_s: float) -> None:
        """Notes a call that has ended now. `began_s`: its begin by the monotonic clock."""
        now_s = time.monotonic()
        if now_s - began_s >= deadline_s:
            self._ends_s = now_s + _REST_S
            logger.warning("the daemon took the whole deadline: it is not asked for %g s", _REST_S)
