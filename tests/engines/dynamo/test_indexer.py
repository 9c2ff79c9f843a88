"""What Dynamo's own indexer makes of KV events: asked for a prompt, it knows exactly what is stored of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import chain_keys
from tests.daemons import BLOCK, SMALL, WITH_NVME, eventually, idle, payloads

TOKENS = 16
_RUN = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


class Indexer:
    """A process of Dynamo's indexer that listens to one daemon, as its worker 1."""

    def __init__(self, events: str, log: Path) -> None:
        self.port = free_port()
        arguments = ["--port", str(self.port), "--block-size", str(TOKENS), "--model-name", "m"]
        command = [sys.executable, "-c", _RUN, *arguments, "--workers", f"1={events}"]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def matched(self, tokens: np.ndarray) -> dict[str, int]:
        """How many leading tokens it believes to be there, in all and by medium, each with those above it."""
        asked = json.dumps({"model_name": "m", "token_ids": tokens.tolist()}).encode()
        where = f"http://127.0.0.1:{self.port}/query"
        request = urllib.request.Request(where, asked, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)["instances"].get("1", {})
        except urllib.error.URLError:
            return {}  # it has not begun
        return {"all": 0, "gpu": 0, "cpu": 0, "disk": 0} | {
            {"longest_matched": "all"}.get(name, name): n for name, n in found.items() if name != "dp"
        }

    def knows(self, tokens: np.ndarray, **expected: int) -> None:
        """Waits until it believes just that, in blocks; fails if it never does."""
        in_tokens = {name: n * TOKENS for name, n in expected.items()}
        ends = time.monotonic() + 15
        while not (found := self.matched(tokens)) or found | in_tokens != found:
            assert time.monotonic() < ends, f"{found} instead of {in_tokens}"
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def prompt(n: int, seed: int, start: np.ndarray | None = None) -> tuple[np.ndarray, list[bytes]]:
    """Tokens of n blocks, beginning with those of another prompt, and their keys."""
    tokens = np.random.default_rng(seed).integers(0, 32000, n * TOKENS, dtype=np.uint32)
    if start is not None:
        tokens[: len(start)] = start
    return tokens, chain_keys(tokens, TOKENS)


def put(ns: Any, tokens: np.ndarray, keys: list[bytes]) -> None:
    assert not ns.put(keys, payloads(keys), tokens=tokens).denied


@contextmanager
def indexed(settings: Any, folder: Path) -> Iterator[tuple[LocalDaemon, Indexer]]:
    events = f"tcp://127.0.0.1:{free_port()}"
    with LocalDaemon({**settings, "events": {"listen": events}}) as daemon:
        indexer = Indexer(events, folder / "indexer.log")
        try:
            eventually(lambda: indexer.matched(prompt(1, 0)[0]), 30)
            yield daemon, indexer
        finally:
            indexer.stop()


@contextmanager
def namespace(daemon: LocalDaemon) -> Iterator[tuple[Client, Any]]:
    with Client(daemon.url, deadline_s=5) as client:
        yield client, client.namespace(Layout(model="m", block_bytes=BLOCK, block_tokens=TOKENS))


def test_the_indexer_knows_the_stored_blocks_of_each_prompt(tmp_path: Path) -> None:
    with indexed(SMALL, tmp_path) as (daemon, indexer), namespace(daemon) as (_, ns):
        first, second = prompt(20, 1), prompt(12, 2)
        branch = prompt(15, 3, start=first[0][: 8 * TOKENS])
        put(ns, *first)
        put(ns, *branch)
        indexer.knows(first[0], all=20, cpu=20, gpu=0)
        indexer.knows(branch[0], all=15, cpu=15)
        indexer.knows(second[0], all=0)
        ns.invalidate(first[1][10:])
        indexer.knows(first[0], all=10)
        indexer.knows(branch[0], all=15)
        # A hole ends both, and filled again they are whole.
        ns.invalidate(first[1][5:6])
        indexer.knows(first[0], all=5)
        indexer.knows(branch[0], all=5)
        tokens, keys = first
        part = slice(5 * TOKENS, 6 * TOKENS)
        ns.put(keys[5:6], payloads(keys[5:6]), keys[4], tokens=tokens[part])
        indexer.knows(branch[0], all=15)
        indexer.knows(first[0], all=10)


def test_the_indexer_drops_evicted_blocks(tmp_path: Path) -> None:
    settings = {**SMALL, "policy": {"eviction": "lru"}}
    with indexed(settings, tmp_path) as (daemon, indexer), namespace(daemon) as (client, ns):
        prompts = [prompt(100, seed) for seed in range(13)]
        for each in prompts:
            put(ns, *each)
        stored = [ns.lookup(keys) for _, keys in prompts]
        assert sum(stored) == client.status()["blocks"] < 1300
        for (tokens, _), n in zip(prompts, stored, strict=True):
            indexer.knows(tokens, all=n, cpu=n)


def test_the_indexer_knows_the_tier_of_a_block(tmp_path: Path) -> None:
    settings = {**WITH_NVME, "nvme": {"limit": "64MiB", "io_threads": 2, "write_policy": "write_through"}}
    with indexed(settings, tmp_path) as (daemon, indexer), namespace(daemon) as (client, ns):
        tokens, keys = prompt(40, 1)
        put(ns, tokens, keys)
        indexer.knows(tokens, all=40, cpu=40, disk=40)
        for seed in range(2, 14):
            put(ns, *prompt(100, seed))
            eventually(lambda: idle(client.status()))
        indexer.knows(tokens, all=40, cpu=0, disk=40)
        assert ns.get(keys, np.zeros((40, BLOCK), np.uint8)) == 40
        indexer.knows(tokens, all=40, cpu=40)
        ns.invalidate(keys)
        indexer.knows(tokens, all=0, cpu=0, disk=0)


def test_a_late_indexer_gets_the_same_blocks(tmp_path: Path) -> None:
    with indexed(SMALL, tmp_path) as (daemon, indexer), namespace(daemon) as (client, ns):
        tokens, keys = prompt(30, 1)
        put(ns, tokens, keys)
        indexer.knows(tokens, all=30)
        late = Indexer(client.status()["events"]["listen"], tmp_path / "late.log")
        try:
            late.knows(tokens, all=30, cpu=30)
            ns.invalidate(keys[7:])
            late.knows(tokens, all=7)
            indexer.knows(tokens, all=7)
        finally:
            late.stop()


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
def test_the_indexer_knows_nothing_after_a_restart_of_the_daemon(tmp_path: Path, crash: bool) -> None:
    with indexed(WITH_NVME, tmp_path) as (daemon, indexer):
        tokens, keys = prompt(20, 1)
        with namespace(daemon) as (client, ns):
            put(ns, tokens, keys)
            indexer.knows(tokens, all=20, disk=20)
            eventually(lambda: idle(client.status()))
        if crash:
            daemon.kill()
            daemon.start()
        else:
            daemon.restart()
        indexer.knows(tokens, all=0, disk=0)
        with namespace(daemon) as (_, ns):
            assert ns.lookup(keys) == 20
            put(ns, tokens, keys)
            indexer.knows(tokens, all=20, disk=20)
