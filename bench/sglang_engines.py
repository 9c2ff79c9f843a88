"""Runs SGLang engines of random models in SGLang's interpreter, with the store and without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.engines import save
from bench.harness import Bench
from bench.worker import Worker, worker


@contextmanager
def engines(bench: Bench, model: dict[str, Any], url: str, **engine: Any) -> Iterator[Worker]:
    """Yields a process with engines, see `tests.engines.sglang.serve.Served`.

    They are `ours`, with the daemon at `url`, and `plain`. `engine`: options of both. HiCache is on in both,
    so a difference is the connector's. One thread of an engine computes.
    """
    with bench.scratch() as folder:
        save(folder, model)
        with worker(bench, "sglang") as made:
            bench.doing("starting SGLang")
            for name, daemon in (("ours", url), ("plain", None)):
                made("start", name=name, model=str(folder), url=daemon, engine=engine)
            yield made
