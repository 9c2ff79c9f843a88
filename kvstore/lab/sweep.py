"""Replays one workload with many policies and capacities, or fleets of nodes, in several processes.

The workload is written to a file once and mapped by every process. A second mapped file has the progress of
each replay, and after these a flag that stops all replays.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.key_batch import Keys
from kvstore.errors import KVStoreError
from kvstore.lab.capacity import Capacities
from kvstore.lab.hybrid import Hybrid, HybridNode
from kvstore.lab.report import Point
from kvstore.lab.simulated_node import SimulatedNode, keys_of
from kvstore.lab.workload import Workload

Progress = Callable[[int], None]
"""Called about five times a second with the number of accesses done, over all replays."""

_LOOK_EVERY_S = 0.2
_DAY_S = 86400.0
_Done = npt.NDArray[np.int64]
_TaskT = TypeVar("_TaskT")
_ResultT = TypeVar("_ResultT")
_Play = Callable[[Workload, _TaskT, Progress | None], _ResultT]


@dataclass(frozen=True, slots=True)
class Task:
    """One replay. `capacity` is the text of `capacities`; `options` are arguments of Placement.

    `model` None: full attention only.
    """

    policy: str
    capacity: str
    capacities: Capacities
    block_bytes: int
    options: dict[str, Any] = field(default_factory=dict)
    model: Hybrid | None = None

    def node(self, block_tokens: int) -> SimulatedNode:
        """Returns an empty node."""
        options = {"policy": self.policy, **self.options}
        if self.model is None:
            return SimulatedNode(self.capacities, self.block_bytes, options)
        return HybridNode(self.capacities, self.block_bytes, self.model, block_tokens, options)


def run(
    workload: Workload, tasks: Sequence[Task], processes: int, progress: Progress | None = None
) -> list[Point]:
    """Replays every task in up to `processes` processes, with one in the caller's. Returns one point a task.

    Raises KVStoreError if a process dies.
    """
    return run_all(replay, workload, tasks, processes, progress)


def run_all(
    play: _Play[_TaskT, _ResultT],
    workload: Workload,
    tasks: Sequence[_TaskT],
    processes: int,
    progress: Progress | None = None,
) -> list[_ResultT]:
    """Calls `play` with the workload and every task, as `run` does. Returns one result a task.

    `play` is a function of a module. It calls its third argument with its own number of accesses done.
    """
    if processes <= 1 or len(tasks) <= 1:
        return _run_here(play, workload, tasks, progress)
    with tempfile.TemporaryDirectory(prefix="kvstore-lab-") as name:
        folder = Path(name)
        workload.save(folder)
        np.save(folder / "done.npy", np.zeros(len(tasks) + 1, np.int64))
        done = np.load(folder / "done.npy", mmap_mode="r+")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(tasks)), context, _end_with_parent) as pool:
            try:
                with _safe_path():
                    futures = [pool.submit(_run_there, play, folder, i, task) for i, task in enumerate(tasks)]
                return _collect(futures, done[:-1], progress)
            finally:
                done[-1] = 1
                pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keeps Python processes that start in this context from importing from the working directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]


def _collect(futures: list[Future[_ResultT]], done: _Done, progress: Progress | None) -> list[_ResultT]:
    waiting = set(futures)
    while waiting:
        ended, waiting = wait(waiting, _LOOK_EVERY_S)
        for future in ended:
            if (error := future.exception()) is not None:
                if isinstance(error, BrokenProcessPool):
                    hint = "out of memory? fewer --processes take less"
                    raise KVStoreError("a process of the lab died", hint) from None
                raise error
        if progress is not None:
            progress(int(done.sum()))
    return [future.result() for future in futures]


def _run_here(
    play: _Play[_TaskT, _ResultT], workload: Workload, tasks: Sequence[_TaskT], progress: Progress | None
) -> list[_ResultT]:
    done = np.zeros(len(tasks), np.int64)
    return [
        play(workload, task, None if progress is None else partial(_tell_sum, progress, done, number))
        for number, task in enumerate(tasks)
    ]


def _tell_sum(progress: Progress, done: _Done, number: int, accesses: int) -> None:
    done[number] = accesses
    progress(int(done.sum()))


def _end_with_parent() -> None:
    """Ends this process when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="kvstore-lab-parent", daemon=True).start()


def _run_there(play: _Play[_TaskT, _ResultT], folder: Path, number: int, task: _TaskT) -> _ResultT:
    done = np.load(folder / "done.npy", mmap_mode="r+")

    def tell(accesses: int) -> None:
        done[number] = accesses
        if done[-1]:
            raise KVStoreError("stopped: another replay failed, or the lab was interrupted")

    return play(Workload.load(folder), task, tell)


def replay(workload: Workload, task: Task, progress: Progress | None = None) -> Point:
    """Replays a workload on an empty node."""
    node = task.node(workload.block_tokens)
    keys = keys_of(np.arange(workload.unique_blocks))
    starts, times_s = workload.starts.tolist(), workload.times_s.tolist()
    begin, told = time.perf_counter(), 0.0
    for i, now in enumerate(times_s):
        prompt = keys[workload.blocks[starts[i] : starts[i + 1]]]
        node.prompt(Keys(prompt.tobytes(), prompt.itemsize), now)
        if progress is not None and (at := time.perf_counter()) - told > _LOOK_EVERY_S:
            progress(starts[i + 1])
            told = at
    wall_s = time.perf_counter() - begin
    if progress is not None:
        progress(workload.accesses)
    return _point(workload, task, node, wall_s)


def _point(workload: Workload, task: Task, node: SimulatedNode, wall_s: float) -> Point:
    tiers = {c.tier.name.lower(): c for c in task.capacities}
    hits = {name: int(node.hits[c.tier]) for name, c in tiers.items()}
    counters, served = node.placement.view.counters, sum(hits.values())
    written_bytes, served_bytes = counters["written_blocks"] * task.block_bytes, served * task.block_bytes
    written = dict.fromkeys([*tiers][1:], written_bytes)
    nbytes = {name: c.nbytes(task.block_bytes) for name, c in tiers.items()}
    days = workload.duration_s / _DAY_S
    return Point(
        policy=task.policy,
        capacity=task.capacity,
        blocks_by_tier={name: c.blocks(task.block_bytes) for name, c in tiers.items()},
        bytes_by_tier=nbytes,
        hit_ratio=served * workload.block_tokens / max(1, int(workload.input_tokens.sum())),
        block_hit_ratio=served / max(1, workload.accesses),
        hits_by_tier=hits,
        share_by_tier={name: n / max(1, served) for name, n in hits.items()},
        stored_blocks=counters["stored_blocks"],
        evicted_blocks=counters["evicted_copies"] + counters["dropped_blocks"],
        denied_blocks=node.denied,
        written_bytes_by_tier=written,
        written_per_served={name: n / served_bytes for name, n in written.items()} if served else None,
        drive_writes_per_day=written["nvme"] / nbytes["nvme"] / days if "nvme" in written and days else None,
        wall_s=wall_s,
        accesses_per_s=workload.accesses / max(wall_s, 1e-9),
    )
