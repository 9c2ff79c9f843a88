"""LMCache's server with the adapter, as the page starts it."""

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

from kvstore import Client

PAGE = (Path(__file__).parents[3] / "docs" / "lmcache.md").read_text(encoding="utf-8")
PROGRAM = Path(sys.executable).with_name("lmcache")
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
ENVIRONMENT = {**os.environ, **QUIET}


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
def server(url: str, log: Path, *more: str) -> Iterator[tuple[int, int]]:
    """LMCache's server, as the page starts it, and more options. Yields the ports of requests and HTTP."""
    ports = free_port(), free_port()
    here = ["--port", str(ports[0]), "--http-host", "127.0.0.1", "--http-port", str(ports[1])]
    # On a CPU: without its metrics, whose port is fixed, and copied by its client.
    here += ["--disable-metrics", "--supported-transfer-mode", "engine_driven", "--l1-size-gb", "0.25"]
    with (
        log.open("w") as out,
        subprocess.Popen(
            [*command("lmcache server", url), *here, *more], env=ENVIRONMENT, stdout=out, stderr=out
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


def blocks_stored(url: str) -> int:
    with Client(url, deadline_s=10) as client:
        counters = client.status()["counters"]
    return int(counters.get("stored_blocks", 0))
