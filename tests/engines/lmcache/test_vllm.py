"""vLLM, LMCache's connector in it, LMCache's server, and a daemon as its L2: what is loaded changes no token.

vLLM's environment gets LMCache's client part from the environment of these tests. Between a store and a load
the server is another one, so its own memory is empty.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmcache
import pytest
import sortedcontainers
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvstore import Client, Layout, Namespace
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_lmcache.naming import keys_of
from tests.daemons import eventually
from tests.engines.environments import environment, interpreter
from tests.engines.lmcache.server import PAGE, QUIET, blocks_stored, server
from tests.engines.vllm.engine import Engine, cached, prompt, said
from tests.engines.vllm.shapes import SHAPES, need_fp8_kv
from tests.engines.vllm.stored import damage, store_again

ASKED = prompt(1700, 600)
CHUNK_TOKENS = 256
WINDOWS = "interleaved windows"
SHARDS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PIECES = {"max_num_batched_tokens": 96, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two processes of vLLM, whose engines the tests replace."""
    folder = tmp_path_factory.mktemp("packages")
    for package in (lmcache, sortedcontainers):
        [source] = package.__path__
        (folder / package.__name__).symlink_to(source)
    path = f"{environment()['PYTHONPATH']}:{folder}"
    variables = {**QUIET, "PYTHONPATH": path, "KVSTORE_VLLM_IN_TESTS": "1"}
    model = SHAPES["llama"].save(tmp_path_factory.mktemp("model"))
    with (
        Engine(model, interpreter("vllm"), variables=variables) as one,
        Engine(model, interpreter("vllm"), variables=variables) as other,
    ):
        yield [one, other]


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    settings = {"dram": {"limit": "256MiB", "huge_pages": False}, "scrub": {"rate": 0}}
    with LocalDaemon(settings) as daemon:
        yield daemon


@contextmanager
def behind(engine: Engine, daemon: LocalDaemon, log: Path, *more: str, **options: Any) -> Iterator[None]:
    """LMCache's server, and an engine using it by the flag of the page. Afterwards, the engine is plain."""
    [flag] = re.findall(r"--kv-transfer-config '(.*?)'", PAGE, re.DOTALL)
    with server(daemon.url, log, *more) as (port, _):
        transfer = json.loads(flag.replace("5555", str(port)))
        engine.restart(**options, kv_transfer_config=transfer)
        try:
            yield
        finally:
            # A connector whose server has gone waits for it.
            engine.restart(**options)


def stored(client: Client, model: str, salt: str = "", shards: int = 1) -> tuple[list[bytes], Namespace]:
    """The keys of the chunks of `ASKED` by LMCache's own hashes, shard by shard, and their namespace."""
    rows = client.control("namespaces")["namespaces"]
    [layout] = [row["layout"] for row in rows if row["layout"]["model"] == model]
    hashes = TokenHasher(CHUNK_TOKENS).compute_chunk_hashes(ASKED)
    ranks = [ObjectKey.ComputeKVRank(shards, rank, shards, rank) for rank in range(shards)]
    names = [ObjectKey(digest, model, rank, 0, salt) for rank in ranks for digest in hashes]
    return [keys_of(name, 1)[0] for name in names], client.namespace(Layout(**layout))


CELLS = {
    "llama": ("llama", {}, ()),
    "grouped queries": ("grouped queries", {}, ()),
    "experts": ("experts", {}, ()),
    "partial rope": ("partial rope", {}, ()),
    "a window": ("window smaller than the prompt", {}, ()),
    "two shards": ("llama", SHARDS, ()),
    "pieces": ("llama", PIECES, ()),
    "FP8 KV": ("llama", {"kv_cache_dtype": "fp8"}, ()),
    "one group of two kinds": (WINDOWS, {"disable_hybrid_kv_cache_manager": True}, ()),
    "shared memory": ("llama", {}, ("--no-l1-use-lazy", "--shm-name", f"kvstore-{os.getpid()}")),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_load_through_lmcache_changes_nothing(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path, cell: str
) -> None:
    name, options, more = CELLS[cell]
    if "kv_cache_dtype" in options:
        need_fp8_kv()
    model, (one, other) = str(SHAPES[name].save(tmp_path / "model")), processes
    options = {"model": model, "max_model_len": 1024, **SHAPES[name].engine, **options}
    shards, before = options.get("tensor_parallel_size", 1), blocks_stored(own.url)
    loaded = len(ASKED) // CHUNK_TOKENS * CHUNK_TOKENS
    with behind(one, own, tmp_path / "first", *more, **options):
        first = one.fresh([ASKED])
        eventually(lambda: blocks_stored(own.url) == before + 2 * shards, 20)
    assert (said(first), cached(first)) == (said(one.fresh([ASKED])), [0])
    # On some CPUs vLLM computes other bits behind any prefix than without one.
    one.fresh([ASKED[: loaded + 8]], max_tokens=1)
    answers = one.generate([ASKED])
    expected = said(answers)
    assert cached(answers) == [loaded]
    with (
        behind(other, own, tmp_path / "second", *more, **options),
        Client(own.url, deadline_s=10.0) as client,
    ):
        answers = other.fresh([ASKED])
        assert (said(answers), cached(answers)) == (expected, [loaded])
        keys, namespace = stored(client, model, shards=shards)
        assert len(keys) == 2 * shards
        store_again(namespace, keys, zero=True)
        answers = other.fresh([ASKED])
        assert cached(answers) == [loaded]
        assert said(answers) != expected
    log = (tmp_path / "second").read_text()
    assert ("Using shm" in log) == bool(more)
    assert log.count(f"{2 * shards}/{2 * shards} retained keys (0 L1, {2 * shards} L2)") == 2


def test_another_salt_loads_nothing(processes: list[Engine], own: LocalDaemon, tmp_path: Path) -> None:
    model, (one, other) = str(SHAPES["llama"].save(tmp_path / "model")), processes
    before = blocks_stored(own.url)
    with behind(one, own, tmp_path / "first", model=model):
        one.fresh([ASKED], salt="a")
        eventually(lambda: blocks_stored(own.url) == before + 2, 20)
    with behind(other, own, tmp_path / "second", model=model):
        assert [cached(other.fresh([ASKED], salt=salt)) for salt in (None, "b", "a")] == [[0], [0], [512]]


def test_a_damaged_chunk_is_computed(
    processes: list[Engine], own_daemon: LocalDaemon, tmp_path: Path
) -> None:
    """And so is everything after the daemon has gone."""
    model, (one, other) = str(SHAPES["llama"].save(tmp_path / "model")), processes
    with behind(one, own_daemon, tmp_path / "first", model=model):
        one.fresh([ASKED])
        eventually(lambda: blocks_stored(own_daemon.url) == 2, 20)
    one.fresh([ASKED[: CHUNK_TOKENS + 8]], max_tokens=1)
    expected = said(one.generate([ASKED]))
    with behind(other, own_daemon, tmp_path / "second", model=model):
        with Client(own_daemon.url, deadline_s=10.0) as client:
            keys, namespace = stored(client, model)
            damage(client, namespace, keys[1])
        answers = other.fresh([ASKED])
        assert (said(answers), cached(answers)) == (expected, [CHUNK_TOKENS])
        own_daemon.kill()
        asked = prompt(1702, 600)
        answers = [other.fresh([asked]) for _ in range(2)]
    assert list(map(cached, answers)) == [[0], [512]], "the second time from LMCache's own memory"
    assert said(answers[0]) == said(one.fresh([asked]))


@pytest.mark.parametrize("name", [WINDOWS, "sinks", "chunks", "two block sizes", "linear attention"])
def test_lmcache_refuses_models_of_several_groups_on_a_cpu(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path, name: str
) -> None:
    shape = SHAPES[name]
    options = {"model": str(shape.save(tmp_path / "model")), "max_model_len": 1024, **shape.engine}
    # vLLM's blocks of that shape have 544 tokens.
    more = ("--chunk-size", "544") if name == "linear attention" else ()
    with (
        pytest.raises(RuntimeError, match="does not support multiple KV transfer groups"),
        behind(processes[0], own, tmp_path / "log", *more, **options),
    ):
        pass
