"""Worker processes of vLLM as forks of an engine's process, as it was before its first engine.

vLLM has each worker made by `spawn`: a new interpreter, which imports for a quarter of a minute. Here
multiprocessing's fork server does it, and is itself a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import context, forkserver, resource_tracker, spawn, util
from typing import Any

_data_for, _prepare = spawn.get_preparation_data, spawn.prepare


def fork_workers() -> None:
    """Makes the fork server. No other thread may run."""
    spawn.get_preparation_data, spawn.prepare = _data_and_environment, _prepare_with_environment
    context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]
    forkserver.set_forkserver_preload([])
    _start_server()


def _start_server() -> None:
    resource_tracker.ensure_running()
    launch, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = launch


def _fork(_: Any, command: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Runs Python code with these descriptors, and the standard ones, in a fork."""
    if pid := os.fork():
        return pid
    try:
        forkserver._forkserver._lock = threading.Lock()  # it is held here
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        keep = [2, *sorted(descriptors), 4096]
        for before, after in pairwise(keep):
            os.closerange(before + 1, after)
        exec(command[-1], {})
    finally:
        os._exit(1)


def _data_and_environment(name: str) -> dict[str, Any]:
    """A worker has the variables of the moment when it is made, not of the server."""
    return _data_for(name) | {"environment": dict(os.environ)}


def _prepare_with_environment(data: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    _prepare(data)
    _start_server()  # an engine core has workers of its own
