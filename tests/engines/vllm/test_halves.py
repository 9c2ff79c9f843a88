"""Moments that a running engine can't be stopped at: what is saved when, and who may overwrite what.

Requests and pages are fakes with only what the halves look at; the daemon is real.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvstore import Client, ExceptionBarrier, Layout, Namespace
from kvstore_vllm import KVStoreConnector
from kvstore_vllm import adapters as adapters_module
from kvstore_vllm.adapters import Adapters
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.groups import Group
from kvstore_vllm.messages import Load, Part, Progress, Save, Step
from kvstore_vllm.metrics import Figures
from kvstore_vllm.scheduler import SchedulerHalf
from kvstore_vllm.worker import GroupMemory, WorkerHalf
from tests.daemons import eventually, names

BLOCK_TOKENS, BLOCK_BYTES, NUM_BLOCKS = 32, 4096, 100


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(model=request.node.name, block_bytes=BLOCK_BYTES)


@dataclass
class FakeRequest:
    """What the scheduler's half reads of vLLM's Request."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    blocks: list[int] = field(default_factory=list)
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    kv_transfer_params: Any = None
    kv_hints: Any = None
    answer_tokens: int = 0
    resumable: bool = False
    trace_headers: Any = None

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens - self.answer_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS + 1

    def get_block_ids(self) -> tuple[list[int]]:
        return (self.blocks,)


class FakeManager:
    """vLLM's manager of pages, as far as one group of full attention needs it: it counts references."""

    def __init__(self) -> None:
        self.evicted: list[set[int]] = []
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=1) for i in range(NUM_BLOCKS)]
        self.block_pool = self
        self.coordinator = SimpleNamespace(block_pool=self, single_type_managers=())
        self.hash_block_size = BLOCK_TOKENS
        self.null_block = self.blocks[0]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)

    def held(self) -> list[int]:
        """The pages with a reference beside that of their request."""
        return [block.block_id for block in self.blocks if block.ref_cnt > 1]


GROUP = Group(0, ("layer",), BLOCK_TOKENS, 1, 1)


def half(
    client: Client, layout: Layout, asynchronous: bool = True, named: bool = True, **more: Any
) -> SchedulerHalf:
    guard = ExceptionBarrier(logging.getLogger("test"))
    given = {"loads": True, "saves": True, "lookup_deadline_s": 0.05} | more
    made = SchedulerHalf(Daemons([client]), guard, [GROUP], BLOCK_TOKENS, asynchronous, **given)
    made.bind(FakeManager())
    if named:
        made.meet([[layout]])
    return made


def heard(made: SchedulerHalf, number: int = 0, invalid: Iterable[int] = ()) -> None:
    """The workers' report: transfers up to a step have ended, and pages were not filled."""
    made.hear(SimpleNamespace(invalid_block_ids=set(invalid), kv_connector_worker_meta=Progress(number)))


def step(made: SchedulerHalf, *requests: FakeRequest, preempted: tuple[str, ...] = ()) -> Step:
    """One step in which these requests compute, before its output is there."""
    by_id = {request.request_id: request for request in requests}
    output = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(by_id, 1),
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        kv_connector_block_state=SimpleNamespace(
            resolve_block_ids=lambda name: by_id[name].get_block_ids(), boundary_state_offloads={}
        ),
    )
    return made.step(output)


def store(client: Client, layout: Layout, keys: list[bytes]) -> None:
    assert client.namespace(layout).put(keys, [bytes(BLOCK_BYTES)] * len(keys)).stored == len(keys)


def test_what_the_daemon_refuses_is_logged_once(
    client: Client, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(f"unix://{client.path}", deadline_s=10.0, strict=True) as strict:
        made = half(strict, replace(layout, block_bytes=8 << 20))
        with caplog.at_level(logging.WARNING, "vllm.kvstore"):
            for number in range(3):
                assert made.matched(FakeRequest(f"r{number}", names(4)), 0) == 0
    [line] = caplog.messages
    assert "nothing is cached, the daemon refuses" in line
    assert "a block of 8388608 bytes does not fit into an extent of 2097152 (raise dram.limit)" in line


def test_a_block_is_saved_only_after_the_output_of_its_step(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    request = FakeRequest("r", names(4), blocks=[10, 11, 12, 13])
    assert made.matched(request, 0) == 0
    made.admit(request, request, 0)
    assert step(made, request).saves == []
    request.num_computed_tokens, request.num_in_flight_tokens = 64, 64
    assert step(made, request).saves == []  # scheduled further while the first step is under way
    request.num_in_flight_tokens = 0
    [save] = step(made, request).saves
    assert (save.keys, save.parent, save.block_ids) == (names(4)[:2], None, [10, 11])
    request.num_computed_tokens = 4 * 32
    made.finish(request, request.get_block_ids())
    last = step(made)
    assert [(save.keys, save.parent, save.block_ids) for save in last.saves] == [
        (names(4)[2:], names(4)[1], [12, 13])
    ]


def test_blocks_of_an_answer_are_saved_some_at_a_time_and_at_its_end(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    request = FakeRequest("r", names(12), blocks=list(range(10, 22)), answer_tokens=10 * BLOCK_TOKENS)
    made.matched(request, 0)
    made.admit(request, request, 0)
    saved = []
    for tokens in range(0, 12 * BLOCK_TOKENS, BLOCK_TOKENS):
        request.num_computed_tokens = tokens
        saved += [(tokens // BLOCK_TOKENS, len(save.keys)) for save in step(made, request).saves]
    assert saved == [(1, 1), (2, 1), (6, 4), (10, 4)], "those of the prompt as they come"
    made.finish(request, request.get_block_ids())
    [last] = step(made).saves
    assert (last.keys, last.block_ids) == (names(12)[10:11], [20])


def test_pages_are_kept_until_their_saves_have_ended(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    request = FakeRequest("r", names(4), blocks=[10, 11, 12, 13])
    made.matched(request, 0)
    made.admit(request, request, 0)
    step(made, request)
    assert made._manager.held() == []
    request.num_computed_tokens = 64
    assert (step(made, request).number, made._manager.held()) == (1, [10, 11])
    assert made.saving()
    request.num_computed_tokens = 128
    made.finish(request, request.get_block_ids())
    assert made._manager.held() == [10, 11, 12, 13]
    heard(made, 1)  # of the step before: the last saves have not begun
    assert made._manager.held() == [12, 13]
    assert made.moving()
    assert step(made).number == 2
    heard(made, 1)
    assert made._manager.held() == [12, 13]
    heard(made, 2)
    assert (made._manager.held(), made.saving(), made.moving()) == ([], False, False)


@pytest.mark.parametrize(
    "more", [{"mm_features": ["image"]}, {"cache_salt": "s"}, {"prompt_embeds": [0.5]}], ids=str
)
def test_tokens_are_sent_where_they_identify_a_block(
    client: Client, layout: Layout, more: dict[str, Any]
) -> None:
    made = half(client, layout)
    requests = [FakeRequest("r", names(4), blocks=[1, 2, 3, 4]), FakeRequest("s", names(4, "s"), **more)]
    for request in requests:
        assert made.matched(request, 0) == 0
        made.admit(request, request, 0)
    step(made, *requests)
    for request in requests:
        request.num_computed_tokens = 3 * BLOCK_TOKENS
    assert [save.tokens for save in step(made, *requests).saves] == [list(range(3 * BLOCK_TOKENS)), None]


def test_no_block_after_a_failed_load_is_saved_before_its_computation(client: Client, layout: Layout) -> None:
    made = half(client, layout, asynchronous=False)
    keys = names(6)
    store(client, layout, keys[:4])
    request = FakeRequest("r", keys, blocks=[20, 21, 22, 23, 24, 25])
    assert made.matched(request, 0) == 4 * 32
    made.admit(request, request, 4 * 32)
    [load] = (first := step(made, request)).loads
    assert (load.parts, first.saves) == ([Part(0, keys[:4], [20, 21, 22, 23])], [])
    # The step has computed all six blocks, from a second one that was not there.
    heard(made, invalid=[21, 22, 23])
    assert made._manager.evicted == [{21, 22, 23, 24, 25}]
    request.num_computed_tokens = 32
    assert step(made, request).saves == []
    request.num_computed_tokens = 6 * 32
    [save] = step(made, request).saves
    assert (save.keys, save.parent, save.block_ids) == (keys[1:], keys[0], [21, 22, 23, 24, 25])


def test_a_request_with_a_failed_load_does_not_try_again_until_preempted(
    client: Client, layout: Layout
) -> None:
    made = half(client, layout)
    keys = names(3)
    store(client, layout, keys)
    request = FakeRequest("r", keys, blocks=[1, 2, 3])
    assert made.matched(request, 0) == 96
    assert made.matched(request, 0) == 96  # asked twice, tried never
    made.admit(request, request, 96)
    assert made.matched(request, 0) == 0
    request.num_preemptions = 1
    assert made.matched(request, 0) == 96


def test_blocks_of_a_preempted_request_are_not_read(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    request = FakeRequest("r", names(4), blocks=[1, 2, 3, 4])
    made.matched(request, 0)
    made.admit(request, request, 0)
    step(made, request)
    request.num_computed_tokens = 128
    # Computed, and preempted before it could be saved: its blocks belong to others in this very step.
    assert step(made, preempted=("r",)).saves == []
    request.num_computed_tokens, request.blocks = 0, [7, 8, 9, 10]
    made.matched(request, 0)
    made.admit(request, request, 0)
    assert step(made, request).saves == []
    request.num_computed_tokens = 64
    assert [save.block_ids for save in step(made, request).saves] == [[7, 8]]


def test_a_request_aborted_while_preempted_saves_nothing_more(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    request = FakeRequest("r", names(2), blocks=[1, 2])
    made.matched(request, 0)
    made.admit(request, request, 0)
    step(made, request)
    request.num_computed_tokens = 64
    assert step(made, request).saves
    step(made, preempted=("r",))
    request.num_computed_tokens = 0
    made.finish(request, ([],))
    assert step(made).saves == []


def test_blocks_of_the_engines_own_cache_are_saved_after_a_step(client: Client, layout: Layout) -> None:
    """Another request of the same step may be loading those blocks just now."""
    made = half(client, layout)
    request = FakeRequest("r", names(3), blocks=[1, 2, 3])
    assert made.matched(request, 64) == 0
    made.admit(request, request, 0)
    request.num_computed_tokens = 64
    assert step(made, request).saves == []
    request.num_computed_tokens, request.num_in_flight_tokens = 96, 32
    assert step(made, request).saves == []
    request.num_in_flight_tokens = 0
    assert [save.block_ids for save in step(made, request).saves] == [[1, 2, 3]]


def test_blocks_computed_before_a_reset_are_not_saved_after_it(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    requests = [FakeRequest(str(i), names(2, str(i)), blocks=[2 * i, 2 * i + 1]) for i in range(2)]
    for request in requests:
        made.matched(request, 0)
        made.admit(request, request, 0)
    step(made, *requests)
    for request in requests:
        request.num_computed_tokens = 64
    made.finish(requests[0], requests[0].get_block_ids())
    made.forget()
    orders = step(made, requests[1])
    assert orders.saves == []
    assert orders.epoch
    made.finish(requests[1], requests[1].get_block_ids())
    assert step(made).saves == []


def test_blocks_loading_at_a_reset_are_not_saved_after_it(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    keys = names(4)
    store(client, layout, keys[:3])
    request = FakeRequest("r", keys, blocks=[1, 2, 3, 4])
    assert made.matched(request, 0) == 96
    made.admit(request, request, 96)
    assert step(made).loads
    made.forget()
    assert made.matched(request, 0) == 0
    heard(made, invalid=[2])
    request.num_computed_tokens = 32
    assert step(made, request).saves == []
    request.num_computed_tokens = 128
    assert step(made, request).saves == []


class FakePages:
    """Pages whose copies wait until they are told to go on."""

    block_bytes = BLOCK_BYTES
    device = None
    at_once = 1

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.read: list[int] = []

    def save(self, room: Any, first: int, block_ids: list[list[int]]) -> None:
        for slot, [block_id] in enumerate(block_ids, first):
            self.read.append(block_id)
            assert self.go_on.acquire(timeout=10)
            room.fill(slot, bytes([block_id]) * BLOCK_BYTES)

    def load(self, lease: Any, first: int, block_ids: list[list[int]]) -> int:
        return int(block_ids != [[13]])


@pytest.fixture
def pages() -> FakePages:
    return FakePages()


@pytest.fixture
def worker(client: Client, layout: Layout, pages: FakePages) -> Iterator[WorkerHalf]:
    guard = ExceptionBarrier(logging.getLogger("test"))
    made = WorkerHalf(Daemons([client]), guard, [GroupMemory(pages, layout)], NUM_BLOCKS)
    yield made
    for _ in range(100):
        pages.go_on.release()
    made.close()


def test_the_end_of_a_step_is_told_after_its_last_save(worker: WorkerHalf, pages: FakePages) -> None:
    keys = names(3)
    orders = Step(
        number=1, saves=[Save("r", 0, keys[:2], None, [1, 2]), Save("r", 0, keys[2:], keys[1], [3])]
    )
    worker.begin(orders)
    worker.save(orders)
    for n in (1, 2, 3):
        eventually(lambda n=n: len(pages.read) == n)
        assert worker.moved() == 0
        pages.go_on.release()
    eventually(lambda: worker.moved() == 1)


def test_a_load_that_no_thread_takes_has_failed_and_touches_no_page(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor keeps what it could not start a thread for."""
    orders = Step(number=1, loads=[Load("r", [Part(0, names(2), [1, 2])])])
    queued: list[Callable[[], object]] = []

    def submit(*call: Any) -> None:
        queued.append(functools.partial(*call))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker._loaders, "submit", submit)
    worker.begin(orders)
    with pytest.raises(RuntimeError):
        worker.load(orders)
    worker.fail_unstarted(orders)
    assert worker.ended()[0] == {"r"}
    assert worker.bad_blocks() == {1, 2}
    queued[0]()
    assert worker.ended() == (set(), set())
    assert worker.bad_blocks() == set()
    assert worker.moved() == 1


def test_a_long_window_is_stored_whole(client: Client, layout: Layout, pages: FakePages) -> None:
    """It takes several reservations, whose blocks have no parents."""
    windows, keys = replace(layout, kind="independent"), names(90)
    guard = ExceptionBarrier(logging.getLogger("test"))
    worker = WorkerHalf(Daemons([client]), guard, [GroupMemory(pages, windows)], NUM_BLOCKS)
    for _ in keys:
        pages.go_on.release()
    orders = Step(number=1, saves=[Save("r", 0, keys, None, list(range(1, 91)))])
    worker.begin(orders)
    worker.save(orders)
    eventually(lambda: worker.moved() == 1)
    assert client.namespace(windows).contains(keys).all()
    assert not guard.failures
    worker.close()


def test_a_load_reports_the_pages_without_bytes(client: Client, layout: Layout, worker: WorkerHalf) -> None:
    keys = names(4)
    store(client, layout, keys)
    orders = [
        Load("whole", [Part(0, keys[:3], [10, 11, 12])]),
        Load("altered", [Part(0, keys, [11, 12, 13, 14])]),
        Load("missing", [Part(0, names(2, "nowhere"), [15, 16])]),
        Load("promised in vain", [Part(0, [], [17])]),
    ]
    bad: set[int] = set()
    loaded: set[str] = set()
    worker.load(Step(loads=orders, idle=True))
    ends = time.monotonic() + 5
    while len(loaded) < len(orders) and time.monotonic() < ends:
        more, failed = worker.ended()
        assert not failed
        # Told no later than the end of its load.
        bad |= worker.bad_blocks()
        loaded |= more
    assert loaded == {load.request_id for load in orders}
    assert bad == {13, 14, 15, 16, 17}
    assert worker.bad_blocks() == set()


def test_a_load_of_several_groups_succeeds_or_fails_as_a_whole(
    client: Client, layout: Layout, pages: FakePages
) -> None:
    other = replace(layout, kv_layout="windows")
    keys, tail = names(3), names(3)[1:]
    store(client, layout, keys)
    store(client, other, tail)
    guard = ExceptionBarrier(logging.getLogger("test"))
    groups = [GroupMemory(pages, layout), GroupMemory(pages, other)]
    worker = WorkerHalf(Daemons([client]), guard, groups, NUM_BLOCKS, in_parts=False)
    orders = [
        Load("whole", [Part(0, keys, [10, 11, 12]), Part(1, tail, [14, 15])]),
        Load("altered in the second", [Part(0, keys, [10, 11, 12]), Part(1, tail[:1], [13])]),
        Load("missing in the first", [Part(0, names(1, "nowhere"), [10]), Part(1, tail, [14, 15])]),
        Load("null block", [Part(0, keys, [10, 11, 12]), Part(1, tail, [0, 15])]),
        Load("promised in vain", [Part(0, [], [17])]),
    ]
    worker.load(Step(loads=orders))
    loaded: set[str] = set()
    failed: set[str] = set()

    def all_ended() -> bool:
        more, lost = worker.ended()
        loaded.update(more)
        failed.update(lost)
        return len(loaded) == len(orders)

    eventually(all_ended)
    assert failed == {load.request_id for load in orders[1:]}
    assert worker.bad_blocks() == set()
    worker.close()


def test_null_blocks_and_numbers_out_of_range_are_neither_saved_nor_loaded(
    client: Client, layout: Layout, worker: WorkerHalf, pages: FakePages
) -> None:
    keys, others = names(2), names(1, "other")
    store(client, layout, others)
    worker.begin(Step(number=1))
    worker.save(
        Step(number=1, saves=[Save("r", 0, keys, None, [1, 0]), Save("s", 0, keys, None, [1, NUM_BLOCKS])])
    )
    worker.load(Step(number=1, loads=[Load("t", [Part(0, others, [0])])]))
    eventually(lambda: worker.moved() == 1)
    assert worker.ended() == ({"t"}, set())
    assert worker.bad_blocks() == {0}
    counts = Figures(worker.counts()).reduce()
    assert (counts["not saved"], counts["lost"], pages.read) == (4, 1, [])
    assert client.namespace(layout).lookup(keys) == 0


def test_a_reset_closes_the_namespace_and_cancels_transfers(
    client: Client, layout: Layout, worker: WorkerHalf, pages: FakePages
) -> None:
    for i in range(8):
        orders = Step(epoch=f"epoch {i}", number=i + 1, saves=[Save(str(i), 0, names(1, str(i)), None, [1])])
        pages.go_on.release()
        worker.begin(orders)
        worker.save(orders)
        eventually(lambda i=i: worker.moved() == i + 1)
    gc.collect()
    layouts = {each.layout for each in gc.get_objects() if isinstance(each, Namespace)}
    assert {each.revision for each in layouts if each.model == layout.model} == {"+epoch 7"}

    # What is being saved when the next reset comes is neither read on nor stored.
    old = Step(epoch="epoch 7", number=9, saves=[Save("r", 0, names(2), None, [1, 2])])
    pages.read.clear()
    worker.begin(old)
    worker.save(old)
    eventually(lambda: pages.read == [1])
    threading.Timer(0.1, pages.go_on.release).start()
    worker.begin(Step(epoch="epoch 8", number=9))
    eventually(lambda: worker.moved() == 9)
    assert pages.read == [1]


def test_no_transfer_touches_engine_memory_after_stop(worker: WorkerHalf, pages: FakePages) -> None:
    worker.begin(Step(number=1))
    worker.save(Step(number=1, saves=[Save("r", 0, names(3), None, [1, 2, 3])]))
    eventually(lambda: pages.read == [1])
    over = threading.Event()
    stopping = threading.Thread(target=lambda: (worker.stop(), over.set()))
    stopping.start()
    assert not over.wait(0.2)
    assert worker.moved() == 0
    pages.go_on.release()
    assert over.wait(5)
    stopping.join()
    eventually(lambda: worker.moved() == 1)
    assert pages.read == [1]


def test_an_engine_stays_awake_during_transfers(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    assert not made.moving()
    request = FakeRequest("r", names(2), blocks=[1, 2])
    made.matched(request, 0)
    made.admit(request, request, 0)
    assert step(made, request).number == 0
    request.num_computed_tokens = 64
    assert step(made, request).number == 1
    assert made.moving()
    for number, moving in ((0, True), (1, False)):
        reported = Progress(2).aggregate(Progress(number))
        made.hear(SimpleNamespace(invalid_block_ids=set(), kv_connector_worker_meta=reported))
        assert made.moving() is moving


def test_requests_that_must_be_computed_from_the_start_load_nothing(client: Client, layout: Layout) -> None:
    made = half(client, layout)
    store(client, layout, names(3))
    request = FakeRequest("r", names(3), blocks=[1, 2, 3])
    assert made.matched(request, 0) == 96
    request.skip_reading_prefix_cache = True
    assert made.matched(request, 0) == 0


@pytest.fixture(scope="module")
def ended() -> InMemorySpanExporter:
    """The ended spans of this process: OpenTelemetry takes one provider."""
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


def test_a_lookup_is_a_child_of_the_span_in_the_headers_of_its_request(
    client: Client, layout: Layout, ended: InMemorySpanExporter
) -> None:
    made = half(client, layout)
    store(client, layout, names(3))
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    assert made.matched(FakeRequest("r", names(3), trace_headers=headers), 0) == 96
    [lookup] = [span for span in ended.get_finished_spans() if span.name == "kvstore.lookup"]
    assert f"{lookup.context.trace_id:x} {lookup.parent.span_id:x}" == f"{'ab' * 16} {'cd' * 8}"
    ended.clear()
    for other in (None, {}, {"traceparent": headers["traceparent"][:-1] + "0"}, {"traceparent": "torn"}):
        assert made.matched(FakeRequest(f"r {other}", names(3), trace_headers=other), 0) == 96
    assert not ended.get_finished_spans()


def test_requests_with_headers_are_served_without_opentelemetry(
    client: Client, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [each for each in sys.modules if each.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    made = half(client, layout)
    store(client, layout, names(3))
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    assert made.matched(FakeRequest("r", names(3), trace_headers=headers), 0) == 96


def test_images_with_bidirectional_attention_are_neither_loaded_nor_stored(
    client: Client, layout: Layout
) -> None:
    made = half(client, layout, whole_inputs=True)
    store(client, layout, names(3))
    for features, tokens, saves in (([], 96, 1), (["image"], 0, 0)):
        request = FakeRequest(f"r{tokens}", names(6), blocks=[1, 2, 3, 4, 5, 6], mm_features=features)
        assert made.matched(request, 0) == tokens
        made.admit(request, request, tokens)
        request.num_computed_tokens = tokens
        step(made, request)
        request.num_computed_tokens = 6 * BLOCK_TOKENS
        assert len(step(made, request).saves) == saves


@dataclass
class FakeLora:
    """What is read of vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "red"
    lora_int_id: int = 1
    load_inplace: bool = False


def test_an_adapter_is_identified_by_its_files_at_each_admission(tmp_path: Path) -> None:
    def write(what: str) -> None:
        (tmp_path / "adapter_model.safetensors").write_text(what)

    write("red")
    adapters, elsewhere = Adapters(), Adapters()
    lora = FakeLora(str(tmp_path))
    first = adapters.salt(lora)
    assert first is not None
    assert adapters.salt(lora) == first == elsewhere.salt(lora)
    # Changed in place: until vLLM loads it again it computes with the old one, and nothing says when that is.
    write("orange")
    assert adapters.salt(lora) is None
    anew = adapters.salt(replace(lora, load_inplace=True))
    assert anew not in (None, first)
    assert elsewhere.salt(replace(lora, lora_int_id=2)) not in (None, first, anew)  # newer than that engine
    assert Adapters().salt(lora) == anew
    assert adapters.salt(FakeLora("someone/an-adapter-on-a-hub")) is None


def test_adapters_share_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    digest = adapters_module.files_digest

    def counted(path: Path, logger: logging.Logger) -> Any:
        reads.append(path.name)
        return digest(path, logger)

    monkeypatch.setattr(adapters_module, "files_digest", counted)
    monkeypatch.setattr(adapters_module, "_SETTLED_NS", 0)
    for name, weights in (("here", "red"), ("there", "red"), ("else", "orange")):
        (tmp_path / name / "checkpoint-1").mkdir(parents=True)
        (tmp_path / name / "adapter_model.safetensors").write_text(weights)
        (tmp_path / name / "checkpoint-1" / "optimizer.pt").write_text(name)
        time.sleep(0.02)  # another time, and older than the next engine
    salts = [Adapters().salt(FakeLora(str(tmp_path / name))) for name in ("here", "there", "else")]
    assert salts[0] == salts[1] != salts[2]
    assert None not in salts
    # Read once, not for every request.
    del reads[:]
    adapters = Adapters()
    assert {adapters.salt(FakeLora(str(tmp_path / "here"))) for _ in range(5)} == {salts[0]}
    assert reads == ["adapter_model.safetensors"]


def test_an_adapter_whose_files_change_back_was_changed(tmp_path: Path) -> None:
    """vLLM may have loaded what was there meanwhile."""
    path, lora, adapters = tmp_path / "adapter_model.safetensors", FakeLora(str(tmp_path)), Adapters()
    path.write_text("red")
    assert adapters.salt(lora) is not None
    for weights in ("orange", "red"):
        time.sleep(0.02)
        path.write_text(weights)
        assert adapters.salt(lora) is None


def test_an_adapter_that_changes_while_it_is_read_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = tmp_path / "adapter_model.safetensors", adapters_module.files_digest
    path.write_text("red")

    def changing(path: Path, logger: logging.Logger) -> Any:
        found = digest(path, logger)
        path.write_text("orange")
        return found

    monkeypatch.setattr(adapters_module, "files_digest", changing)
    assert Adapters().salt(FakeLora(str(tmp_path), load_inplace=True)) is None
    monkeypatch.undo()
    assert Adapters().salt(FakeLora(str(tmp_path), load_inplace=True)) is not None


def test_a_request_is_not_saved_if_its_adapter_changes_meanwhile(
    client: Client, layout: Layout, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_text("red")
    made = half(client, layout)
    request = FakeRequest("r", names(4), blocks=[1, 2, 3, 4], lora_request=FakeLora(str(tmp_path)))
    made.matched(request, 0)
    made.admit(request, request, 0)
    step(made, request)
    request.num_computed_tokens = 64
    [save] = step(made, request).saves
    assert [len(key) for key in save.keys] == [len(names(1)[0]) + 16] * 2
    (tmp_path / "adapter_model.safetensors").write_text("orange")
    request.num_computed_tokens = 128
    assert step(made, request).saves == []
    made.finish(request, request.get_block_ids())
    assert step(made).saves == []


def test_a_computing_step_is_not_idle_for_the_second_model_runner(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls `start_load_kv` behind the forward pass, where there is no forward context."""
    connector = KVStoreConnector.__new__(KVStoreConnector)
    connector._worker, connector._guard, connector._off = (
        worker,
        ExceptionBarrier(logging.getLogger("test")),
        "",
    )
    connector._failures_told, connector._connector_metadata, connector._scheduler = Counter(), None, None
    connector._memory, connector._moved, connector._met = [], 0, True
    runner = ActiveKVConnector.__new__(ActiveKVConnector)
    runner.kv_connector, runner.vllm_config = connector, VllmConfig()
    runner._pending_load_kwargs, runner._disabled = None, False
    waits: list[bool] = []
    monkeypatch.setattr(worker, "_waiting", lambda: waits.append(True))
    for idle in (False, True):
        orders = Step(idle=idle, met=True)
        output = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False)
        batch = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=1)
        runner.pre_forward(output, None if idle else batch)
        runner.post_forward(set())
        assert waits == [True] * idle
    assert connector._guard.failures == {}
