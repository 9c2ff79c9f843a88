"""What makes engines of tests start in half a second, and their shards and servers in two or three.

Tests start engines by the hundred, and vLLM takes seconds for each: it walks the objects of all imports nine
times to collect garbage, each worker is a new interpreter that imports for a quarter of a minute, and each
process compiles small functions. Models, kernels and what vLLM's processes tell each other stay as they are.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import context, forkserver, resource_tracker, spawn, util
from typing import Any

import torch

_collect, _freeze = gc.collect, gc.freeze
_compile = torch.compile
_data_for, _prepare = spawn.get_preparation_data, spawn.prepare


# -- garbage


def collect_between_engines_only() -> None:
    """From now on only `collect` collects: what is left of an engine would shut the next one down."""
    gc.collect = lambda generation=2: 0
    gc.freeze = gc.unfreeze = lambda: None
    gc.disable()
    collect()


def collect() -> None:
    """Collects until nothing more is freed. What is left is not walked again."""
    while _collect():
        pass
    _freeze()


# -- small functions, such as the count of larger logprobs


def leave_functions_uncompiled() -> None:
    """Call before vLLM is imported."""
    torch.compile = _compile_for_own_backends


def _compile_for_own_backends(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
    if backend != "inductor":
        return _compile(model, backend=backend, **options)
    return _same if model is None else model


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# -- processes


def fork_workers() -> None:
    """Makes vLLM's processes forks of this one as it is now. No other thread may run.

    Multiprocessing's fork server makes them, and is itself a fork.
    """
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
