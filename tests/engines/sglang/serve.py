"""Engines for benches, see `tests.engines.commands`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.engines.commands import answer_commands
from tests.engines.sglang.engine import Engine, hicache


class Served:
    """Engines by name, with the store or without it. Commands are the methods."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._engines: dict[str, Engine] = {}

    def start(self, name: str, model: str, url: str | None, engine: dict[str, Any]) -> None:
        """Starts an engine with HiCache. `url`: of the daemon; None: without it. `engine`: more options."""
        options = hicache(
            url or "unix:///none", deadline_s=None, weights_revision="random", engine={"load_format": "dummy"}
        )
        without = {} if url else {"hicache_storage_backend": None}
        self._engines[name] = self._stack.enter_context(Engine(Path(model), **options | without | engine))

    def generate(self, name: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Answers prompts with nothing in the engine's own caches, when all earlier ones are stored.

        Returns the tokens of the first prompt from any cache and from the store, and the seconds until all
        are answered.
        """
        engine = self._engines[name]
        engine.flush()
        began_s = time.monotonic()
        answers = engine.generate(prompts, max_new_tokens=tokens)
        answered_s = time.monotonic() - began_s
        return {"cached": answers[0].cached, "stored": answers[0].stored, "answered_s": answered_s}


def main() -> None:
    with ExitStack() as stack:
        answer_commands(Served(stack))


if __name__ == "__main__":
    main()
