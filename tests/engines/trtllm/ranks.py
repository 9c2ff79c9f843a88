"""Groups of ranks for tests: threads, or processes, that exchange values as MPI does."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tensorrt_llm._utils import join

T = TypeVar("T")
WAIT_S = 30.0


class Threads:
    """A group whose processes are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._values, self._barrier = rank, values, barrier

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(WAIT_S)
        gathered = list(self._values)
        self._barrier.wait(WAIT_S)
        return gathered


class Processes:
    """A group of real processes. `links`: to the others by rank; rank 0 collects, and answers."""

    def __init__(self, rank: int, links: Sequence[Any]) -> None:
        self.rank, self._links = rank, links

    def allgather(self, value: Any) -> list[Any]:
        if self.rank:
            self._links[0].send(value)
            return list(_received(self._links[0]))
        gathered = [value, *(_received(link) for link in self._links)]
        for link in self._links:
            link.send(gathered)
        return gathered


def _received(link: Any) -> Any:
    assert link.poll(WAIT_S), "a rank does not answer"
    return link.recv()


def on_ranks(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Runs `work(rank)` on each rank of a new group of threads; returns the results by rank."""
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> T:
        join(Threads(rank, values, barrier))
        try:
            return work(rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        for future in futures:
            # The cause, and not a broken barrier of the others.
            if (error := future.exception()) and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


def in_processes(ranks: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """Runs `work(rank, *arguments)`, functions of modules, on each rank of a new group of processes."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(ranks - 1)]
    results = spawn.Queue()
    started = []
    for rank in range(ranks):
        links = [mine for mine, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
        process = spawn.Process(target=_in_process, args=(rank, links, results, work, arguments))
        process.start()
        started.append(process)
    try:
        got = dict(results.get(timeout=2 * WAIT_S) for _ in range(ranks))
    finally:
        for process in started:
            process.join(WAIT_S)
            process.kill()
        for link in (each for pair in pairs for each in pair):
            link.close()
        results.close()
    return [got[rank] for rank in range(ranks)]


def _in_process(rank: int, links: Any, results: Any, work: Callable[..., Any], arguments: Any) -> None:
    join(Processes(rank, links))
    results.put((rank, work(rank, *arguments)))
