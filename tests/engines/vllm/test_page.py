"""The flags and the example of docs/vllm.md, with vLLM's own processes around its engine core."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.collector import collector
from tests.daemons import eventually
from tests.engines.vllm.engine import BLOCK_TOKENS, ENVIRONMENT, full_blocks, prompt
from tests.programs import need
from tests.spawner import spawn

pytestmark = pytest.mark.alone
PAGE = (Path(__file__).parents[3] / "docs/vllm.md").read_text(encoding="utf-8")
SERVERS = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def test_the_example_runs_as_pasted(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    command = [sys.executable, str(tmp_path / "example.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=SERVERS)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [line for line in ran.stdout.splitlines() if line.isdecimal()] == ["0", "768"]


@contextmanager
def server(
    model: Path,
    flag: str,
    options: Sequence[str] = ("--skip-tokenizer-init",),
    log: Any = None,
    **variables: str,
) -> Iterator[str]:
    """vLLM's HTTP server, with the page's command; yields its address. `log`: a file for what it prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable, "-m", "tests.engines.vllm.api_server", "--model", str(model),
        "--kv-transfer-config", flag, "--host", "127.0.0.1", "--port", port, *options,
        "--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048",
        "--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details",
    ]  # fmt: skip
    errors = sys.__stderr__.fileno() if log is None and sys.__stderr__ else log
    process = spawn(command, env=SERVERS | variables, stdout=errors, stderr=errors)
    url = f"http://127.0.0.1:{port}"
    try:
        ends = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < ends, "the server does not come up"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def complete(
    url: str,
    model: Path,
    tokens: list[int],
    timeout_s: float = 60.0,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One completion. `more`: further fields of the request."""
    body = {
        "model": str(model), "prompt": tokens, "max_tokens": 16, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False, **more,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return dict(json.load(answer))


def cached_tokens(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def shell_lines(url: str, model: Path) -> list[str]:
    """The page's lines for a shell, for this server instead of the page's."""
    lines, _ = re.findall(r"```\n(curl .*?)```", PAGE, re.DOTALL)
    text = (
        lines.replace("\\\n", "")
        .replace("localhost:8000", url.removeprefix("http://"))
        .replace("MODEL", str(model))
    )
    # The server has no tokenizer.
    return text.replace('\\"max_tokens\\": 8', '\\"max_tokens\\": 8, \\"detokenize\\": false').splitlines()


def flag_of_the_page(url: str) -> str:
    """The value of the page's first flag, for this daemon."""
    [flag] = re.findall(r"--kv-transfer-config '(\{\n.*?\})'\n", PAGE, re.DOTALL)
    return str(flag).replace("unix:///run/kvstore/kvstore.sock", url)


def shell(line: str) -> str:
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_lines_of_the_page_show_a_hit_after_a_restart(model: Path) -> None:
    need("curl")
    with LocalDaemon({"dram": {"limit": "64MiB", "huge_pages": False}}) as own:
        flag = flag_of_the_page(own.url)
        for found in (0, full_blocks(500)):
            with server(model, flag) as url:
                send, count = shell_lines(url, model)
                assert json.loads(shell(send))["usage"]["prompt_tokens"] == 500
                eventually(lambda count=count, found=found: float(shell(count).split()[-1]) == found)


def test_the_flags_serve_and_a_restarted_server_finds_its_blocks(model: Path) -> None:
    asked = prompt(700, 300)
    with LocalDaemon({"dram": {"limit": "64MiB", "huge_pages": False}}) as own:
        flag = flag_of_the_page(own.url)
        with server(model, flag) as url:
            first = complete(url, model, asked)
            assert cached_tokens(first) == 0
            # Eight clients at once that hang up in the middle: the server goes on, nothing stays leased.
            gone = [
                threading.Thread(target=hang_up, args=(url, model, prompt(710 + i, 600))) for i in range(8)
            ]
            for thread in gone:
                thread.start()
            for thread in gone:
                thread.join()
            again = complete(url, model, asked)
            assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        with server(model, flag) as url:
            again = complete(url, model, asked)
            assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
            assert cached_tokens(again) == full_blocks(300)
        with Client(own.url, deadline_s=10.0) as client:
            status = client.status()
        assert (status["leases"], status["reservations"]) == (0, 0)


def hang_up(url: str, model: Path, tokens: list[int]) -> None:
    """Asks for a long answer and leaves before it can be there."""
    try:
        complete(url, model, tokens, timeout_s=0.3, max_tokens=1000)
    except (TimeoutError, urllib.error.URLError):
        return
    raise AssertionError("a thousand tokens in 0.3 s")


def test_a_request_with_a_traceparent_has_one_trace_from_vllm_to_the_daemon(model: Path) -> None:
    trace = "ab" * 16
    traceparent = {"traceparent": f"00-{trace}-{'cd' * 8}-01"}
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with collector() as to:
        settings = {"dram": {"limit": "64MiB", "huge_pages": False}, "tracing": {"collector": to.url}}
        flags = "--skip-tokenizer-init", "--otlp-traces-endpoint", f"{to.url}/v1/traces"
        with (
            LocalDaemon(settings) as own,
            server(model, flag_of_the_page(own.url), flags, **protocol) as url,
        ):
            complete(url, model, prompt(901, 300), headers=traceparent)
            complete(url, model, prompt(900, 300))
            # vLLM exports what waits every 5 s.
            [lookup] = eventually(lambda: to.named("kvstore.lookup"), 30)
            [request] = eventually(lambda: [x for x in to.named("llm_request") if x.trace.hex() == trace], 30)
            # Later lookups are answered from the presence table, without a request.
            opened = eventually(lambda: to.named("kvstore.daemon.open"), 30)
    assert request.parent.hex() == lookup.parent.hex() == "cd" * 8
    assert {each.parent for each in opened} == {lookup.span}
    assert {each.trace.hex() for each in to.spans if each.name.startswith("kvstore")} == {trace}
