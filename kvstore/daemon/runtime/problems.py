"""The daemon's problems, for the log and for `kvstore status`."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Problems(list[str]):
    """Problems by age, each once."""

    def report(self, problem: str) -> None:
        """Logs a problem and keeps it. Has no effect on a problem that is kept already."""
        if problem not in self:
            _log.error("%s", problem)
            self.append(problem)
