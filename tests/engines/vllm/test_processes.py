"""Several processes: two engines on one daemon, engines that come back, shards of one model."""

from __future__ import annotations

import time
from pathlib import Path

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.stored import answers_from_the_store, blocks_of, damage

DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}


def test_engines_share_a_daemon_and_restart_independently(
    model: Path, plain: Engine, daemon: LocalDaemon
) -> None:
    asked = [prompt(600 + i, 300) for i in range(8)]
    expected = said(plain.fresh(asked, max_tokens=32))
    flag = connector(daemon, weights_revision="shared")
    hits = [full_blocks(300)]
    with Engine(model, **flag) as first:
        first.fresh(asked[:4], max_tokens=32)
        with Engine(model, **flag) as second:
            # Both at once, each with half of the other's prompts.
            first.send("generate", prompts=asked[2:6], max_tokens=32)
            answers = second.generate(asked[:4], max_tokens=32)
            assert said(answers) == expected[:4]
            assert cached(answers) == hits * 4
            assert said(first.receive()) == expected[2:6]

            # One is killed while it stores and loads: the other does not notice.
            first.send("generate", prompts=asked, max_tokens=32)
            time.sleep(0.1)
            first.kill()
            assert said(second.fresh(asked, max_tokens=32)) == expected
            answers = second.fresh(asked, max_tokens=32)
            assert (said(answers), cached(answers)) == (expected, hits * 8)
            assert second("failures") == {}
    with Engine(model, **flag) as third:
        answers = third.generate(asked, max_tokens=32)
        assert (said(answers), cached(answers)) == (expected, hits * 8)
    with Client(daemon.url, deadline_s=10.0) as client:
        status = client.status()
    assert (status["leases"], status["reservations"]) == (0, 0)


def test_each_shard_has_its_own_blocks(model: Path) -> None:
    """Two tensor-parallel workers: only what both can load is a hit."""
    asked = [prompt(620 + i, 300) for i in range(2)]
    shards = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine(model, **shards) as plain:
        expected = said(plain.generate(asked))
    with LocalDaemon(DRAM_ONLY) as own:
        with Engine(model, **shards, **connector(own)) as engine, Client(own.url, deadline_s=10.0) as client:
            for found in (0, full_blocks(300)):
                answers = engine.fresh(asked)
                assert (said(answers), cached(answers)) == (expected, [found] * 2)
            status = client.status()
            assert status["namespaces"] == 2
            assert status["blocks"] == 2 * 2 * 9
            keys, of_the_second = blocks_of(engine, client, asked[0], 0, shard=1)
            of_the_second.invalidate(keys[4:])
            answers = engine.fresh(asked[:1])
            assert (said(answers), cached(answers)) == (expected[:1], [4 * BLOCK_TOKENS])
            # One worker loads a block that the other finds damaged.
            damage(client, of_the_second, keys[2])
            assert said(engine.fresh(asked[:1])) == expected[:1]
            assert eventually(lambda: client.status()["counters"].get("quarantined_blocks")) == 1
            # Until it is verified it counts as stored, so the first answer may not have replaced it.
            answers = engine.hit(asked[0], full_blocks(300))
            assert (said(answers), cached(answers)) == (expected[:1], [full_blocks(300)])
            assert answers_from_the_store(engine, own, asked[0])
        with Engine(model, **connector(own)) as alone:
            assert cached(alone.generate(asked)) == [0, 0]
