"""Runs SGLang engines of random models in SGLang's interpreter, with the store and without it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.engines import save
from bench.harness import Bench, NotDone
from tests.engines.environments import ROOT, environment, interpreter

_ANSWER_S = 300.0
_MODULE = "tests.engines.sglang.serve"


class Engines:
    """A process with engines, see `tests.engines.sglang.serve.Served`, whose methods are the commands."""

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
def engines(bench: Bench, model: dict[str, Any], url: str, **engine: Any) -> Iterator[Engines]:
    """Yields engines named `ours`, with the daemon at `url`, and `plain`. `engine`: options of both.

    HiCache is on in both, so a difference is the connector's. One thread of an engine computes.
    """
    bench.doing("environment")
    python = interpreter("sglang")
    with bench.scratch() as folder:
        save(folder, model)
        bench.doing("starting SGLang")
        with _process(python) as made:
            for name, daemon in (("ours", url), ("plain", None)):
                made("start", name=name, model=str(folder), url=daemon, engine=engine)
            yield made


@contextmanager
def _process(python: Path) -> Iterator[Engines]:
    stderr = sys.__stderr__.fileno() if sys.__stderr__ else None
    with subprocess.Popen(
        [str(python), "-m", _MODULE],
        cwd=ROOT,
        env=environment("sglang"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield Engines(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends its engines, and then itself
