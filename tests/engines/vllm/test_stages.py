"""Pipeline stages: each has blocks of its own, and a block is there if every stage has it.

vLLM's CPU build does not run several stages, so no engine runs here. Requests and pages are fakes; the
halves, vLLM's sum of the workers' reports and the daemon are real.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstore import Client, ExceptionBarrier, Layout
from kvstore_vllm import KVStoreConnector
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.messages import Handshake, Progress, Step
from kvstore_vllm.scheduler import SchedulerHalf
from kvstore_vllm.worker import GroupMemory, WorkerHalf
from tests.daemons import eventually, names
from tests.engines.vllm.test_halves import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    NUM_BLOCKS,
    FakePages,
    FakeRequest,
    half,
    heard,
    step,
    store,
)


@dataclass
class Stage:
    """One worker, and its blocks."""

    layout: Layout
    pages: FakePages
    worker: WorkerHalf

    def begin(self, orders: Step) -> None:
        self.worker.begin(orders)
        self.worker.load(orders)
        self.worker.save(orders)

    def report(self) -> ModelRunnerOutput:
        """What this worker returns of a step."""
        loaded, failed = self.worker.ended()
        told = KVConnectorOutput(
            finished_recving=loaded,
            failed_recving=failed,
            invalid_block_ids=self.worker.bad_blocks(),
            kv_connector_worker_meta=Progress(self.worker.moved()),
        )
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told)


@pytest.fixture
def stages(client: Client, request: pytest.FixtureRequest) -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        made = []
        for i in range(2):
            layout = Layout(
                model=request.node.name,
                block_bytes=BLOCK_BYTES,
                block_tokens=BLOCK_TOKENS,
                shard=f"stage {i}",
            )
            pages, guard = FakePages(), ExceptionBarrier(logging.getLogger("test"))
            worker = WorkerHalf(Daemons([client]), guard, [GroupMemory(pages, layout)], NUM_BLOCKS)
            stack.callback(worker.close)
            stack.callback(pages.go_on.release, 100)
            made.append(Stage(layout, pages, worker))
        yield made


@pytest.fixture
def scheduler(client: Client, stages: list[Stage]) -> SchedulerHalf:
    """A scheduler that the workers' handshakes reached as vLLM passes them on."""
    made = half(client, stages[0].layout, named=False)
    connector: Any = SimpleNamespace(
        _guard=ExceptionBarrier(logging.getLogger("test")), _off="", _half=lambda: made
    )
    connector._meet = lambda told: KVStoreConnector._meet(connector, told)
    KVStoreConnector.set_xfer_handshake_metadata_pp_aware(
        connector, {(rank, 0): Handshake([stage.layout]) for rank, stage in reversed([*enumerate(stages)])}
    )
    assert connector._met
    assert not connector._guard.failures
    return made


Reports = Callable[[], KVConnectorOutput]


@pytest.fixture
def reports(stages: list[Stage]) -> Reports:
    """vLLM's sum of the reports of all stages."""
    aggregator = KVOutputAggregator(len(stages))

    def told() -> KVConnectorOutput:
        whole = aggregator.aggregate([stage.report() for stage in stages])
        assert whole is not None
        assert whole.kv_connector_output is not None
        return whole.kv_connector_output

    return told


def loading(client: Client, scheduler: SchedulerHalf, stages: list[Stage], request: FakeRequest) -> Step:
    """The step that loads a request's blocks, which all stages have stored."""
    for stage in stages:
        store(client, stage.layout, request.block_hashes)
    tokens = len(request.block_hashes) * BLOCK_TOKENS
    assert scheduler.matched(request, 0) == tokens
    scheduler.admit(request, request, tokens)
    return step(scheduler, request)


def test_every_stage_and_rank_is_asked() -> None:
    """With latent attention all ranks of a stage have the same blocks, which are asked for once."""
    for latent in (False, True):
        met: list[list[list[Layout]]] = []
        connector: Any = SimpleNamespace(
            _guard=ExceptionBarrier(logging.getLogger("test")),
            _off="",
            _half=lambda met=met: SimpleNamespace(meet=met.append),
        )
        connector._meet = lambda told, connector=connector: KVStoreConnector._meet(connector, told)
        layouts = {
            (stage, rank): Layout(
                model="m", block_bytes=64, shard=f"{stage}" if latent else f"{stage}/{rank}"
            )
            for stage, rank in product(range(2), range(2))
        }
        KVStoreConnector.set_xfer_handshake_metadata_pp_aware(
            connector, {rank: Handshake([layout]) for rank, layout in layouts.items()}
        )
        [asked] = met
        assert [layout.shard for [layout] in asked] == (
            ["0", "1"] if latent else ["0/0", "0/1", "1/0", "1/1"]
        )


@pytest.mark.parametrize("shorter", [0, 1])
def test_the_shortest_prefix_of_all_stages_is_found(
    client: Client, scheduler: SchedulerHalf, stages: list[Stage], shorter: int
) -> None:
    keys = names(5)
    for i, stage in enumerate(stages):
        store(client, stage.layout, keys[: 2 if i == shorter else 5])
    assert scheduler.matched(FakeRequest("r", keys), 0) == 2 * 32
    client.namespace(stages[1 - shorter].layout).invalidate(keys)
    assert scheduler.matched(FakeRequest("s", keys), 0) == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_fails_in_one_stage_is_computed_by_all(
    client: Client, scheduler: SchedulerHalf, stages: list[Stage], reports: Reports, failing: int
) -> None:
    keys = names(3)
    request = FakeRequest("r", keys, blocks=[11, 12, 13])
    orders = loading(client, scheduler, stages, request)
    # A page of FakePages with this number cannot be filled.
    [load] = orders.loads
    there = replace(load, parts=[replace(load.parts[0], block_ids=[11, 12, 14])])
    for i, stage in enumerate(stages):
        stage.begin(orders if i == failing else replace(orders, loads=[there]))
        # It is told once all stages have told it.
        eventually(lambda stage=stage: stage.worker.moved() == orders.number)
    told = reports()
    assert told.finished_recving == {"r"}
    assert told.invalid_block_ids == {13}
    scheduler.hear(told)
    # vLLM computes from the first page that some stage lacks; all stages save what it computes.
    request.num_computed_tokens = 2 * 32
    assert step(scheduler, request).saves == []
    request.num_computed_tokens = 3 * 32
    [save] = step(scheduler, request).saves
    assert (save.keys, save.parent, save.block_ids) == (keys[2:], keys[1], [13])


def test_a_request_waits_for_the_slower_stage(
    client: Client, scheduler: SchedulerHalf, stages: list[Stage], reports: Reports
) -> None:
    orders = loading(client, scheduler, stages, FakeRequest("r", names(3), blocks=[1, 2, 3]))
    stages[0].begin(orders)
    eventually(lambda: stages[0].worker.moved() == orders.number)
    assert not reports().finished_recving
    stages[1].begin(orders)
    eventually(lambda: stages[1].worker.moved() == orders.number)
    assert reports().finished_recving == {"r"}


def test_pages_are_kept_until_the_slower_stage_has_saved_them(
    client: Client, scheduler: SchedulerHalf, stages: list[Stage], reports: Reports
) -> None:
    keys = names(2)
    request = FakeRequest("r", keys, blocks=[5, 6])
    assert scheduler.matched(request, 0) == 0
    scheduler.admit(request, request, 0)
    step(scheduler, request)
    request.num_computed_tokens = 2 * 32
    orders = step(scheduler, request)
    for stage in stages:
        stage.begin(orders)
    stages[0].pages.go_on.release(2)
    eventually(lambda: stages[0].worker.moved() == orders.number)
    scheduler.hear(reports())
    assert scheduler._manager.held() == [5, 6]
    found = FakeRequest("s", keys)
    assert scheduler.matched(found, 0) == 0, "the second stage has nothing yet"
    stages[1].pages.go_on.release(2)
    eventually(lambda: stages[1].worker.moved() == orders.number)
    scheduler.hear(reports())
    assert scheduler._manager.held() == []
    heard(scheduler, orders.number)
    assert scheduler.matched(FakeRequest("t", keys), 0) == 2 * 32
