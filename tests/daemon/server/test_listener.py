"""Connections are accepted while there is room for their descriptors, and again when there is."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.daemon.server.listener import Listener, listen


class Short(socket.socket):
    """A listening socket that runs out of descriptors: a fake of the kernel's answer."""

    out = 0

    def accept(self) -> tuple[socket.socket, object]:
        """See socket.socket."""
        if self.out:
            self.out -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Greeter(asyncio.Protocol):
    """Says that it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"!")


async def _greeted(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return await asyncio.wait_for(reader.read(1), 10)
    finally:
        writer.close()


def test_connections_wait_while_descriptors_are_exhausted_and_this_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        sock = listen(tmp_path / "s", 0o600)
        with Short(fileno=sock.detach()) as short:
            short.out = 3
            listener = Listener(asyncio.get_running_loop(), short, Greeter)
            assert await _greeted(tmp_path / "s") == b"!"
            assert not short.out
            listener.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted: Too many open files; raise the limit of open files (LimitNOFILE=)"
    ]


def test_a_connection_that_cannot_be_opened_does_not_block_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Greeter):
        failures = 1

        def __init__(self) -> None:
            if Failing.failures:
                Failing.failures -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def run() -> None:
        with listen(tmp_path / "s", 0o600) as sock:
            listener = Listener(asyncio.get_running_loop(), sock, Failing)
            assert await _greeted(tmp_path / "s") == b""
            assert await _greeted(tmp_path / "s") == b"!"
            listener.close()

    asyncio.run(run())
    assert "a connection could not be opened" in caplog.text


def test_connections_of_a_user_are_opened_at_a_bounded_rate(tmp_path: Path) -> None:
    opened: list[float] = []

    class Timed(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            opened.append(time.monotonic())

    async def run() -> None:
        with listen(tmp_path / "s", 0o600) as sock, ExitStack() as held:
            listener = Listener(asyncio.get_running_loop(), sock, Timed)
            for _ in range(450):
                peer = held.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(str(tmp_path / "s"))
                await asyncio.sleep(0)
            while len(opened) < 450:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.01)
            listener.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    # 256 at once, the others at 200 a second.
    assert opened[-1] - opened[0] >= 0.9 * (450 - 256) / 200
