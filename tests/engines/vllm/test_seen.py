"""What is seen of the store from vLLM: `/metrics`, the log, KV events, and vLLM's own benchmark."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import BlockStored

from kvstore import Client, ExceptionBarrier, Layout
from kvstore.client.presence_tables import HEARD_S
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_vllm import metrics
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.lookup import Lookup
from kvstore_vllm.messages import Load, Part, Save, Step
from kvstore_vllm.metrics import METRICS, UNANSWERED, Figures, Outcome, PromMetrics, Recorder, reason_of
from kvstore_vllm.prefill_rate import PrefillRate
from kvstore_vllm.worker import GroupMemory, WorkerHalf
from tests.admin.serving import free_port
from tests.daemons import eventually, names
from tests.engines.tokenizer import add_tokenizer
from tests.engines.vllm.engine import BLOCK_TOKENS, connector, full_blocks, prompt
from tests.engines.vllm.models import make_model
from tests.engines.vllm.test_halves import (
    BLOCK_BYTES,
    GROUP,
    NUM_BLOCKS,
    FakePages,
    FakeRequest,
    half,
    store,
)
from tests.engines.vllm.test_page import PAGE, SERVERS, complete, server
from tests.processes import stop

DRAM = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}
NOWHERE = "unix:///nowhere/kvstore.sock"

Shown = dict[str, float]
"""Samples of `/metrics`: `NAME` or `NAME:LABEL VALUE`, without vLLM's own labels."""


def shown(text: str) -> Shown:
    samples: Shown = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {n: v for n, v in sample.labels.items() if n not in ("engine", "model_name")}
            if not sample.name.endswith(("_bucket", "_created")):
                samples[":".join([sample.name.removeprefix("vllm:"), *own.values()])] = sample.value
    return samples


# -- figures


def test_figures_of_several_reports_are_added_and_named_for_the_log() -> None:
    one = Figures({"load_blocks:loaded": 3, "load_blocks:late": 1, "load_seconds": [0.5]})
    other = Figures({"load_blocks:loaded": 2, "load_blocks:damaged": 4, "load_seconds": [0.25], "x": 1})
    before = dict(one.data)
    # Messages between vLLM's processes.
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(one.to_dict()))
    both = Figures(sent).aggregate(other)
    assert both.data == {
        "load_blocks:loaded": 5, "load_blocks:late": 1, "load_blocks:damaged": 4,
        "load_seconds": [0.5, 0.25], "x": 1,
    }  # fmt: skip
    assert both.reduce() == {"loaded": 5, "lost": 5}
    assert (one.data, both.is_empty(), Figures().is_empty()) == (before, False, True)
    both.reset()
    assert both.is_empty()


def test_metrics_show_what_is_observed_and_zeros_from_the_start() -> None:
    registry = CollectorRegistry()
    types = {
        each: partial(each, registry=registry)
        for each in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    made = PromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    text = prometheus_client.generate_latest(registry).decode()
    first = shown(text)
    assert first["kvstore_missed_tokens_total:unavailable"] == 0.0
    assert {f"vllm:kvstore_{metric.name}" for metric in METRICS} == set(
        re.findall(r"^# TYPE (vllm:\w+?)(?:_total)? (?:counter|histogram)$", text, re.MULTILINE)
    )
    data = {"hit_tokens": 64, "missed_tokens:not_worth_loading": 32, "load_seconds": [0.015, 0.5]}
    made.observe(data | {"hook_failures:save": 2}, 1)
    made.observe(data, 1)
    assert (
        shown(prometheus_client.generate_latest(registry).decode()).items()
        >= {
            "kvstore_hit_tokens_total": 128.0,
            "kvstore_missed_tokens_total:not_worth_loading": 64.0,
            "kvstore_load_seconds_count": 4.0,
            "kvstore_load_seconds_sum": 1.03,
            "kvstore_hook_failures_total:save": 2.0,
        }.items()
    )
    of_0 = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:kvstore_hit_tokens_total", of_0) == 0.0


def test_nothing_is_written_unless_debug_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    outcome = Outcome(good=3, present=1, why="late", read=Counter({1: 2, 2: 1}))

    def record() -> None:
        recorder.admitted("r1", 96, 64, 32, "not_stored")
        recorder.admitted("r5", 96, 0, 32, "not_stored", 64)
        recorder.unasked("r2", "nothing is served")
        recorder.loaded("r3", 0, 4, 100, outcome)
        recorder.saved("r4", 1, 3, 100, outcome)

    monkeypatch.setattr(metrics.logger, "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.kvstore"):
        monkeypatch.setattr(metrics, "_others", lambda *_: pytest.fail("a line is made in vain"))
        record()
        assert not caplog.records
        monkeypatch.undo()
    monkeypatch.setattr(metrics.logger, "propagate", True)
    with caplog.at_level(logging.DEBUG, "vllm.kvstore"):
        record()
    assert [record.getMessage() for record in caplog.records] == [
        "r1: 64 of 96 tokens found behind 32 of the engine's own cache; 32 not_stored",
        "r5: 0 of 96 tokens found behind 32 of the engine's own cache; 64 not_worth_loading; 32 not_stored",
        "r2: not looked up, nothing is served",
        "r3: loaded 3 of 4 blocks of group 0, 200 bytes from DRAM, 100 bytes from NVME; 1 late",
        "r4: saved 2 of 3 blocks of group 1, 200 bytes, 1 present",
    ]


# -- misses by reason, in the halves


def why_of(client: Client, layout: Layout, keys: list[bytes], deadline_s: float = 0.05) -> str:
    lookup = Lookup(Daemons([client]), [GROUP], PrefillRate(2048), deadline_s)
    lookup.meet([[layout]], "")
    asked = SimpleNamespace(block_hashes=keys, num_tokens=32 * len(keys) + 1)
    try:
        assert lookup.find(asked, b"", True).tokens == 0
    except UNANSWERED as error:
        return reason_of(error)
    return ""


def test_misses_of_lookups_have_reasons() -> None:
    layout, keys = Layout(model="m", block_bytes=BLOCK_BYTES), names(2)
    with Client(NOWHERE, strict=True) as client:
        assert [why_of(client, layout, keys) for _ in range(2)] == ["unavailable"] * 2
    tenants = {"tenants": {"chat": {"uids": [os.geteuid() + 1]}}}
    with LocalDaemon(DRAM) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        assert eventually(lambda: why_of(client, layout, keys) == "")
        stop(daemon.pid)
        try:
            assert why_of(client, layout, keys) == "late"
            resumed = threading.Timer(0.3, os.kill, (daemon.pid, signal.SIGCONT))
            resumed.start()
            assert why_of(client, layout, keys, deadline_s=30.0) == ""
            resumed.join()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    with LocalDaemon({**DRAM, **tenants}) as daemon, Client(daemon.url, token="no", strict=True) as client:
        assert eventually(lambda: why_of(client, layout, keys) == "refused")


def test_a_request_counts_once_in_tokens_of_whole_blocks(client: Client) -> None:
    layout, keys = Layout(model="counts once", block_bytes=BLOCK_BYTES), names(6)
    store(client, layout, keys[:4])
    made = half(client, layout)
    request = FakeRequest("r", keys, blocks=[1, 2, 3, 4, 5, 6])
    for preemptions in (0, 1):
        request.num_preemptions = preemptions
        for _ in range(2):  # polled
            assert eventually(lambda: made.matched(request, 32) == 96)
        made.admit(request, request, 96)
    skipped = FakeRequest("s", keys, blocks=[7, 8, 9, 10, 11, 12], skip_reading_prefix_cache=True)
    made.matched(skipped, 0)
    made.admit(skipped, skipped, 0)
    data = made.counts()
    assert len(data.pop("lookup_seconds")) >= 4
    # One token at least is computed, and the engine had 32 of them.
    assert data == {"asked_tokens": 160, "hit_tokens": 96, "missed_tokens:not_stored": 64}
    assert made.counts() == {}


def test_blocks_of_transfers_are_counted_by_outcome() -> None:
    layout, keys = Layout(model="outcomes", block_bytes=BLOCK_BYTES), names(4)
    pages, guard = FakePages(), ExceptionBarrier(logging.getLogger("test"))
    with (
        LocalDaemon({"dram": {"limit": "16MiB", "huge_pages": False}}) as daemon,
        Client(daemon.url, deadline_s=20, strict=True) as client,
    ):
        worker = WorkerHalf(Daemons([client]), guard, [GroupMemory(pages, layout)], NUM_BLOCKS)
        store(client, layout, keys[:1])
        number = 0

        def counts(loads: list[Load], saves: list[Save], epoch: str = "") -> dict[str, Any]:
            nonlocal number
            number += 1
            orders = Step(number=number, loads=loads, saves=saves)
            for _ in range(8):
                pages.go_on.release()
            worker.begin(orders)
            worker.load(orders)
            worker.save(orders)
            assert eventually(lambda: worker.moved() == number, 40)
            data = worker.counts()
            times = {name: len(data.pop(name, [])) for name in ("load_seconds", "save_seconds")}
            assert times == {"load_seconds": len(loads), "save_seconds": len(saves)}
            return data

        assert counts([], [Save("r", 0, keys, None, [1, 2, 3, 4])]) == {
            "save_blocks:stored": 3, "save_blocks:present": 1, "saved_bytes": 3 * BLOCK_BYTES,
        }  # fmt: skip
        loads = [
            Load("whole", [Part(0, keys[:2], [10, 11])]),
            Load("altered", [Part(0, keys, [11, 12, 13, 14])]),
            Load("gone", [Part(0, names(2, "nowhere"), [15, 16])]),
        ]
        assert counts(loads, []) == {
            "load_blocks:loaded": 4, "load_blocks:damaged": 2, "load_blocks:not_stored": 2,
            "loaded_bytes:dram": 4 * BLOCK_BYTES,
        }  # fmt: skip
        orphans = [Save("r", 0, names(2, "orphan"), names(1, "no parent")[0], [1, 2])]
        null = [Load("null", [Part(0, keys[:1], [0])])]
        assert counts(null, orphans) == {"load_blocks:failed": 1, "save_blocks:refused": 2}
        assert guard.failures == {"load": 1}
        daemon.stop()
        both = [Load("r", [Part(0, keys[:2], [10, 11])])], [Save("r", 0, names(3, "new"), None, [1, 2, 3])]
        assert counts(*both) == {"load_blocks:unavailable": 2, "save_blocks:unavailable": 3}
        worker.stop()
        assert guard.failures == {"load": 1}
        worker.close()


def test_a_block_that_is_not_ready_in_time_is_late_and_one_from_nvme_is_counted_there() -> None:
    layout, keys = Layout(model="tiers", block_bytes=BLOCK_BYTES), names(3)
    guard = ExceptionBarrier(logging.getLogger("test"))
    with (
        LocalDaemon({**DRAM, "nvme": {"limit": "64MiB"}}) as daemon,
        Client(daemon.url, deadline_s=20, strict=True) as client,
    ):
        store(client, layout, keys)
        eventually(lambda: client.status()["counters"].get("written_blocks", 0) == 3)
        daemon.restart()
        eventually(lambda: why_of(client, layout, names(1, "x")) == "", 20)
        worker = WorkerHalf(Daemons([client]), guard, [GroupMemory(FakePages(), layout)], NUM_BLOCKS)
        worker.load(Step(number=1, loads=[Load("r", [Part(0, keys, [1, 2, 3])])]))
        assert eventually(lambda: worker.ended()[0] == {"r"}, 20)
        assert (
            worker.counts().items() >= {"load_blocks:loaded": 3, "loaded_bytes:nvme": 3 * BLOCK_BYTES}.items()
        )
        stop(daemon.pid)
        try:
            client.deadline_s = 0.1
            worker.load(Step(number=2, loads=[Load("s", [Part(0, keys, [1, 2, 3])])]))
            assert eventually(lambda: worker.ended()[0] == {"s"}, 20)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert worker.counts()["load_blocks:late"] == 3
        worker.close()


# -- a server with a store


@dataclass
class Served:
    """vLLM's HTTP server with a daemon of its own. `log`: what the server prints. `events`: its KV events."""

    url: str
    model: Path
    daemon: LocalDaemon
    log: Path
    events: str

    def shown(self) -> Shown:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return shown(answer.read().decode())

    def since(self, before: Shown) -> Shown:
        """The metrics of the store that have changed."""
        now = self.shown()
        return {
            name: value - before.get(name, 0.0)
            for name, value in now.items()
            if name.startswith("kvstore_") and value != before.get(name, 0.0)
        }

    def wait(self, before: Shown, expected: Shown) -> None:
        """Waits until these metrics have changed as expected."""
        ends = time.monotonic() + 30
        while not (now := self.since(before)).items() >= expected.items():
            assert time.monotonic() < ends, now
            time.sleep(0.1)

    def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        eventually(lambda: urllib.request.urlopen(request, timeout=60).status == 200)

    def ask(self, tokens: list[int]) -> None:
        """A completion with an empty prefix cache of the engine's own."""
        self.forget()
        complete(self.url, self.model, tokens, 120, max_tokens=1)

    def said(self, text: str) -> list[str]:
        """The lines of the server's log with a text, from the id of their request on."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.partition("] ")[2] for line in lines if text in line]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seen")
    model, log = add_tokenizer(make_model(folder / "model")), folder / "log"
    port = free_port()
    with LocalDaemon({**DRAM, "events": {"listen": "tcp://127.0.0.1:*", "node": "n"}}) as daemon:
        flag = json.dumps(connector(daemon)["kv_transfer_config"])
        config = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
        with (
            log.open("w") as file,
            server(
                model, flag, ["--kv-events-config", config], file,
                VLLM_LOGGING_LEVEL="DEBUG", VLLM_SERVER_DEV_MODE="1",
            ) as url,
        ):  # fmt: skip
            yield Served(url, model, daemon, log, f"tcp://127.0.0.1:{port}")


def test_metrics_and_debug_lines_say_what_happened_to_a_prompt(served: Served) -> None:
    asked, whole = prompt(900, 300), full_blocks(300)
    blocks, before = whole // BLOCK_TOKENS, served.shown()
    served.ask(asked)
    stored = {
        "kvstore_asked_tokens_total": whole,
        "kvstore_missed_tokens_total:not_stored": whole,
        "kvstore_save_blocks_total:stored": blocks,
        "kvstore_lookup_seconds_count": 1,
        "kvstore_save_seconds_count": 1,
    }
    served.wait(before, stored)
    saved = served.since(before)
    assert saved["kvstore_saved_bytes_total"] > 0
    block_bytes = saved["kvstore_saved_bytes_total"] / blocks

    middle = served.shown()
    served.ask(asked)
    loaded = {
        "kvstore_asked_tokens_total": whole,
        "kvstore_hit_tokens_total": whole,
        "kvstore_load_blocks_total:loaded": blocks,
        "kvstore_loaded_bytes_total:dram": blocks * block_bytes,
        "kvstore_lookup_seconds_count": 1,
        "kvstore_load_seconds_count": 1,
    }
    served.wait(middle, loaded)
    now = served.shown()
    seconds = {name for name in served.since(middle) if name.endswith("_seconds_sum")}
    assert served.since(middle).keys() - seconds == loaded.keys()
    for name in ("queries", "hits"):  # vLLM's own counters
        assert now[f"external_prefix_cache_{name}_total"] > middle[f"external_prefix_cache_{name}_total"]
    assert now["kvstore_hit_tokens_total"] == now["external_prefix_cache_hits_total"]

    lines = [re.sub(r"^cmpl-\S+: ", "", line) for line in served.said(": ") if line.startswith("cmpl-")]
    for expected in (
        f"0 of {whole} tokens found behind 0 of the engine's own cache; {whole} not_stored",
        f"saved {blocks} of {blocks} blocks of group 0, {blocks * int(block_bytes)} bytes",
        f"{whole} of {whole} tokens found behind 0 of the engine's own cache",
        f"loaded {blocks} of {blocks} blocks of group 0, {blocks * int(block_bytes)} bytes from DRAM",
    ):
        assert expected in lines, lines


class Router:
    """What a subscriber learns of one prompt's blocks: their tokens by name, and their media."""

    def __init__(self, address: str, topic: str, asked: list[int]) -> None:
        self.known: dict[Any, tuple[int, ...]] = {}
        self.media: set[str | None] = set()
        self._blocks = {
            tuple(asked[at : at + BLOCK_TOKENS]) for at in range(0, full_blocks(len(asked)), BLOCK_TOKENS)
        }
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._socket.subscribe(topic.encode())

    def hear(self) -> bool:
        """Takes in what has arrived. Returns whether all blocks are known."""
        while self._socket.poll(20):
            *_, payload = self._socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._note(event)
        return set(self.known.values()) == self._blocks

    def _note(self, event: Any) -> None:
        """Notes stored blocks. vLLM's events are maps, the daemon's are arrays: routers read both."""
        if isinstance(event, list):
            event = dict(zip(("type", *BlockStored.__struct_fields__), event, strict=False))
        if event["type"] != "BlockStored":
            return
        size = event["block_size"]
        for i, name in enumerate(event["block_hashes"]):
            if (tokens := tuple(event["token_ids"][i * size : (i + 1) * size])) in self._blocks:
                self.known[name] = tokens
                self.media.add(event["medium"])

    def close(self) -> None:
        self._socket.close()


def test_the_engine_and_the_daemon_give_a_block_the_same_name_in_their_events(served: Served) -> None:
    """So a router that subscribes to both knows of each block in which memory it is."""
    with Client(served.daemon.url, deadline_s=10.0) as client:
        address = client.status()["events"]["listen"]
    asked = prompt(910, 300)
    routers = [Router(served.events, "", asked), Router(address, "kv@n@", asked)]
    try:
        time.sleep(1)  # until they are subscribed
        served.ask(asked)
        for router in routers:
            eventually(router.hear, 30)
    finally:
        for router in routers:
            router.close()
    engine, daemon = routers
    assert engine.known == daemon.known
    assert (engine.media, daemon.media) == ({"GPU"}, {"CPU"})


BENCH = "from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand as b; \
from vllm.utils.argparse_utils import FlexibleArgumentParser as p; \
made = p(); b.add_cli_args(made); b.cmd(made.parse_args())"
"""`vllm bench serve`: the command `vllm` of the package for CPUs does not start."""


@pytest.mark.alone
def test_the_benchmark_of_the_page_runs_and_is_served_by_the_store(served: Served) -> None:
    [line] = re.findall(r"^vllm bench serve .*?(?=^```)", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(
        line.replace("\\\n", " ")
        .replace("MODEL", str(served.model))
        .replace("http://localhost:8000", served.url)
    )
    options = dict(zip(words[3::2], words[4::2], strict=True))
    # A smaller one: three requests with a prefix of two blocks.
    options |= {
        "--num-prompts": "3",
        "--prefix-repetition-num-prefixes": "1",
        "--prefix-repetition-prefix-len": str(3 * BLOCK_TOKENS),
        "--prefix-repetition-suffix-len": str(BLOCK_TOKENS),
        "--prefix-repetition-output-len": "4",
    }
    command = [sys.executable, "-c", BENCH, *(word for pair in options.items() for word in pair)]
    benchmark(served, command)
    before = served.shown()
    benchmark(served, command)
    since = served.since(before)
    assert since.get("kvstore_hit_tokens_total", 0) >= 3 * BLOCK_TOKENS, since


def benchmark(served: Served, command: list[str]) -> None:
    """Runs the benchmark with an empty prefix cache of the engine's own."""
    served.forget()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=SERVERS)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"Successful requests:\s+3\b", ran.stdout), ran.stdout
    assert "Mean TTFT" in ran.stdout


def test_a_stopped_daemon_is_seen_in_the_reasons_of_misses(served: Served) -> None:
    before, whole = served.shown(), full_blocks(300)
    stop(served.daemon.pid)
    try:
        # Until then the daemon's presence tables are believed: the prompt would be a plain miss.
        time.sleep(HEARD_S)
        served.ask(prompt(920, 300))
        late = {"kvstore_asked_tokens_total": whole, "kvstore_missed_tokens_total:late": whole}
        served.wait(before, late)
    finally:
        os.kill(served.daemon.pid, signal.SIGCONT)
    served.daemon.stop()
    try:
        middle = served.shown()
        served.ask(prompt(921, 300))
        away = {"kvstore_asked_tokens_total": whole, "kvstore_missed_tokens_total:unavailable": whole}
        served.wait(middle, away)
        lost = "kvstore_save_blocks_total:unavailable"
        assert eventually(lambda: served.since(middle).get(lost) == whole // BLOCK_TOKENS, 30)
        assert not any(name.startswith("kvstore_hook_failures") for name in served.since(before))
        assert [line for line in served.said("; 288 unavailable") if line.startswith("cmpl-")]
    finally:
        served.daemon.start()
