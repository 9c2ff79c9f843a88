"""LMCache's own programs with the adapter: its server, as the page starts it, and its benches."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.lmcache.server import ENVIRONMENT, PAGE, PROGRAM, blocks_stored, command, server
from tests.engines.stores import SETTINGS

SHAPE = "(2,256,16,8,64):bfloat16:4"
SEQUENCES = 3


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


def test_a_request_for_the_keys_is_answered_with_the_reason(tmp_path: Path) -> None:
    with LocalDaemon(SETTINGS) as daemon, server(daemon.url, tmp_path / "log") as (_, port):
        with pytest.raises(HTTPError) as raised:
            urlopen(f"http://127.0.0.1:{port}/cache/objects", timeout=20)
        assert raised.value.code == 503
        assert "the daemon keeps digests of LMCache's keys" in raised.value.read().decode()


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
