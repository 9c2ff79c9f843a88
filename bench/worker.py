"""Runs a process in the environment of an engine, which answers commands."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.harness import Bench, NotDone
from tests.engines.environments import ROOT, environment, interpreter

_ANSWER_S = 300.0


class Worker:
    """A process whose commands are the methods of a class, see `tests.engines.commands`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Runs a command and returns its result. Raises NotDone if it fails."""
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        commands.write(json.dumps({"do": do, **arguments}) + "\n")
        commands.flush()
        if not select.select([answers], [], [], _ANSWER_S)[0]:
            raise NotDone(f"{do}: no answer in {_ANSWER_S:g} s")
        answer = json.loads(answers.readline() or '{"error": "the process has ended"}')
        if "error" in answer:
            raise NotDone(f"{do}: {answer['error']}")
        return answer["result"]


@contextmanager
def worker(bench: Bench, engine: str) -> Iterator[Worker]:
    """Yields a process that runs `tests.engines.ENGINE.serve`. Makes the environment if it is not there."""
    bench.doing("environment")
    python = interpreter(engine)
    stderr = sys.__stderr__.fileno() if sys.__stderr__ else None
    with subprocess.Popen(
        [str(python), "-m", f"tests.engines.{engine}.serve"],
        cwd=ROOT,
        env=environment(engine),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield Worker(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends what it runs, and then itself
