"""The flags and the request of docs/sglang.md, with SGLang's HTTP server."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.sglang.engine import BASE
from tests.programs import need

PAGE = (Path(__file__).parents[3] / "docs/sglang.md").read_text(encoding="utf-8")
START_S = 90.0


def flags(model: Path, url: str, port: int) -> list[str]:
    """The page's command, for this model and daemon, with what a CPU without kernels needs."""
    [command] = re.findall(r"```\n(python -m sglang.launch_server .*?)```", PAGE, re.DOTALL)
    text = command.replace("MODEL", str(model)).replace("unix:///run/kvstore/kvstore.sock", url)
    words = shlex.split(text.replace("\\\n", ""))[3:]
    for name, value in BASE.items():
        if name == "page_size":
            continue
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*words, "--host", "127.0.0.1", "--port", str(port)]


def serve(words: list[str], log: str) -> None:
    """What `python -m sglang.launch_server` does, in a fork that has imported SGLang."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    from sglang.launch_server import run_server  # noqa: PLC0415 - slow, and for this process only
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    load_plugins()
    run_server(prepare_server_args(words))


@contextmanager
def server(model: Path, daemon: LocalDaemon, log: Path) -> Iterator[int]:
    """SGLang's server with the page's flags; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.sglang.imports"])
    process = context.Process(target=serve, args=(flags(model, daemon.url, port), str(log)))
    process.start()
    try:
        ends_s = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.is_alive(), log.read_text()[-4000:]
                assert time.monotonic() < ends_s, log.read_text()[-4000:]
                time.sleep(0.1)
        yield port
    finally:
        assert process.pid
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(10)


def test_the_lines_of_the_page_show_a_hit_after_a_restart(
    model: Path, daemon: LocalDaemon, tmp_path: Path
) -> None:
    need("curl")
    [line] = re.findall(r"```\n(curl .*?)```", PAGE, re.DOTALL)
    [told] = re.findall(r'"cached_tokens": (\d+), "cached_tokens_details"', PAGE)
    answers = []
    for _ in range(2):
        with server(model, daemon, tmp_path / "log") as port:
            words = line.replace("\\\n", "").replace("localhost:30000", f"127.0.0.1:{port}")
            ran = subprocess.run(
                ["bash", "-c", words], capture_output=True, text=True, timeout=60, check=True
            )
            answers.append(json.loads(ran.stdout))
            with Client(daemon.url, deadline_s=10.0) as client:
                eventually(lambda client=client: client.status()["counters"].get("stored_blocks", 0) >= 7)
    first, again = (answer["meta_info"] for answer in answers)
    assert (first["cached_tokens"], first["prompt_tokens"]) == (0, 500)
    assert again["cached_tokens"] == again["cached_tokens_details"]["storage"] == int(told)
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
