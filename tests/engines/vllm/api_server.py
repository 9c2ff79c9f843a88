"""vLLM's HTTP server with what makes the engines of tests quick. Its arguments are those of vLLM's own."""

from __future__ import annotations

from functools import partial
from time import sleep

from tests.engines.vllm import quick

quick.leave_functions_uncompiled()

from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.entrypoints.launchers.api_server import entry  # noqa: E402
from vllm.entrypoints.openai import api_server  # noqa: E402, F401
from vllm.v1.engine import coordinator, core  # noqa: E402, F401
from vllm.v1.worker import cpu_worker  # noqa: E402, F401

from kvstore_vllm import connector  # noqa: E402, F401

# See `serve`.
shm_broadcast.sched_yield = partial(sleep, 0.0005)


def main() -> None:
    """Serves until it is ended."""
    quick.fork_workers()
    entry.main()


if __name__ == "__main__":
    main()
