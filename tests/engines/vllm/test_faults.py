"""Lost, altered, late and absent: always a miss, never other tokens, and the engine lives."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import (
    BLOCK_TOKENS,
    Engine,
    cached,
    connector,
    farthest,
    full_blocks,
    prompt,
    said,
)
from tests.processes import stop

LONG = [prompt(450 + i, 1500) for i in range(4)]

DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}
WITH_NVME = {**DRAM_ONLY, "nvme": {"limit": "128MiB"}}
"""The engine is the first to find what is altered, not the scrubber."""


@pytest.fixture(scope="module")
def own(engine: Engine) -> Iterator[LocalDaemon]:
    """A daemon that these tests may stop, kill and alter, in use by the engine."""
    with LocalDaemon(WITH_NVME) as daemon, engine.instead(**connector(daemon, load=engine.mode)):
        yield daemon


def alter(daemon: LocalDaemon) -> int:
    """Flips a bit in every page of the slab files that is in use; how many it flipped."""
    pages = 0
    for slab in (daemon.folder / "nvme" / "slabs").iterdir():
        content = np.memmap(slab, np.uint8, "r+").reshape(-1, 4096)
        used = content.any(axis=1)
        content[used, 7] ^= 1
        content.flush()
        pages += int(used.sum())
    return pages


def written(daemon: LocalDaemon) -> bool:
    """Whether everything that was stored is on the disk."""
    with Client(daemon.url, deadline_s=10.0) as client:
        counters = client.status()["counters"]
    return counters["stored_blocks"] == counters.get("written_blocks", 0) > 0


def back(engine: Engine) -> None:
    """Waits until the connector has found the daemon again."""
    eventually(lambda: engine("connected"))


def test_a_payload_altered_in_the_slab_file_is_a_miss(
    plain: Engine, engine: Engine, own: LocalDaemon
) -> None:
    asked = [prompt(400, 300)]
    expected = said(plain.fresh(asked))
    engine.fresh(asked)
    eventually(lambda: written(own))
    own.stop()
    assert alter(own)
    own.start()
    back(engine)
    lost = engine("counts").get("lost", 0)
    assert said(engine.fresh(asked)) == expected
    assert engine("counts")["lost"] > lost
    # What was computed again is stored again, by this request or by the next.
    engine.fresh(asked)
    last = engine.fresh(asked)
    assert (said(last), cached(last)) == (expected, [full_blocks(300)])
    assert engine("failures") == {}


def test_a_payload_altered_in_memory_ends_the_prefix(plain: Engine, engine: Engine) -> None:
    asked = [prompt(401, 300)]
    expected = said(plain.fresh(asked))
    with LocalDaemon(DRAM_ONLY) as daemon, engine.instead(**connector(daemon, load=engine.mode)):
        engine.fresh(asked)
        keys = [bytes.fromhex(key) for key in engine("keys", prompt=asked[0])]
        with Client(daemon.url, deadline_s=10.0) as client:
            ns = client.namespace(Layout(**engine("layout")))
            payloads = np.empty((len(keys), ns.layout.block_bytes), np.uint8)
            assert ns.get(keys, payloads) == len(keys)
            ns.invalidate(keys)
            with ns.reserve(keys) as room:
                views = room.blocks
                for view, payload in zip(views, payloads, strict=True):
                    view[:] = payload.data
                room.commit()
            views[4][1000] ^= 1
            assert said(engine.fresh(asked)) == expected
            assert engine("counts")["lost"] == len(keys) - 4
            assert engine("counts")["loaded"] == 4
        # The rest was computed, and is stored again once the daemon has seen for itself that it was altered.
        engine.fresh(asked)
        last = engine.fresh(asked)
        assert (said(last), cached(last)) == (expected, [full_blocks(300)])


def test_a_restarted_daemon_serves_hits(plain: Engine, engine: Engine, own: LocalDaemon) -> None:
    asked = [prompt(402, 300)]
    engine.fresh(asked)
    own.restart()
    back(engine)
    again = engine.fresh(asked)
    assert said(again) == said(plain.fresh(asked))
    assert cached(again) == [full_blocks(300)]


def test_a_daemon_killed_during_a_run_costs_only_hits(
    plain: Engine, engine: Engine, own: LocalDaemon
) -> None:
    asked = [prompt(410 + i, 200 + 30 * i) for i in range(16)]
    expected = said(plain.fresh(asked, max_tokens=64))
    engine.fresh(asked[:8], max_tokens=64)
    eventually(lambda: written(own))
    assert engine("reset")
    for after_s in (0.0, 0.1, 0.3):
        engine.send("generate", prompts=asked, max_tokens=64)
        time.sleep(after_s)
        own.kill()
        try:
            assert said(engine.receive()) == expected
            assert said(engine.fresh(asked[:2], max_tokens=64)) == expected[:2]
        finally:
            # Others use it too.
            own.start()
            back(engine)
    last = engine.fresh(asked[:8], max_tokens=64)
    assert said(last) == expected[:8]
    assert cached(last) == [full_blocks(len(each)) for each in asked[:8]]


def test_a_stopped_daemon_delays_no_step_beyond_the_deadline(plain: Engine, engine: Engine) -> None:
    asked = [prompt(430 + i, 300) for i in range(4)]
    expected = said(plain.fresh(asked))
    quick = {"load": engine.mode, "deadline_s": 0.5}
    with LocalDaemon(DRAM_ONLY) as daemon, engine.instead(**connector(daemon, **quick)):
        engine.fresh(asked)
        assert engine("reset")
        stop(daemon.pid)
        try:
            started_s = time.monotonic()
            assert said(engine.generate(asked)) == expected
            assert time.monotonic() - started_s < 5
            assert said(engine.fresh(asked)) == expected
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        back(engine)
        assert said(engine.fresh(asked)) == expected
        assert cached(engine.fresh(asked)) == [full_blocks(300)] * 4


def test_a_daemon_started_later_is_used(plain: Engine, engine: Engine) -> None:
    asked = [prompt(440, 300)]
    expected = said(plain.fresh(asked))
    with LocalDaemon(DRAM_ONLY) as daemon:
        daemon.stop()
        with engine.instead(**connector(daemon, load=engine.mode)):
            for _ in range(2):
                answers = engine.fresh(asked)
                assert (said(answers), cached(answers)) == (expected, [0])
            daemon.start()
            back(engine)
            # The engine's own cache has the prompt: it is stored nevertheless.
            engine.generate(asked)
            answers = engine.fresh(asked)
            assert (said(answers), cached(answers)) == (expected, [full_blocks(300)])


@functools.cache
def moved_by_own_hits(plain: Engine) -> float:
    """How far vLLM's own hits move the logprobs of `LONG`: other kernels may compute what is behind them."""
    moved = 0.0
    for tokens, expected in zip(LONG, said(plain.fresh(LONG)), strict=True):
        for n in range(BLOCK_TOKENS, full_blocks(len(tokens)), 3 * BLOCK_TOKENS):
            plain.fresh([tokens[: n + 1]], max_tokens=1)
            moved = max(moved, farthest(said(plain.generate([tokens])), [expected]))
    return moved


def test_a_store_too_small_for_its_prompts_serves_a_part(plain: Engine, engine: Engine) -> None:
    """6000 tokens are more than a step takes, so hits move the borders of the chunks, and those the last
    bits of the logprobs: no farther than other chunks and vLLM's own hits do without it.
    """
    asked, expected = LONG, said(plain.fresh(LONG))
    spread = max(
        farthest(expected, [said(plain.fresh([each]))[0] for each in asked]), moved_by_own_hits(plain)
    )
    with plain.instead(max_num_batched_tokens=512):
        spread = max(spread, farthest(expected, said(plain.fresh(asked))))
    assert spread < 1e-4
    with (
        LocalDaemon({"dram": {"limit": "8MiB", "huge_pages": False}}) as daemon,
        engine.instead(**connector(daemon, load=engine.mode)),
    ):
        for _ in range(3):
            assert farthest(said(engine.fresh(asked)), expected) <= 2 * spread
        assert engine("counts")["not saved"] > 0
        assert engine("failures") == {}
