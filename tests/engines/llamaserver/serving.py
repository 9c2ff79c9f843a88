"""Runs llama-server, alone or behind the proxy, and asks it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.engines.gguf_models import BLOCK
from tests.engines.llamaserver.build import program

START_S = 120.0
ANSWER_S = 60.0
RUNS_MAIN = "from kvstore_llamacpp.proxy.command import main; raise SystemExit(main())"
SIZES = ("-c", "512", "-np", "2")
ONE_LONG = ("-c", "4096", "-np", "1")
"""One slot, for an answer of seconds."""
_QUIET = ("-t", "1", "-tb", "1", "--threads-http", "20", "--no-warmup", "-lv", "0")


class Served:
    """An HTTP server that answers as llama-server does: the proxy, or llama-server alone."""

    def __init__(
        self,
        command: list[str],
        port: int,
        log: Path,
        variables: Mapping[str, str] = {},
        folder: Path | None = None,
    ) -> None:
        self.port = port
        self.log = log
        self._command = command
        self._folder = folder
        self._variables = {**os.environ, **variables}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables,
                cwd=self._folder,
            )
        ends = time.monotonic() + START_S
        while not self._is_ready():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < ends, self.output()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        # The proxy's socket listens before it can answer.
        with suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/health", timeout_s=START_S)[0] == 200
        return False

    def stop(self, how: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(30)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    @property
    def server_pid(self) -> int:
        """The process id of the latest llama-server behind a proxy."""
        return int(re.findall(r"llama-server: port \d+, pid (\d+)", self.output())[-1])

    @property
    def server_port(self) -> int:
        """The port of the latest llama-server behind a proxy."""
        return int(re.findall(r"llama-server: port (\d+)", self.output())[-1])

    # -- requests

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = {},
        timeout_s: float = ANSWER_S,
        port: int | None = None,
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout_s)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def post(self, path: str, body: Any, **more: Any) -> Any:
        status, said = self.ask("POST", path, body, **more)
        assert status == 200, (status, said)
        return said

    def complete(self, prompt: Any, n: int = 12, **more: Any) -> dict[str, Any]:
        """The answer to a prompt, with the likeliest token each time."""
        return self.post("/completion", {"prompt": prompt, "n_predict": n, **GREEDY, **more})

    def text(self, prompt: Any, n: int = 12) -> str:
        return str(self.complete(prompt, n)["content"])

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            raw = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """What the proxy has counted."""
        return dict(self.ask("GET", "/kvstore/status")[1])

    def settled(self) -> dict[str, Any]:
        """The same, once no slot is in use: stores happen after answers."""
        ends = time.monotonic() + ANSWER_S
        while (said := self.status())["free_slots"] < said["slots"]:
            assert time.monotonic() < ends, said
            time.sleep(0.01)
        return said


GREEDY = {"temperature": 0, "seed": 7, "ignore_eos": True}


def timings(said: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens of a prompt that llama-server had, and those that it evaluated."""
    return said["timings"]["cache_n"], said["timings"]["prompt_n"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def alone(model: Path, folder: Path, *arguments: str) -> Iterator[Served]:
    """llama-server without the proxy, with one unified buffer as the proxy has."""
    port = free_port()
    command = [str(program()), "-m", str(model), *SIZES, *_QUIET, "--host", "127.0.0.1", "--port", str(port)]
    made = Served(
        [*command, "--kv-unified", "--cache-ram", "0", *arguments], port, folder / f"alone-{port}.log"
    )
    with _running(made):
        yield made


@contextmanager
def proxied(
    model: Path,
    folder: Path,
    url: str,
    *arguments: str,
    options: tuple[str, ...] = (),
    runs: str = RUNS_MAIN,
    variables: Mapping[str, str] = {},
    server: Path | None = None,
) -> Iterator[Served]:
    """The proxy with llama-server. `runs`: the code that runs it, which may change it first."""
    port = free_port()
    own = ["--listen", f"127.0.0.1:{port}", "--url", url, "--restore", "always", "--block-tokens", str(BLOCK)]
    behind = [str(server or program()), "-m", str(model), *SIZES, *_QUIET, *arguments]
    command = [sys.executable, "-c", runs, *own, "--deadline", "5", *options, "--", *behind]
    made = Served(command, port, folder / f"proxy-{port}.log", variables)
    with _running(made):
        yield made


@contextmanager
def pasted(arguments: list[str], folder: Path, url: str) -> Iterator[Served]:
    """The proxy with arguments of the documentation. Programs are found in `bin` of the folder too."""
    port = free_port()
    command = [sys.executable, "-c", RUNS_MAIN, "--listen", f"127.0.0.1:{port}", *arguments]
    variables = {"KVSTORE_SOCKET": url, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    made = Served(command, port, folder / f"pasted-{port}.log", variables, folder)
    with _running(made):
        yield made


@contextmanager
def _running(made: Served) -> Iterator[Served]:
    try:
        made.start()
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.process.terminate()
            made.process.wait(30)
