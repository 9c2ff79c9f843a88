"""Several processes: two engines on one daemon, engines that come back, shards of one model."""

from __future__ import annotations

import time
from pathlib import Path

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said


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
    with LocalDaemon({"dram": {"limit": "64MiB", "huge_pages": False}}) as own:
        with Engine(model, **shards, **connector(own)) as engine:
            expected = said(engine.fresh(asked))
            answers = engine.fresh(asked)
            assert (said(answers), cached(answers)) == (expected, [full_blocks(300)] * 2)
            with Client(own.url, deadline_s=10.0) as client:
                status = client.status()
            assert status["namespaces"] == 2
            assert status["blocks"] == 2 * 2 * 9
            assert engine("failures") == {}
        with Engine(model, **connector(own)) as alone:
            assert cached(alone.generate(asked)) == [0, 0]
