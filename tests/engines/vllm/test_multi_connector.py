"""vLLM's MultiConnector: vLLM's own OffloadingConnector first, the connector behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_vllm import KVStoreConnector
from tests.daemons import eventually
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.offloading import behind
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.stored import replace_payloads


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "128MiB", "huge_pages": False}, "scrub": {"rate": 0}}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def spare(model: Path) -> Iterator[Engine]:
    """A process whose engine the tests replace. They name the weights: the files are newer than it."""
    with Engine(model) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "length", "pages", "first"),
    [
        ("llama", 300, 9, "OffloadingConnector"),
        ("llama", 300, 9, "HandshakingConnector"),
        # All pages of full attention, and two of the window.
        ("interleaved windows", 497, 15 + 2, "OffloadingConnector"),
    ],
)
def test_hits_through_both_change_nothing(
    plain: Engine,
    spare: Engine,
    own: LocalDaemon,
    tmp_path: Path,
    name: str,
    length: int,
    pages: int,
    first: str,
) -> None:
    shape = SHAPES[name]
    options: dict[str, Any] = {"model": str(shape.save(tmp_path)), "block_size": 32, **shape.engine}
    asked, hit = [prompt(970, length)], [full_blocks(length)]
    spare.restart(**options)
    expected, blocks = said(spare.fresh(asked)), spare("num_blocks")
    revision = f"{name} behind {first}"
    spare.restart(**options, **behind(own, first, weights_revision=revision))
    assert spare("num_blocks") == blocks
    spare.fresh([prompt(971, 40)])  # the workers' layouts come with the first step at the latest
    answers = spare.fresh(asked)
    assert (said(answers), cached(answers)) == (expected, [0])
    # The first connector with a hit loads it.
    answers = spare.fresh(asked)
    assert (said(answers), cached(answers)) == (expected, hit)
    assert spare("counts").get("loaded", 0) == 0
    spare("empty_cpu_tier")
    answers = spare.fresh(asked)
    assert (said(answers), cached(answers)) == (expected, hit)
    assert spare("counts")["loaded"] == pages
    # A connector alone shares the blocks.
    spare.restart(**options, **connector(own, weights_revision=revision))
    answers = spare.fresh(asked)
    assert (said(answers), cached(answers)) == (expected, hit)
    replace_payloads(spare, own.url, asked[0], True)
    spare.restart(**options, **behind(own, first, weights_revision=revision))
    spare.fresh([prompt(971, 40)])
    answers = spare.fresh(asked)
    assert cached(answers) == hit
    assert said(answers) != expected
    assert spare("failures") == {}


def test_counts_from_another_process_are_known_by_name() -> None:
    """vLLM's HTTP server logs the counts of the engine's process."""
    name = KVStoreConnector.__name__
    counts = MultiConnector.build_kv_connector_stats({name: {"load_blocks:loaded": 3}})
    assert counts.reduce() == {name: {"loaded": 3}}


def test_a_reset_reaches_both(plain: Engine, spare: Engine, own: LocalDaemon) -> None:
    asked = [prompt(975, 300)]
    expected = said(plain.fresh(asked))
    spare.restart(**behind(own, weights_revision="reset"))
    spare.fresh(asked)
    assert cached(spare.fresh(asked)) == [full_blocks(300)]
    assert spare("reset", connector=True)
    answers = spare.fresh(asked)
    assert (said(answers), cached(answers)) == (expected, [0])
    assert spare("failures") == {}


def test_lost_blocks_are_computed(plain: Engine, spare: Engine, own: LocalDaemon) -> None:
    asked = [prompt(976, 300)]
    expected = said(plain.fresh(asked))
    spare.restart(**behind(own, weights_revision="lost"))
    spare.fresh(asked)
    spare("sabotage", place="pages.load")
    try:
        spare("empty_cpu_tier")
        assert said(spare.fresh(asked)) == expected
        assert spare("counts")["lost"] > 0
    finally:
        spare("repair", place="pages.load")
    own.kill()
    try:
        spare("empty_cpu_tier")
        assert said(spare.fresh(asked)) == expected
    finally:
        own.start()
        eventually(lambda: spare("connected"))
    with Client(own.url, deadline_s=10.0) as client:
        status = client.status()
    assert (status["leases"], status["reservations"]) == (0, 0)
