"""Promises between a prefill and a decode engine, and loads that wait for them. The daemon is real."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore import Client, ExceptionBarrier, Layout
from kvstore_vllm import worker as worker_module
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.groups import Found, Group
from kvstore_vllm.handoff import Handoffs, TransferParams
from kvstore_vllm.messages import Load, Part, Step
from kvstore_vllm.metrics import Figures, Recorder
from kvstore_vllm.worker import GroupMemory, WorkerHalf
from tests.daemons import eventually, names
from tests.engines.vllm.test_halves import BLOCK_BYTES, BLOCK_TOKENS, NUM_BLOCKS, FakeRequest, half, step

PROMISE = {"do_remote_prefill": True}


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(model=request.node.name, block_bytes=BLOCK_BYTES)


class FilledPages:
    """Pages that note what is loaded, and when."""

    block_bytes = BLOCK_BYTES
    device = None
    at_once = 4

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def save(self, room: Any, first: int, block_ids: list[list[int]]) -> None:
        raise AssertionError("nothing is saved here")

    def load(self, lease: Any, first: int, block_ids: list[list[int]]) -> int:
        for [block_id] in block_ids:
            self.loaded.append(block_id)
        return len(block_ids)


@pytest.fixture
def pages() -> FilledPages:
    return FilledPages()


@pytest.fixture
def worker(client: Client, layout: Layout, pages: FilledPages) -> Iterator[WorkerHalf]:
    guard = ExceptionBarrier(logging.getLogger("test"))
    made = WorkerHalf(Daemons([client]), guard, [GroupMemory(pages, layout)], NUM_BLOCKS)
    yield made
    made.close()
    assert not guard.failures


def put(client: Client, layout: Layout, keys: list[bytes], parent: bytes | None = None) -> None:
    result = client.namespace(layout).put(keys, [bytes(BLOCK_BYTES)] * len(keys), parent=parent)
    assert result.stored == len(keys)


def ended(worker: WorkerHalf, wanted: set[str], within_s: float = 10.0) -> set[int]:
    """Waits for the end of these loads; the pages without bytes."""
    there: set[str] = set()
    bad: set[int] = set()
    ends = time.monotonic() + within_s
    while not wanted <= there:
        assert time.monotonic() < ends, f"only {there} have ended"
        there |= worker.ended()[0]
        bad |= worker.bad_blocks()
        time.sleep(0.005)
    return bad


def test_a_load_begins_before_the_last_block_is_stored(
    client: Client, layout: Layout, worker: WorkerHalf, pages: FilledPages
) -> None:
    keys = names(12)
    worker.load(Step(loads=[Load("r", [Part(0, keys, list(range(10, 22)))], waits=True)]))
    for at in range(0, 12, 3):
        assert worker.ended() == (set(), set())
        put(client, layout, keys[at : at + 3], keys[at - 1] if at else None)
        eventually(lambda at=at: pages.loaded == list(range(10, 10 + at + 3)))
    assert ended(worker, {"r"}) == set()
    assert Figures(worker.counts()).reduce() == {"loaded": 12}


def test_a_load_that_waits_ends_by_its_deadline_with_a_part(
    client: Client, layout: Layout, worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "deadline_s", 0.6)
    keys = names(4)
    put(client, layout, keys[:1])
    began = time.monotonic()
    worker.load(Step(loads=[Load("r", [Part(0, keys, [10, 11, 12, 13])], waits=True)]))
    assert ended(worker, {"r"}) == {11, 12, 13}
    assert 0.3 < time.monotonic() - began < 3
    assert Figures(worker.counts()).reduce() == {"loaded": 1, "lost": 3}


def test_other_loads_pass_those_that_wait(
    client: Client, layout: Layout, worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads beyond those that may wait load what is stored, at once."""
    monkeypatch.setattr(client, "deadline_s", 3.0)
    there = names(2, "there")
    put(client, layout, there)
    waiting = [
        Load(f"waits {i}", [Part(0, names(1, f"nowhere {i}"), [10 + i])], waits=True)
        for i in range(worker_module._WAITERS)
    ]
    began = time.monotonic()
    worker.load(Step(loads=waiting))
    more = [
        Load("waits too", [Part(0, [*there, *names(1, "nowhere")], [50, 51, 52])], waits=True),
        Load("ordinary", [Part(0, there, [60, 61])]),
    ]
    worker.load(Step(loads=more))
    assert ended(worker, {"waits too", "ordinary"}) == {52}
    assert time.monotonic() - began < 1.5
    # Those that waited leave their places to others.
    ended(worker, {load.request_id for load in waiting})
    put(client, layout, names(1, "first"))
    late = threading.Timer(0.3, put, (client, layout, names(1, "late")))
    late.start()
    worker.load(Step(loads=[Load("next", [Part(0, names(1, "late"), [70])], waits=True)]))
    assert ended(worker, {"next"}) == set()


def test_a_reset_ends_a_load_that_waits(
    client: Client, layout: Layout, worker: WorkerHalf, pages: FilledPages
) -> None:
    keys = names(2)
    worker.load(Step(loads=[Load("r", [Part(0, keys, [10, 11])], waits=True)]))
    worker.begin(Step(epoch="another"))
    put(client, layout, keys)
    assert ended(worker, {"r"}) == {10, 11}
    assert pages.loaded == []


# -- what is promised


def test_a_promise_is_awaited_once_and_what_is_stored_is_loaded_after_it(
    client: Client, layout: Layout
) -> None:
    made, keys = half(client, layout), names(4)
    put(client, layout, keys[:1])
    request = FakeRequest("r", keys, blocks=[10, 11, 12, 13], kv_transfer_params=PROMISE)
    assert made.matched(request, 0) == made.matched(request, 0) == 4 * BLOCK_TOKENS
    made.admit(request, request, 4 * BLOCK_TOKENS)
    [load] = step(made).loads
    assert load.waits
    assert load.parts == [Part(0, keys, [10, 11, 12, 13])]
    # Nothing of it came in time; vLLM asks again.
    assert made.matched(request, 0) == BLOCK_TOKENS
    made.admit(request, request, BLOCK_TOKENS)
    [load] = step(made).loads
    assert (load.waits, load.parts) == (False, [Part(0, keys[:1], [10])])
    assert made.matched(request, 0) == 0
    assert request.kv_transfer_params == PROMISE == {"do_remote_prefill": True}


def test_loaded_blocks_of_a_promise_are_not_saved_again(client: Client, layout: Layout) -> None:
    made, keys = half(client, layout), names(4)
    request = FakeRequest("r", keys, blocks=[10, 11, 12, 13], kv_transfer_params=PROMISE)
    made.admit(request, request, made.matched(request, 0))
    request.num_computed_tokens = 4 * BLOCK_TOKENS
    step(made, request)
    request.num_computed_tokens += 1
    assert step(made, request).saves == []


@pytest.mark.parametrize(
    ("params", "computed", "loaded"),
    [
        (PROMISE, 0, 4),
        (PROMISE, 64, 2),
        (PROMISE | {"remote_num_tokens": None}, 0, 4),
        (PROMISE | {"remote_num_tokens": 129}, 0, 4),
        (PROMISE | {"remote_num_tokens": 10**30}, 0, 4),
        (PROMISE | {"remote_num_tokens": 95}, 0, 2),
        (PROMISE | {"remote_num_tokens": 31}, 0, 1),
        (PROMISE | {"remote_num_tokens": 0}, 0, 1),
        ({"do_remote_prefill": False, "remote_num_tokens": 128}, 0, 1),
        ({"do_remote_decode": True, "remote_num_tokens": 128}, 0, 1),
        ({}, 0, 1),
        (None, 0, 1),
        # Without what cannot be read.
        (PROMISE | {"remote_num_tokens": 128.0}, 0, 1),
    ],
)
def test_what_is_loaded_by_the_parameters_of_a_request(
    client: Client, layout: Layout, params: Any, computed: int, loaded: int
) -> None:
    """Of four whole blocks, the first one is stored."""
    made, keys = half(client, layout), names(4)
    put(client, layout, keys[:1])
    request = FakeRequest("r", keys, kv_transfer_params=params)
    assert made.matched(request, computed) == loaded * BLOCK_TOKENS
    bad = isinstance((params or {}).get("remote_num_tokens"), float)
    assert made.counts().get("request_problems:bad_parameters", 0) == bad


def test_only_asynchronous_loads_wait(client: Client, layout: Layout) -> None:
    request = FakeRequest("r", names(4), kv_transfer_params=PROMISE)
    assert half(client, layout, asynchronous=False).matched(request, 0) == 0
    assert half(client, layout).matched(replace(request, skip_reading_prefix_cache=True), 0) == 0


@pytest.mark.parametrize(
    "params",
    [
        "text",
        ["do_remote_prefill"],
        {"do_remote_prefill": 1},
        {"do_remote_decode": "true"},
        {"remote_num_tokens": "12"},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": False},
        {"remote_num_tokens": 1.0},
    ],
    ids=str,
)
def test_wrong_types_are_told(params: Any) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params"):
        TransferParams.of(params)


def test_a_prefix_of_several_groups_ends_where_blocks_of_all_end() -> None:
    groups = [Group(0, ("a",), 32, 1, 1), Group(1, ("b",), 96, 1, 3, state=True)]
    handoffs = Handoffs(groups, 96, Recorder(), waits=True)
    request = FakeRequest("r", names(20), kv_transfer_params=PROMISE | {"remote_num_tokens": 600})
    promised = handoffs.expect(request, Found(96, [{0, 1, 2}, {0}]))
    assert promised == Found(576, [set(range(18)), {0}])
    assert handoffs.expect(request, Found(576, [set(range(18)), {5}])) is None


def test_only_what_is_stored_is_promised(client: Client, layout: Layout) -> None:
    def answer(request: FakeRequest, computed: int, **more: Any) -> Any:
        made = half(client, layout, **more)
        made.matched(request, 0)
        made.admit(request, request, 0)
        step(made, request)
        request.num_computed_tokens = computed
        return made.finish(request, request.get_block_ids())

    keys, decode = names(4), {"do_remote_decode": True}
    asked = FakeRequest("r", keys, blocks=[10, 11, 12, 13], kv_transfer_params=decode)
    promised = answer(replace(asked), 4 * BLOCK_TOKENS + 1)
    assert promised["remote_num_tokens"] == 4 * BLOCK_TOKENS + 1
    assert TransferParams.of(promised) == TransferParams(False, True, 4 * BLOCK_TOKENS + 1)
    assert answer(replace(asked), 0) is None
    assert answer(replace(asked, kv_transfer_params=None), 129) is None
    assert answer(replace(asked, kv_transfer_params=PROMISE), 129) is None
    images = replace(asked, mm_features=["image"])
    assert answer(images, 129, whole_inputs=True) is None
