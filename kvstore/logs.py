"""The log of a process on stderr: as text, or as a JSON object a line for programs that collect logs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_TEXT = "%(levelname)s %(message)s"


def start(level: str, form: str = "text") -> None:
    """Starts the log at `level`, such as "info". `form`: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, logger, message, process; and exception, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
