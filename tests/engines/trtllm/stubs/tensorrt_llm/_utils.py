"""A fake of TensorRT-LLM's MPI calls: each thread is a process of the group that `join` gives it."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Group(Protocol):
    """A group of processes, as one of them sees it. `rank`: its number."""

    rank: int

    def allgather(self, value: Any) -> list[Any]: ...


class Alone:
    """A group of one process."""

    rank = 0

    def allgather(self, value: Any) -> list[Any]:
        return [value]


_own = threading.local()


def join(group: Group) -> None:
    """Makes the calling thread a process of the group."""
    _own.group = group


def _group() -> Group:
    return getattr(_own, "group", Alone())


def mpi_rank() -> int:
    return _group().rank


def mpi_allgather(obj: Any) -> list[Any]:
    return _group().allgather(obj)


def mpi_broadcast(obj: Any, root: int = 0) -> Any:
    return _group().allgather(obj)[root]
