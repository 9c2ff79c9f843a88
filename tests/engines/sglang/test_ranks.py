"""Several ranks: each shard has blocks of its own, and a page counts if all shards have it.

With latent attention, all tensor-parallel ranks have the same blocks, which are stored once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import Engine, full_pages, hicache, prompt, same
from tests.engines.sglang.shapes import SHAPES
from tests.engines.sglang.stored import keys_of, layout_of, watched, zero

ONE_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
ASKED = [prompt(500, 300)]
DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}


def sharded(daemon: LocalDaemon, folder: Path, by: str = "tp_size") -> dict[str, Any]:
    how = watched(daemon, folder, engine={by: 2})
    return {**how, "environment": {**how["environment"], **ONE_CORE_EACH}}


@pytest.mark.parametrize("by", ["tp_size", "pp_size"])
def test_a_second_process_loads_the_blocks_of_both_shards(
    plain: Engine, model: Path, daemon: LocalDaemon, tmp_path: Path, by: str
) -> None:
    folder = tmp_path / "layouts"
    with Engine(model, **sharded(daemon, folder, by)) as first:
        expected = first.store(ASKED)
        assert expected[0].tokens == plain.fresh(ASKED)[0].tokens
    whole = full_pages(300)
    keys, layouts = keys_of(ASKED[0], 16), [layout_of(folder, rank) for rank in range(2)]
    assert layouts[0].shard != layouts[1].shard
    with Engine(model, **sharded(daemon, folder, by)) as second:
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, whole)
        # One shard lacks a page: the pages before it count.
        with Client(daemon.url, deadline_s=10.0) as client:
            assert client.namespace(layouts[1]).invalidate(keys[5:6]) == 1
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, 5 * 16)
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, whole)
        # Each shard's bytes are used.
        zero(daemon, layouts[1], keys)
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (False, whole)


def test_each_shard_may_have_a_daemon_of_its_own(model: Path, plain: Engine, tmp_path: Path) -> None:
    with LocalDaemon(DRAM_ONLY) as left, LocalDaemon(DRAM_ONLY) as right:
        how = hicache(f"{left.url},{right.url}", weights_revision="several", engine={"tp_size": 2})
        with Engine(model, environment=ONE_CORE_EACH, **how) as engine:
            expected = engine.store(ASKED)
            assert expected[0].tokens == plain.fresh(ASKED)[0].tokens
            answers = engine.fresh(ASKED)
            assert (same(answers, expected), answers[0].stored) == (True, full_pages(300))
            counts = []
            for daemon in (left, right):
                with Client(daemon.url, deadline_s=10.0) as client:
                    status = client.status()
                assert status["namespaces"] == 1
                counts.append(status["blocks"])
            assert counts[0] == counts[1] >= full_pages(300) // 16
            # Without one shard's pages, those of the other are of no use.
            right.kill()
            answers = engine.fresh(ASKED)
            assert (same(answers, expected), answers[0].stored) == (True, 0)


def test_ranks_with_the_same_latents_have_one_copy(daemon: LocalDaemon, tmp_path: Path) -> None:
    model, folder = SHAPES["deepseek v2"].save(tmp_path / "model"), tmp_path / "layouts"
    with Client(daemon.url, deadline_s=10.0) as client:
        before = client.status()["counters"].get("stored_blocks", 0)
        with Engine(model, **sharded(daemon, folder)) as first:
            expected = first.store(ASKED)
        keys, layouts = keys_of(ASKED[0], 16), [layout_of(folder, rank) for rank in range(2)]
        assert layouts[0] == layouts[1]
        assert client.namespace(layouts[0]).lookup(keys) == len(keys)
        # What is generated fills a page at most.
        assert len(keys) <= client.status()["counters"]["stored_blocks"] - before <= len(keys) + 1
    with Engine(model, **sharded(daemon, folder)) as second:
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, full_pages(300))
        zero(daemon, layouts[0], keys)
        answers = second.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (False, full_pages(300))


def test_another_number_of_shards_shares_nothing(model: Path, daemon: LocalDaemon, tmp_path: Path) -> None:
    with Engine(model, **sharded(daemon, tmp_path / "layouts")) as both:
        both.store(ASKED)
    with Engine(model, **hicache(daemon)) as one:
        assert one.fresh(ASKED)[0].stored == 0


def test_replicas_share_blocks(plain: Engine, model: Path, daemon: LocalDaemon) -> None:
    asked = [prompt(510 + i, 300) for i in range(2)]
    expected = plain.fresh(asked)
    how = hicache(daemon, model="replicas", engine={"dp_size": 2})
    with Engine(model, environment=ONE_CORE_EACH, **how) as engine:
        # SGLang gives requests to the replicas in turn.
        for each, wanted in zip(asked, expected, strict=True):
            answers = [engine.generate([each])[0] for _ in range(4)]
            assert same(answers, [wanted] * 4)
            assert answers[-1].cached == full_pages(300)
    with Engine(model, **hicache(daemon, model="replicas")) as one:
        answers = one.fresh(asked)
        assert same(answers, expected)
        assert [answer.stored for answer in answers] == [full_pages(300)] * 2
