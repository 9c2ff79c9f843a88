"""Commands for a process in an engine's environment: JSON a line on stdin, answered by JSON a line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer_commands(target: Any) -> None:
    """Answers until stdin ends. A command names a method of `target` in `do`, and its keyword arguments."""
    # Answers have the real stdout, everything else goes where stderr goes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(target, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
