"""LMCache's own programs with the adapter: its server, as the page starts it, and its benches."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.stores import SETTINGS

PAGE = (Path(__file__).parents[3] / "docs" / "lmcache.md").read_text(encoding="utf-8")
PROGRAM = Path(sys.executable).with_name("lmcache")
ENVIRONMENT = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
SHAPE = "(2,256,16,8,64):bfloat16:4"
SEQUENCES = 3


def command(start: str, url: str) -> list[str]:
    """The command of the page that begins with `start`, for another daemon."""
    [found] = [
        each for each in re.findall(r"```\n(lmcache .*?)```", PAGE, re.DOTALL) if each.startswith(start)
    ]
    words = shlex.split(found.replace("unix:///run/kvstore/kvstore.sock", url))
    return [str(PROGRAM), *words[1:]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(url: str, log: Path) -> Iterator[tuple[int, int]]:
    """LMCache's server, as the page starts it. Yields the ports of requests and of HTTP."""
    ports = free_port(), free_port()
    here = ["--port", str(ports[0]), "--http-host", "127.0.0.1", "--http-port", str(ports[1])]
    # On a CPU: without its metrics, whose port is fixed, and copied by its client.
    here += ["--disable-metrics", "--supported-transfer-mode", "engine_driven", "--l1-size-gb", "0.25"]
    with (
        log.open("w") as out,
        subprocess.Popen(
            [*command("lmcache server", url), *here], env=ENVIRONMENT, stdout=out, stderr=out
        ) as process,
    ):
        try:
            ends = time.monotonic() + 60
            while "cache server is running..." not in log.read_text():
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < ends, log.read_text()[-2000:]
                time.sleep(0.1)
            yield ports
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def bench(ports: tuple[int, int]) -> tuple[dict[str, int], list[str]]:
    """Asks for some prompts twice. Returns hit chunks by lookup, and the checksums of what came."""
    words = ["bench", "server", "--mode", "cpu", "--num-tokens", "512", "--kvcache-shape-spec", SHAPE]
    words += ["--rpc-url", f"tcp://localhost:{ports[0]}", "--url", f"http://127.0.0.1:{ports[1]}"]
    words += ["--start", "0", "--end", str(SEQUENCES), "--interval", "0"]
    ran = subprocess.run(
        [str(PROGRAM), *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    hits = re.findall(r"\[seq (\d/\w+)\] LOOKUP: (\d+)/\d+ chunks hit", ran.stdout)
    sums = re.findall(r"\[seq \d/warm\] CHECKSUM: (\w+)", ran.stdout)
    return {name: int(n) for name, n in hits}, sums


def blocks_stored(url: str) -> int:
    with Client(url, deadline_s=10) as client:
        counters = client.status()["counters"]
    return int(counters.get("stored_blocks", 0))


def test_another_server_loads_what_one_has_stored(tmp_path: Path) -> None:
    with LocalDaemon(SETTINGS) as daemon:
        with server(daemon.url, tmp_path / "first") as ports:
            hits, first = bench(ports)
            assert [hits[f"{i}/cold"] for i in range(SEQUENCES)] == [0] * SEQUENCES
            ends = time.monotonic() + 20
            while blocks_stored(daemon.url) < 2 * SEQUENCES:
                assert time.monotonic() < ends
                time.sleep(0.1)
        with server(daemon.url, tmp_path / "second") as ports:
            hits, second = bench(ports)
            assert [hits[f"{i}/cold"] for i in range(SEQUENCES)] == [2] * SEQUENCES
        log = (tmp_path / "second").read_text()
    assert log.count("2/2 retained keys (0 L1, 2 L2)") >= SEQUENCES
    assert len(first) == SEQUENCES
    assert len(set(first)) == SEQUENCES
    assert second == first


def test_without_the_daemon_the_server_serves(tmp_path: Path) -> None:
    with server(f"unix://{tmp_path}/none", tmp_path / "log") as ports:
        hits, sums = bench(ports)
    assert [hits[f"{i}/warm"] for i in range(SEQUENCES)] == [2] * SEQUENCES, "from its own memory"
    assert len(sums) == SEQUENCES


def test_the_bench_of_lmcache_verifies_what_it_loads() -> None:
    with LocalDaemon(SETTINGS) as daemon:
        ran = subprocess.run(
            [*command("lmcache bench", daemon.url), "--num-keys", "8", "--rounds", "2"],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        assert "All 8 keys data verified OK" in ran.stdout
        assert blocks_stored(daemon.url) >= 16


@pytest.mark.parametrize("name", ["url", "deadline_s", "num_workers", "revision"])
def test_the_page_has_every_option(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE)
