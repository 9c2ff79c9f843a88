"""Runs pasted command lines as a user does in several terminals, and waits until servers answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.engines.vllm.engine import ENVIRONMENT

SMALL = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""For vLLM as a user starts it, on a machine with few cores and little memory: 1 GiB of KV cache."""


class Terminals:
    """Processes with one environment and one folder. The end of the block ends those that still run."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, {**os.environ, **SMALL, "COLUMNS": "100", **env}
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, line: str, timeout_s: float = 300.0) -> str:
        """Runs a line to its end, which must be a success. Returns its output."""
        ran = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=self._folder, env=self._env, text=True,
            capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def start(
        self, line: str, ready: Callable[[], bool], timeout_s: float = 300.0
    ) -> subprocess.Popen[bytes]:
        """Starts a line that runs until it is stopped. Returns once `ready`."""
        with (self._folder / "terminal.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self._folder, env=self._env, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        ends = time.monotonic() + timeout_s
        while not ready():
            said = (self._folder / "terminal.log").read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"{line}\nended with {process.returncode}: {said}"
            assert time.monotonic() < ends, f"{line}\ndoes not serve: {said}"
            time.sleep(0.2)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a process as Ctrl-C or a container's stop does."""
        process.terminate()
        try:
            process.wait(60)
        finally:
            self._running.remove(process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def __enter__(self) -> Terminals:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running[:]):
            self.stop(process)


def healthy(port: int) -> bool:
    """Returns whether a vLLM server answers."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def blocks(text: str) -> list[tuple[str, str]]:
    """Returns language and content of the fenced blocks of a text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def lines(block: str) -> list[str]:
    """Returns the commands of a block: a line ends outside quotes and without a backslash."""
    made, line = [], ""
    for part in block.splitlines():
        line += part + "\n"
        if line.count("'") % 2 == 0 and not part.endswith("\\"):
            made.append(line.strip())
            line = ""
    assert not line, block
    return made


def columns(text: str) -> list[list[str]]:
    """Returns the words of each line: tables are compared without their widths."""
    return [line.split() for line in text.splitlines() if line.strip()]
