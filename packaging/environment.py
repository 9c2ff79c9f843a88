"""Makes a virtual environment and installs packages there, with progress. Needs nothing but Python.

    python3 packaging/environment.py FOLDER REQUIREMENT...

On a terminal, one line shows the step, the packages and the time. Elsewhere, each step is a line of its own.
If a step fails, its output is printed and the exit code is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_EVERY_S = 0.2
_BAR_CELLS = 24
_SHOWN_LINES = 30


class Progress:
    """Reads the output of pip: which packages it has found, and how many of them it has installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._installed()
        self.found = 0
        self.to_install = 0

    def feed(self, line: str) -> None:
        """Takes one line of pip's output."""
        if line.startswith("Collecting "):
            self.found += 1
        elif line.startswith("Installing collected packages: "):
            self.to_install = line.count(",") + 1

    def text(self) -> str:
        """Returns the progress as text, with a bar once the number of packages is known."""
        if not self.to_install:
            return f"{self.found} found" if self.found else ""
        done = min(self._installed() - self._before, self.to_install)
        cells = _BAR_CELLS * done // self.to_install
        return f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} {done} of {self.to_install} installed"

    def _installed(self) -> int:
        return sum(1 for _ in self._folder.glob("lib/python*/site-packages/*.dist-info"))


def run(what: str, command: Sequence[str], progress: Progress, out: TextIO) -> int:
    """Runs one step and shows its progress on `out`. Returns the exit code."""
    terminal = out.isatty()
    if not terminal:
        print(what, file=out, flush=True)
    start_s = time.monotonic()
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line)
                progress.feed(line.strip())

        reader = threading.Thread(target=read)
        reader.start()
        while reader.is_alive():
            if terminal:
                _redraw(out, f"{what}: {time.monotonic() - start_s:.0f} s  {progress.text()}")
            reader.join(_EVERY_S)
    if terminal:
        _redraw(out, f"{what}: {time.monotonic() - start_s:.0f} s\n")
    if process.returncode:
        print("".join(last), end="", file=out, flush=True)
    return process.returncode


def _redraw(out: TextIO, text: str) -> None:
    """Replaces the current line of a terminal."""
    columns = os.get_terminal_size(out.fileno()).columns or 80
    out.write(f"\r\x1b[K{text[: columns - 1]}")
    out.flush()


def main(folder: Path, requirements: Sequence[str]) -> int:
    """Makes the environment. Returns the exit code."""
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    version = ".".join(map(str, sys.version_info[:3]))
    steps = {
        f"{folder}: Python {version}": [sys.executable, "-m", "venv", str(folder)],
        f"{folder}: packages, about a minute": [*pip, *requirements],
    }
    for what, command in steps.items():
        try:
            code = run(what, command, Progress(folder), sys.stdout)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        if code:
            print(f"failed with exit code {code}: {' '.join(command)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python3 packaging/environment.py FOLDER REQUIREMENT...")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
