"""Requests that wait for the core's answer, by the core's number."""

from __future__ import annotations

import logging
from typing import Any

from kvstore.core import actions as ac
from kvstore.daemon.runtime.ports import Requester

_log = logging.getLogger(__name__)


class PendingRequests:
    """Numbers requests. Passes each answer to its requester, under the requester's own number."""

    def __init__(self) -> None:
        self._requesters: dict[int, tuple[Requester, int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._requesters)

    def add(self, requester: Requester, request: int) -> int:
        """Returns a new number for a request."""
        self._last += 1
        self._requesters[self._last] = (requester, request)
        return self._last

    def forget(self, requester: Requester) -> None:
        """Drops a requester's answers that have not come."""
        for number in [n for n, (each, _) in self._requesters.items() if each is requester]:
            del self._requesters[number]

    def answer(self, action: Any) -> None:
        """Passes an answer to its requester. Refuses the request if the answer cannot be sent."""
        pending = self._requesters.pop(action.request, None)
        if pending is not None:
            requester, request = pending
            try:
                requester.answer(request, action)
            except Exception as error:
                _log.error("a request could not be answered", exc_info=error)
                requester.answer(request, ac.Deny(request, "internal error", "see the daemon's log"))
        elif isinstance(action, ac.Grant | ac.Reserved) and action.lease:
            _log.debug("an answer came after its requester had left")
