"""The ranks of an engine meet at its start: they exchange the shapes of their pages, and open one memory.

Every rank takes part in every exchange, also one that refuses its pool. Otherwise the others would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorrt_llm._utils import mpi_allgather, mpi_rank

from kvstore.errors import ConfigError
from kvstore_trtllm.pages import Shape
from kvstore_trtllm.staging import Place, Staging

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine, as one of them sees them. `rank`: its number."""

    rank: int
    shapes: tuple[Shape, ...]
    staging: Staging


_MET: dict[int, Ranks] = {}
"""The ranks of engines whose scheduler half has not asked for them, by the id of the engine's options."""


def meet(
    llm_args: Any, shape: Callable[[], Shape], staging_bytes: int, prepare: Callable[[Ranks], None]
) -> None:
    """Returns when all ranks have called it. Raises a ConfigError of any of them, on all.

    `shape` returns the shape of this rank's pages, or raises. `prepare` is called with all ranks.
    """
    shapes = _exchange(shape)
    expected = llm_args.tensor_parallel_size
    if len(shapes) != expected:
        raise ConfigError(
            f"tensor_parallel_size is {expected}, and {len(shapes)} ranks have met",
            "one engine runs in a group of MPI processes",
        )
    rank, own = mpi_rank(), list[Staging]()

    def make() -> Place | None:
        if rank:
            return None
        own.append(Staging.make([each.page_bytes for each in shapes], staging_bytes))
        return own[0].place

    place = _exchange(make)[0]
    assert place is not None

    def join() -> None:
        ranks = Ranks(rank, tuple(shapes), own[0] if own else Staging.open(place))
        prepare(ranks)
        if rank == 0:
            _MET[id(llm_args)] = ranks

    _exchange(join)


def met(llm_args: Any) -> Ranks | None:
    """Returns the ranks to the scheduler half, which runs in the process of rank 0, once they have met."""
    return _MET.pop(id(llm_args), None)


def _exchange(make: Callable[[], T]) -> list[T]:
    """Returns what `make` returns on each rank. Raises a ConfigError of any of them, on all."""
    value: T | None = None
    problem: tuple[str, str] | None = None
    try:
        value = make()
    except ConfigError as error:
        problem = error.message, error.hint
    except Exception as error:
        problem = f"a rank failed: {error!r}", ""
    every: list[Any] = mpi_allgather((value, problem))
    for _, each in every:
        if each is not None:
            raise ConfigError(*each)
    return [each for each, _ in every]
