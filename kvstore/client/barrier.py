"""An exception barrier between the hooks of a connector and its engine: a failed hook is a miss.

Not covered: the value of the miss, which the hook returns after its `with` block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ExceptionBarrier:
    """Counts failures per hook in `failures`. Logs at most one per `every_s` seconds, with their number.

        with barrier("lookup"):
            return ns.lookup(keys)
        return 0

    `clock` gives monotonic seconds. Thread-safe.
    """

    def __init__(
        self, logger: logging.Logger, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._silent_until_s = -1.0
        self._unlogged = 0

    @contextmanager
    def __call__(self, hook: str) -> Iterator[None]:
        """Suppresses and counts exceptions of the block, but not KeyboardInterrupt and the like."""
        try:
            yield
        except Exception as error:
            self._failed(hook, error)

    def _failed(self, hook: str, error: Exception) -> None:
        with self._lock:
            self.failures[hook] += 1
            self._unlogged += 1
            if self._clock() < self._silent_until_s:
                return
            self._silent_until_s = self._clock() + self._every_s
            count, self._unlogged = self._unlogged, 0
        self._logger.warning(
            "%s failed and counts as a miss (%d since the last such line): %s",
            hook, count, error, exc_info=error,
        )  # fmt: skip
