"""The tier below the CPU tier of vLLM's own OffloadingConnector: hits change nothing, failures are misses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, Layout, Namespace
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import Engine, cached, full_blocks, prompt, said
from tests.engines.vllm.offloading import offloading
from tests.engines.vllm.shapes import AMX, SHAPES, need_amx
from tests.processes import stop

DRAM_ONLY = {"dram": {"limit": "128MiB", "huge_pages": False}, "scrub": {"rate": 0}}
"""The engine is the first to find what is altered, not the scrubber."""
HIT = [full_blocks(300)]
# The tier refuses recurrent layers with async scheduling.
STATES = {"enable_prefix_caching": True, "block_size": None, "async_scheduling": False}


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    """A daemon that these tests may stop, kill and alter."""
    with LocalDaemon(DRAM_ONLY) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def tiered(model: Path, own: LocalDaemon) -> Iterator[Engine]:
    """An engine with vLLM's CPU tier, whose worker is a stand-in, and the daemon below it."""
    with Engine(model, **offloading(own)) as engine:
        yield engine


@pytest.fixture(scope="module")
def spare(model: Path) -> Iterator[Engine]:
    """A process whose engine the tests replace. They name the weights: the files are newer than it."""
    with Engine(model) as engine:
        yield engine


def from_daemon(engine: Engine, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """Generates with vLLM's own caches empty, in GPU and CPU memory."""
    engine("empty_cpu_tier")
    return engine.fresh(prompts, **more)


def written(engine: Engine, client: Client, asked: list[int]) -> tuple[Namespace, list[bytes]]:
    """The namespace of a stored prompt's rows, and their keys."""
    return client.namespace(Layout(**engine("tier_layout"))), [
        bytes.fromhex(each) for each in engine("hashes", prompt=asked)
    ]


def rewrite(ns: Namespace, keys: list[bytes], zeros: bool) -> list[memoryview]:
    """Stores rows again, or zeros in their place, and returns the memory that they are in."""
    payloads = np.empty((len(keys), ns.layout.block_bytes), np.uint8)
    assert ns.get(keys, payloads) == len(keys)
    ns.invalidate(keys)
    with ns.reserve(keys) as reservation:
        views = reservation.blocks
        for view, payload in zip(views, payloads, strict=True):
            view[:] = bytes(len(payload)) if zeros else payload.data
        assert reservation.commit().stored == len(keys)
    return views


def test_hits_change_nothing_here_and_in_another_process(
    plain: Engine, tiered: Engine, own: LocalDaemon, model: Path
) -> None:
    asked = [prompt(900 + i, 300) for i in range(3)]
    expected = said(plain.fresh(asked))
    before = tiered("tier_counts").get("found", 0)
    for found in (0, 288):
        answers = from_daemon(tiered, asked)
        assert (said(answers), cached(answers)) == (expected, [found] * 3)
    assert tiered("tier_counts")["found"] - before == 3 * 9
    with Engine(model, **offloading(own)) as other:
        answers = other.generate(asked)
        assert (said(answers), cached(answers)) == (expected, HIT * 3)
        assert other("tier_layout") == tiered("tier_layout")
        assert other("tier_failures") == {}
    assert tiered("tier_failures") == {}


@pytest.mark.parametrize(
    ("name", "changes", "length"),
    [
        ("interleaved windows", {"block_size": 32}, 497),
        ("sinks", {"block_size": 32}, 497),
        ("chunks", {"block_size": 32}, 497),
        ("window smaller than the prompt", {"block_size": 32}, 497),
        ("short convolutions", STATES, 497),
        ("linear attention", STATES, 1200),
        ("latent", AMX | {"block_size": 32}, 497),
        ("latent queries", AMX | {"block_size": 64}, 497),
    ],
)
def test_hits_of_hybrid_models_change_nothing(
    spare: Engine, own: LocalDaemon, tmp_path: Path, name: str, changes: dict[str, Any], length: int
) -> None:
    """The reference is an engine whose own cache has the prompt: a prefix moves the ends of its steps."""
    if "latent" in name:
        need_amx()
    shape = SHAPES[name]
    options = {"model": str(shape.save(tmp_path)), **shape.engine, **changes}
    asked = [prompt(910, length)]
    spare.restart(**options)
    cold, warm = spare.fresh(asked), spare.generate(asked)
    spare.restart(**options, **offloading(own, weights_revision=tmp_path.name))
    first, again = from_daemon(spare, asked), from_daemon(spare, asked)
    assert (said(first), cached(first)) == (said(cold), [0])
    assert (said(again), cached(again)) == (said(warm), cached(warm))
    assert cached(again)[0] > 0
    assert spare("tier_counts")["found"] > 0
    assert spare("tier_failures") == {}


def test_other_bytes_give_other_tokens(plain: Engine, tiered: Engine, own: LocalDaemon) -> None:
    """The negative control: what the tier loads is what the model computes with."""
    asked = prompt(920, 300)
    expected = said(plain.fresh([asked]))
    from_daemon(tiered, [asked])
    with Client(own.url, deadline_s=10.0) as client:
        rewrite(*written(tiered, client, asked), zeros=True)
    answers = from_daemon(tiered, [asked])
    assert cached(answers) == HIT
    assert [tokens for tokens, _ in said(answers)] != [tokens for tokens, _ in expected]


def test_a_failed_promotion_is_a_miss(plain: Engine, tiered: Engine, own: LocalDaemon) -> None:
    """A row with a wrong checksum. vLLM keeps the rows before it, and computes the rest."""
    asked = prompt(921, 300)
    expected = said(plain.fresh([asked]))
    from_daemon(tiered, [asked])
    before = tiered("tier_counts").get("failed loads", 0)
    with Client(own.url, deadline_s=10.0) as client:
        rewrite(*written(tiered, client, asked), zeros=False)[4][1000] ^= 1
        answers = from_daemon(tiered, [asked])
        assert said(answers) == expected
        assert cached(answers) == [4 * 32]
        assert tiered("tier_counts")["failed loads"] == before + 1
    assert tiered("tier_failures") == {}

    def stored_again() -> bool:
        answers = from_daemon(tiered, [asked])
        assert said(answers) == expected
        return cached(answers) == HIT

    # Once the daemon has seen for itself that the row was altered.
    eventually(stored_again)


def test_rows_from_before_a_reset_are_misses(plain: Engine, tiered: Engine) -> None:
    """vLLM resets connectors after an update of the weights in place: earlier KV is of other weights."""
    asked = [prompt(922, 300)]
    expected = said(plain.fresh(asked))
    from_daemon(tiered, asked)
    assert cached(from_daemon(tiered, asked)) == HIT
    assert tiered("reset", connector=True)
    for found in ([0], HIT):
        answers = from_daemon(tiered, asked)
        assert (said(answers), cached(answers)) == (expected, found)


def test_a_daemon_killed_during_a_run_costs_only_hits(
    plain: Engine, tiered: Engine, own: LocalDaemon
) -> None:
    asked = [prompt(930 + i, 200 + 30 * i) for i in range(8)]
    expected = said(plain.fresh(asked, max_tokens=32))
    from_daemon(tiered, asked[:4], max_tokens=32)
    for after_s in (0.0, 0.05, 0.3):
        tiered("empty_cpu_tier")
        tiered("reset")
        tiered.send("generate", prompts=asked, max_tokens=32)
        time.sleep(after_s)
        own.kill()
        try:
            assert said(tiered.receive()) == expected
            assert said(from_daemon(tiered, asked[:2], max_tokens=32)) == expected[:2]
        finally:
            own.start()
            eventually(lambda: tiered("connected"))
    from_daemon(tiered, asked[:2], max_tokens=32)
    answers = from_daemon(tiered, asked[:2], max_tokens=32)
    assert said(answers) == expected[:2]
    assert cached(answers) == [full_blocks(len(each)) for each in asked[:2]]


def test_a_stopped_daemon_delays_no_request_beyond_the_deadline(
    plain: Engine, tiered: Engine, own: LocalDaemon
) -> None:
    asked = [prompt(940 + i, 300) for i in range(4)]
    expected = said(plain.fresh(asked))
    with tiered.instead(**offloading(own, deadline_s=0.5)):
        from_daemon(tiered, asked[:2])
        tiered("empty_cpu_tier")
        tiered("reset")
        stop(own.pid)
        try:
            started_s = time.monotonic()
            assert said(tiered.generate(asked)) == expected
            assert time.monotonic() - started_s < 10
            assert said(from_daemon(tiered, asked)) == expected
        finally:
            os.kill(own.pid, signal.SIGCONT)
        eventually(lambda: tiered("connected"))
        # A lookup that is never sent delays no longer either.
        tiered("sabotage", place="tier lookups.flush")
        started_s = time.monotonic()
        assert said(from_daemon(tiered, asked)) == expected
        assert time.monotonic() - started_s < 10
        assert tiered("tier_failures")["on_schedule_end"] > 0
        tiered("repair", place="tier lookups.flush")
        assert said(from_daemon(tiered, asked)) == expected


@pytest.mark.parametrize(
    ("place", "counted"),
    [
        ("tier._store", "store"),
        ("tier._load", "load"),
        ("tier._namespace", "store"),
        ("tier._request", "lookup"),
        ("tier lookups.lookup", "lookup"),
        ("tier lookups.mark_miss", ""),
    ],
)
def test_a_failed_call_is_counted_and_a_miss(
    plain: Engine, tiered: Engine, own: LocalDaemon, place: str, counted: str
) -> None:
    stored, new = prompt(950, 300), prompt(sum(place.encode()), 300)
    expected = said(plain.fresh([stored, new]))
    from_daemon(tiered, [stored])
    before = tiered("tier_failures").get(counted, 0)
    tiered("sabotage", place=place)
    try:
        assert said(from_daemon(tiered, [stored, new])) == expected
        assert not counted or tiered("tier_failures")[counted] > before
    finally:
        tiered("repair", place=place)
    for _ in range(2):
        answers = from_daemon(tiered, [stored, new])
        assert said(answers) == expected
    assert cached(answers) == HIT * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deadlines": 1.0}, "secondary_tiers: unknown key 'deadlines'.*did you mean deadline_s"),
        ({"bucket": "x"}, "unknown key 'bucket'.*there are url, deadline_s, weights_revision"),
        ({"deadline_s": "1"}, "secondary_tiers: deadline_s is '1'.*a float"),
        ({"deadline_s": 0.0}, "secondary_tiers: deadline_s is 0.0"),
    ],
)
def test_a_wrong_option_ends_the_start_by_name(
    spare: Engine, own: LocalDaemon, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError.*{why}"):
        spare.restart(**offloading(own, **options))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_lora": True}, "LoRA is on.*KVStoreConnector"),
        ({"enable_prefix_caching": False}, "prefix caching is off.*leave out the tier"),
        ({"prefix_caching_hash_algo": "xxhash"}, "xxhash seeds its block hashes at random.*PYTHONHASHSEED"),
    ],
)
def test_engines_that_are_not_served_are_refused_by_name(
    spare: Engine, own: LocalDaemon, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError.*{why}"):
        spare.restart(**options, **offloading(own, weights_revision="any"))


def test_weights_that_nothing_names_are_refused(spare: Engine, own: LocalDaemon, tmp_path: Path) -> None:
    """The files are newer than the process, so vLLM may have read others."""
    folder = tmp_path / "model"
    SHAPES["llama"].save(folder)
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*was changed after the engine started"):
        spare.restart(model=str(folder), **offloading(own))
