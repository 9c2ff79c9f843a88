"""What was changed, or tried to be, by whom: a line of JSON each, before the answer goes out.

What operators asked for is one file. What was refused before it was known to be an operator's is another, and
bounded, as anybody can have as much of it as he likes.
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
"""Of one file; then it becomes `NAME.1`, what was that `NAME.2`, and so on."""

KEPT = 4
REFUSALS = 60
"""The most refusals that are written down in an interval; others are counted in a line of their own."""

INTERVAL_S = 60.0
_SEEN = {"GET", "HEAD", "OPTIONS"}
_MOST_OF_BODY = 1024
_MOST_OF_PATH = 256
_MOST_OF_METHOD = 16


class AuditLog:
    """The file of the log and that of refusals, `NAME.refused`; or (None) this process's own log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._refused = None if path is None else path.with_name(f"{path.name}.refused")
        self._lock = asyncio.Lock()
        self._refusals = 0
        self._intervals: set[asyncio.Task[None]] = set()

    async def write(self, entry: dict[str, object]) -> None:
        """One more entry. What the file does not take goes to the process's log: none is lost in silence."""
        await self._write(entry, self._path)

    async def refuse(self, entry: dict[str, object]) -> None:
        """One more refusal: it can not roll away what was changed. Of too many only the number is written."""
        self._refusals += 1
        if self._refusals == 1:
            self._intervals.add(asyncio.create_task(self._interval()))
        if self._refusals <= REFUSALS:
            await self._write(entry, self._refused)

    async def _interval(self) -> None:
        await asyncio.sleep(INTERVAL_S)
        left_out, self._refusals = self._refusals - REFUSALS, 0
        self._intervals.clear()
        if left_out > 0:
            await self._write({"at": _now(), "left_out": left_out}, self._refused)

    async def _write(self, entry: dict[str, object], path: Path | None) -> None:
        # As ASCII: what a terminal obeys or reorders is an escape of JSON's.
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
    """Has every request that may change something written down, the refused ones too."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _SEEN:
            await self._app(scope, receive, send)
            return
        body, written = b"", False
        state = scope.setdefault("state", {})

        async def seen() -> Message:
            nonlocal body
            message = await receive()
            body = (body + message.get("body", b""))[:_MOST_OF_BODY]
            return message

        async def write(status: int) -> None:
            nonlocal written
            written = True
            entry: dict[str, object] = {
                "at": _now(),
                "who": state.get("caller", ""),
                "method": scope["method"][:_MOST_OF_METHOD],
                "path": scope["path"][:_MOST_OF_PATH],
                "body": body.decode(errors="replace"),
                "status": status,
            }
            await (self._log.write(entry) if state.get("operates") else self._log.refuse(entry))

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                await write(message["status"])
            await send(message)

        try:
            await self._app(scope, seen, told)
        except Exception:
            if not written:
                await write(500)
            raise
