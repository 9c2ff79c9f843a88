"""The audit log: one JSON line for every request that may change something, written before its response.

Requests of operators go to one file. Requests that were refused before the caller was known to be an operator
go to another file at a bounded rate, because any caller can cause them.

Not covered: reads, and changes that go to the daemon by other ways than REST.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import aiofiles
import aiofiles.os
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Size at which a file is rotated: it becomes `NAME.1`, the previous `NAME.1` becomes `NAME.2`, and so on."""

KEPT = 4
"""Rotated files that are kept."""

REFUSALS = 60
"""Refusals written per interval. Further ones are only counted, on a line of their own."""

INTERVAL_S = 60.0
_READS = {"GET", "HEAD", "OPTIONS"}
_MOST_BODY_BYTES = 1024
_MOST_PATH_CHARS = 256
_MOST_METHOD_CHARS = 16


class AuditLog:
    """Appends to the log file and to `NAME.refused` beside it. Without a path, logs to this process's log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._refused_path = None if path is None else path.with_name(f"{path.name}.refused")
        self._lock = asyncio.Lock()
        self._refusals = 0
        self._intervals: set[asyncio.Task[None]] = set()

    async def write(self, entry: dict[str, object]) -> None:
        """Appends one entry. If the file cannot be written, the entry is logged by the process."""
        await self._write(entry, self._path)

    async def refuse(self, entry: dict[str, object]) -> None:
        """Appends one refusal to its own file, so that refusals never rotate entries of changes away."""
        self._refusals += 1
        if self._refusals == 1:
            self._intervals.add(asyncio.create_task(self._interval()))
        if self._refusals <= REFUSALS:
            await self._write(entry, self._refused_path)

    async def _interval(self) -> None:
        await asyncio.sleep(INTERVAL_S)
        left_out, self._refusals = self._refusals - REFUSALS, 0
        self._intervals.clear()
        if left_out > 0:
            await self._write({"at": _now(), "left_out": left_out}, self._refused_path)

    async def _write(self, entry: dict[str, object], path: Path | None) -> None:
        # ASCII: JSON escapes characters that a terminal would interpret or reorder.
        line = json.dumps(entry)
        if path is None:
            _log.info("audit: %s", line)
            return
        async with self._lock:
            try:
                await self._append(path, line)
            except OSError as error:
                _log.error("audit: %s (cannot write %s: %s)", line, path, error.strerror)

    async def _append(self, path: Path, line: str) -> None:
        if await aiofiles.os.path.exists(path) and await aiofiles.os.path.getsize(path) >= MOST_BYTES:
            for n in range(KEPT, 0, -1):
                older = path if n == 1 else path.with_name(f"{path.name}.{n - 1}")
                if await aiofiles.os.path.exists(older):
                    await aiofiles.os.replace(older, path.with_name(f"{path.name}.{n}"))
        async with aiofiles.open(path, "a", encoding="utf-8", opener=_open) as file:
            await file.write(f"{line}\n")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Audited:
    """ASGI middleware that logs every request with a changing method, refused requests included."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READS:
            await self._app(scope, receive, send)
            return
        body, written = b"", False
        state = scope.setdefault("state", {})

        async def receive_and_copy() -> Message:
            nonlocal body
            message = await receive()
            body = (body + message.get("body", b""))[:_MOST_BODY_BYTES]
            return message

        async def write(status: int) -> None:
            nonlocal written
            written = True
            entry: dict[str, object] = {
                "at": _now(),
                "who": state.get("caller", ""),
                "method": scope["method"][:_MOST_METHOD_CHARS],
                "path": scope["path"][:_MOST_PATH_CHARS],
                "body": body.decode(errors="replace"),
                "status": status,
            }
            await (self._log.write(entry) if state.get("operates") else self._log.refuse(entry))

        async def write_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await write(message["status"])
            await send(message)

        try:
            await self._app(scope, receive_and_copy, write_and_send)
        except Exception:
            if not written:
                await write(500)
            raise
