"""A prefix on a device that is slower than the engine is computed; on a fast one it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from tests.crash.shimmed import ShimmedDaemon
from tests.daemons import eventually, tier
from tests.engines.vllm.engine import (
    BLOCK_TOKENS,
    Engine,
    cached,
    connector,
    full_blocks,
    prompt,
    said,
)

pytestmark = pytest.mark.alone
TOKENS = 1500
SLOW_BYTES_A_S = 1e6
SETTINGS = {
    "dram": {"limit": "24MiB", "huge_pages": False},
    "nvme": {"limit": "256MiB"},
    "policy": {"eviction": "lru"},
    "scrub": {"rate": 0},
}
"""DRAM for three or four prompts of 6 MB."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the device moves as many bytes a second as it says."""
    return tmp_path_factory.mktemp("slow") / "bytes-a-second"


@pytest.fixture(scope="module")
def daemon(slow: Path) -> Iterator[ShimmedDaemon]:
    with ShimmedDaemon(SETTINGS, ["--do", "slow", "--while", str(slow)]) as served:
        yield served


@pytest.fixture(scope="module")
def engine(model: Path, daemon: ShimmedDaemon) -> Iterator[Engine]:
    with Engine(model, hasty=True, **connector(daemon)) as made:
        yield made


class Store:
    """What the daemon says of itself."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def bandwidth(self) -> float:
        return float(tier(self._client.status(), "nvme")["bandwidth_bytes_per_s"])

    def unworthy(self) -> int:
        return int(self._client.status()["counters"].get("not_worth_loading_blocks", 0))

    def written(self) -> bool:
        counters = self._client.status()["counters"]
        return bool(counters["stored_blocks"] == counters.get("written_blocks", 0) > 0)


@pytest.fixture
def store(daemon: ShimmedDaemon) -> Iterator[Store]:
    with Client(daemon.url, token="", deadline_s=10.0) as client:
        yield Store(client)


def from_own_cache(plain: Engine, asked: list[int], tokens: int) -> list[dict[str, Any]]:
    """Answers without the store, where the engine's own cache has so many leading tokens.

    A step of other tokens rounds otherwise, so the reference computes as many as the engine that loads.
    """
    plain.fresh([asked])
    plain("shorten", prompt=asked, tokens=tokens)
    answers = plain.generate([asked])
    assert cached(answers) == [tokens]
    return answers


def test_what_is_slower_to_load_than_to_compute_is_computed(
    plain: Engine, engine: Engine, slow: Path, store: Store
) -> None:
    prompts = [prompt(1900 + i, TOKENS) for i in range(8)]
    computed = said(plain.fresh([prompts[0]]))
    for each in prompts:
        engine.fresh([each])
        eventually(store.written, 30)

    # The first prompts are on the device only. What is written to it shows that it is slow now.
    slow.write_text(str(SLOW_BYTES_A_S))
    engine.fresh([prompt(1950, TOKENS)])
    eventually(lambda: store.bandwidth() < 2 * SLOW_BYTES_A_S, 60)
    before, unworthy = engine("counts"), store.unworthy()
    answer = engine.fresh([prompts[0]])
    assert cached(answer) == [0], "computed, although it is stored"
    assert said(answer) == computed
    after = engine("counts")
    tokens = full_blocks(TOKENS)
    pages = tokens // BLOCK_TOKENS
    assert after["not worth loading"] - before.get("not worth loading", 0) == tokens
    assert after.get("loaded", 0) == before.get("loaded", 0)
    assert after["saved"] - before["saved"] <= 1, "only the block that the answer completes"
    assert store.unworthy() - unworthy >= pages

    # In memory it is as fast as ever.
    assert cached(engine.fresh([prompts[-1]])) == [full_blocks(TOKENS)]

    # Nothing is read, so it is tried again after a while.
    slow.unlink()
    tried: list[list[dict[str, Any]]] = []

    def loads() -> bool:
        tried.append(engine.fresh([prompts[1]]))
        return cached(tried[-1]) == [full_blocks(TOKENS)]

    before = engine("counts")
    eventually(loads, 120)
    answer = tried[-1]
    assert said(answer) == said(from_own_cache(plain, prompts[1], tokens))
    now = engine("counts")
    since = {name: count - before.get(name, 0) for name, count in now.items()}
    # On a busy machine a lookup or a load among so many may be late, and its prompt is computed.
    late, odd = divmod(since.get("missed tokens", 0), tokens)
    assert not odd
    begun, odd = divmod(since["hit tokens"], tokens)
    assert not odd
    assert since["not worth loading"] == tokens * (len(tried) - begun - late), "each prompt counts once"
    assert since["loaded"] + since.get("lost", 0) == pages * begun
    assert late + begun <= 3
    assert engine("failures") == {}


def test_a_head_in_memory_is_loaded_and_its_slow_tail_is_computed(
    plain: Engine, engine: Engine, slow: Path, store: Store
) -> None:
    asked, head = prompt(1903, TOKENS), 25 * BLOCK_TOKENS
    eventually(lambda: store.bandwidth() > 50 * SLOW_BYTES_A_S, 120)
    # The prompt, and then others that take its place in memory.
    for each in (asked, *(prompt(1960 + i, TOKENS) for i in range(5))):
        engine.fresh([each])
        eventually(store.written, 30)
    # Its head comes back from the device.
    assert cached(engine.fresh([asked[: head + 1]])) == [head]
    slow.write_text(str(SLOW_BYTES_A_S))
    try:
        engine.fresh([prompt(1970, TOKENS)])
        eventually(lambda: store.bandwidth() < 2 * SLOW_BYTES_A_S, 60)
        before = engine("counts")
        answer = engine.fresh([asked])
        after = engine("counts")
    finally:
        slow.unlink()
    assert cached(answer) == [head]
    assert after["loaded"] - before["loaded"] == head // BLOCK_TOKENS
    assert after["not worth loading"] - before.get("not worth loading", 0) == full_blocks(TOKENS) - head
    assert said(answer) == said(from_own_cache(plain, asked, head))


def test_a_device_that_slows_down_unseen_delays_one_answer_by_little(
    plain: Engine, engine: Engine, slow: Path, store: Store
) -> None:
    """The estimate is wrong until the first load: it is given up, although the deadline is 10 s."""
    asked = prompt(1902, TOKENS)
    reference = plain.fresh([asked])
    eventually(lambda: store.bandwidth() > 50 * SLOW_BYTES_A_S, 120)
    slow.write_text(str(SLOW_BYTES_A_S))
    try:
        [late] = engine.fresh([asked])
    finally:
        slow.unlink()
    assert late["cached"] < full_blocks(TOKENS)
    assert said([late]) == said(from_own_cache(plain, asked, late["cached"]))
    load_s = TOKENS * 4096 / SLOW_BYTES_A_S
    assert late["answered_s"] < load_s + reference[0]["answered_s"], "it did not wait for all of it"
