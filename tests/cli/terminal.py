"""Runs `kvstore` on a terminal of a given width."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.spawner import spawn

_ROWS = 200


class Terminal:
    """A process and its terminal. `raw` is what it has written so far, with escape sequences."""

    def __init__(self, process: Any, controller: int) -> None:
        self.process, self._controller, self.raw = process, controller, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> bool:
        """Waits for output. Returns whether there was any; False at the end of the process."""
        try:
            part = os.read(self._controller, 1 << 16)
        except OSError:  # the last process has closed the terminal
            part = b""
        # A read may end within a character.
        self.raw += self._decoder.decode(part)
        return bool(part)

    def read_until(self, wanted: str) -> str:
        """Returns the text once it contains `wanted`. Fails if the process ends before."""
        while wanted not in self.text:
            assert self.read(), self.text
        return self.text

    def read_to_end(self) -> str:
        """Returns the text when the process has ended."""
        while self.read():
            pass
        return self.text

    @property
    def text(self) -> str:
        """The output without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw).replace("\r\n", "\n")


@contextmanager
def terminal(*args: str, columns: int = 100, **env: str) -> Iterator[Terminal]:
    """Starts `kvstore` with these arguments on a terminal. Ends it at the end of the block."""
    controller, terminal_fd = pty.openpty()
    fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    variables |= {"TERM": "xterm-256color", **env}
    command = [sys.executable, "-m", "kvstore", *args]
    process = spawn(command, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, env=variables)
    os.close(terminal_fd)
    try:
        yield Terminal(process, controller)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        os.close(controller)


def on_terminal(*args: str, columns: int = 100, code: int = 0, **env: str) -> Terminal:
    """Runs `kvstore` to its end on a terminal."""
    with terminal(*args, columns=columns, **env) as shown:
        shown.read_to_end()
        assert shown.process.wait(30) == code, shown.text
    return shown
