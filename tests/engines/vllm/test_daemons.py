"""Several daemons for one engine: each has the blocks of some of its shards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import Client, Layout
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.identity import shard_name, shard_number
from kvstore_vllm.lookup import Lookup
from kvstore_vllm.metrics import UNANSWERED, reason_of
from kvstore_vllm.prefill_rate import PrefillRate
from tests.daemons import eventually, names
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.test_halves import BLOCK_BYTES, GROUP, store
from tests.processes import stop

DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}
SHARDS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_WITHIN_S = 0.5


@pytest.fixture
def two() -> Iterator[list[LocalDaemon]]:
    with LocalDaemon(DRAM_ONLY) as first, LocalDaemon(DRAM_ONLY) as second:
        yield [first, second]


def joined(daemons: list[LocalDaemon]) -> str:
    return ",".join(daemon.url for daemon in daemons)


def layouts(shards: int) -> list[Layout]:
    return [
        Layout(model="shards", block_bytes=BLOCK_BYTES, shard=shard_name(n, shards, 0, 1))
        for n in range(shards)
    ]


def finder(daemons: Daemons, shards: list[Layout], keys: list[bytes]) -> Callable[[], int]:
    """What finds how many blocks of a prompt all shards have."""
    lookup = Lookup(daemons, [GROUP], PrefillRate(2048), _WITHIN_S)
    lookup.meet([[each] for each in shards], "")
    asked = SimpleNamespace(block_hashes=keys, num_tokens=32 * len(keys) + 1)
    return lambda: lookup.find(asked, b"", True).tokens // 32


def stored_blocks(daemon: LocalDaemon) -> int:
    with Client(daemon.url, deadline_s=10.0) as client:
        return int(client.status()["blocks"])


def test_every_shard_has_a_number_of_its_own() -> None:
    names_of = [shard_name(rank, 4, stage, 3) for stage in range(3) for rank in range(4)]
    assert [shard_number(each) for each in names_of] == list(range(12))


def test_shards_are_dealt_out_evenly(two: list[LocalDaemon]) -> None:
    daemons = Daemons.at(joined(two), 1.0)
    assert [f"unix://{daemons.of(each).path}" for each in layouts(4)] == [each.url for each in two] * 2
    daemons.close()


@pytest.mark.parametrize("urls", ["unix:///a.sock,", "unix:///a.sock,unix:///a.sock", "unix:///a.sock,b"])
def test_an_invalid_list_is_refused(urls: str) -> None:
    with pytest.raises(MisuseError):
        Daemons.at(urls, 1.0)


def test_a_prefix_is_found_as_far_as_each_shards_daemon_has_it(two: list[LocalDaemon]) -> None:
    keys, shards = names(6), layouts(4)
    daemons = Daemons.at(joined(two), 1.0)
    found = finder(daemons, shards, keys)
    for n, shard in enumerate(shards):
        assert found() == 0
        store(daemons.of(shard), shard, keys[: 6 - n])
    assert eventually(found) == 3
    daemons.of(shards[1]).namespace(shards[1]).invalidate(keys[2:])
    assert eventually(lambda: found() == 2)
    two[0].stop()
    with pytest.raises(UNANSWERED):
        found()
    daemons.close()


def test_daemons_answer_by_one_deadline(two: list[LocalDaemon]) -> None:
    """A daemon that is late is a miss of the whole prompt."""
    daemons = Daemons.at(joined(two), 1.0)
    found = finder(daemons, layouts(2), names(6))
    for each in two:
        stop(each.pid)
    began = time.monotonic()
    try:
        with pytest.raises(UNANSWERED) as late:
            found()
    finally:
        for each in two:
            os.kill(each.pid, signal.SIGCONT)
    assert reason_of(late.value) == "late"
    assert _WITHIN_S <= time.monotonic() - began < 3 * _WITHIN_S
    daemons.close()


def test_shards_of_an_engine_use_a_daemon_each(model: Path, two: list[LocalDaemon]) -> None:
    asked = [prompt(640 + i, 300) for i in range(2)]
    with Engine(model, **SHARDS) as plain:
        expected = said(plain.generate(asked))
    with Engine(model, **SHARDS, **connector(joined(two))) as engine:
        for found in (0, full_blocks(300)):
            answers = engine.fresh(asked)
            assert (said(answers), cached(answers)) == (expected, [found] * 2)
        assert [stored_blocks(each) for each in two] == [2 * 9, 2 * 9]
        # Without the second shard's blocks, those of the first are of no use.
        two[1].kill()
        answers = engine.fresh(asked)
        assert (said(answers), cached(answers)) == (expected, [0, 0])
        two[1].start()
        assert eventually(lambda: cached(engine.fresh(asked)) == [full_blocks(300)] * 2, 30)
        assert said(engine.fresh(asked)) == expected
        assert engine("failures") == {}
