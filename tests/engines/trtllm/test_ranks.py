"""Tensor parallelism: each rank has pages of its own. A prefix counts as far as all ranks have it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorrt_llm._utils import mpi_rank

from kvstore import chain_keys
from kvstore.errors import ConfigError
from kvstore_trtllm.pages import Pages
from kvstore_trtllm.staging import Staging
from tests.engines.trtllm.conftest import alter, answers, llm_args, prompt
from tests.engines.trtllm.executor import FakeExecutor
from tests.engines.trtllm.ranks import in_processes, on_ranks

PROMPT = prompt(0, 43)


def run_one(model: Path, ranks: int, *prompts: list[int], **how: Any) -> list[tuple[Any, ...]]:
    """Runs prompts on a new engine. Returns of each rank its requests, and the bytes of their pages."""

    def work(rank: int) -> tuple[Any, ...]:
        executor = FakeExecutor(llm_args(model, tensor_parallel_size=ranks), **how)
        try:
            requests = executor.run(*prompts)
            executor.settle()
            return requests, [[executor.page(i) for i in each.block_ids] for each in requests]
        finally:
            executor.close()

    return on_ranks(ranks, work)


@pytest.mark.usefixtures("options")
def test_every_rank_loads_its_own_pages(model: Path) -> None:
    first, second = run_one(model, 2, PROMPT), run_one(model, 2, PROMPT)
    for (stored, pages), (loaded, other) in zip(first, second, strict=True):
        assert [request.matched for request in loaded] == [40]
        assert answers(loaded) == answers(stored)
        assert other == pages
    assert first[0][1] != first[1][1], "ranks have other bytes"


@pytest.mark.usefixtures("options")
def test_another_number_of_ranks_shares_nothing(model: Path) -> None:
    run_one(model, 2, PROMPT)
    [(requests, _)] = run_one(model, 1, PROMPT)
    assert requests[0].matched == 0


@pytest.mark.usefixtures("options")
def test_a_prefix_that_one_rank_lacks_is_not_promised(model: Path) -> None:
    run_one(model, 2, PROMPT)

    def work(rank: int) -> list[int]:
        executor = FakeExecutor(llm_args(model, tensor_parallel_size=2))
        try:
            executor.run([1])
            if executor.scheduler is not None:
                keys = stored_keys(executor)
                assert executor.scheduler._namespaces[1].invalidate(keys[6:]) == 4
            [request] = executor.run(PROMPT)
            executor.settle()
            return [request.matched, *request.answer]
        finally:
            executor.close()

    run = on_ranks(2, work)
    [(again, _), _] = run_one(model, 2, PROMPT)
    assert again[0].matched == 40, "the rank has stored again what it lacked"
    assert run[0] == run[1] == [24, *again[0].answer]


@pytest.mark.usefixtures("options")
def test_a_block_that_one_rank_cannot_read_is_not_promised(model: Path) -> None:
    """The question finds it on all ranks; its bytes are damaged on one."""
    expected = answers(run_one(model, 2, PROMPT)[0][0])

    def work(rank: int) -> tuple[int, list[list[int]]]:
        executor = FakeExecutor(llm_args(model, tensor_parallel_size=2))
        try:
            executor.run([1])
            if executor.scheduler is not None:
                alter(executor.scheduler._namespaces[1], stored_keys(executor), 6)
            [request] = executor.run(PROMPT)
            return request.matched, [request.answer]
        finally:
            executor.close()

    assert on_ranks(2, work) == [(24, expected)] * 2


def stored_keys(executor: FakeExecutor) -> list[bytes]:
    return chain_keys(PROMPT[:40], executor.tokens)


@pytest.mark.usefixtures("options")
def test_one_rank_that_refuses_its_pool_ends_the_start_of_all(model: Path) -> None:
    seen: dict[int, str] = {}

    def work(rank: int) -> None:
        shape = (8, 2, 2, 64) if rank else (8, 2, 2, 32)
        try:
            FakeExecutor(
                llm_args(model, tensor_parallel_size=2), pool=torch.zeros(shape, dtype=torch.bfloat16)
            )
        except ConfigError as error:
            seen[rank] = str(error)

    on_ranks(2, work)
    assert seen[0] == seen[1]
    assert "the KV pool has the shape (8, 2, 2, 64)" in seen[0]


@pytest.mark.usefixtures("options")
def test_one_rank_without_memory_ends_the_start_of_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with page-locked memory, which the system limits."""
    seen: dict[int, str] = {}
    allocate = Pages.host_memory

    def work(rank: int) -> None:
        try:
            FakeExecutor(llm_args(model, tensor_parallel_size=2))
        except ConfigError as error:
            seen[rank] = str(error)

    def host_memory(pages: Pages, rows: int) -> torch.Tensor:
        if mpi_rank():
            raise RuntimeError("out of memory")
        return allocate(pages, rows)

    monkeypatch.setattr(Pages, "host_memory", host_memory)
    on_ranks(2, work)
    assert seen[0] == seen[1] == "a rank failed: RuntimeError('out of memory')"


@pytest.mark.usefixtures("options")
def test_fewer_processes_than_ranks(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4, and 1 ranks have met"):
        FakeExecutor(
            llm_args(model, tensor_parallel_size=4), pool=torch.zeros(8, 2, 2, 32, dtype=torch.bfloat16)
        )


def test_ranks_on_another_node_cannot_open_the_memory(tmp_path: Path) -> None:
    made = Staging.make([4096, 4096], 1 << 20)
    try:
        with pytest.raises(ConfigError, match=r"cannot open the memory of rank 0: .*one node"):
            Staging.open(replace(made.place, path=str(tmp_path / "missing")))
        (tmp_path / "other").write_bytes(bytes(made.place.nbytes))
        with pytest.raises(ConfigError, match=r"other memory than that of rank 0"):
            Staging.open(replace(made.place, path=str(tmp_path / "other")))
        other = Staging.open(made.place)
        made.part(1)[3] = 7
        assert (other.part(1)[3] == 7).all()
        other.ended(0, 5)
        assert made.done == 0
        other.ended(1, 4)
        assert made.done == 4
    finally:
        made.close()


def engine_of_a_process(rank: int, model: Path, options: str) -> tuple[int, list[int], int]:
    os.environ["TRTLLM_KVSTORE"] = options
    executor = FakeExecutor(llm_args(model, tensor_parallel_size=2))
    try:
        [request] = executor.run(PROMPT)
        executor.settle()
        return request.matched, request.answer, sum(executor.worker.failures.values())
    finally:
        executor.close()


@pytest.mark.usefixtures("options")
def test_ranks_in_processes_of_their_own(model: Path) -> None:
    given = os.environ["TRTLLM_KVSTORE"]
    first = in_processes(2, engine_of_a_process, model, given)
    second = in_processes(2, engine_of_a_process, model, given)
    assert [each[0] for each in first + second] == [0, 0, 40, 40]
    assert len({tuple(each[1]) for each in first + second}) == 1
    assert not any(each[2] for each in first + second)
