"""What was changed, or tried to be, by whom: a line of JSON each, before the answer goes out."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import aiofiles
import aiofiles.os
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Of one file; then it becomes `NAME.1`, what was that `NAME.2`, and so on."""

KEPT = 4
_SEEN = {"GET", "HEAD", "OPTIONS"}
_MOST_OF_BODY = 1024


class AuditLog:
    """The file of the log, or (None) this process's own log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = asyncio.Lock()

    async def write(self, entry: dict[str, object]) -> None:
        """One more entry. What the file does not take goes to the process's log: none is lost in silence."""
        line = json.dumps(entry, ensure_ascii=False)
        if self._path is None:
            _log.info("audit: %s", line)
            return
        async with self._lock:
            try:
                await self._append(self._path, line)
            except OSError as error:
                _log.error("audit: %s (cannot write %s: %s)", line, self._path, error.strerror)

    async def _append(self, path: Path, line: str) -> None:
        if await aiofiles.os.path.exists(path) and await aiofiles.os.path.getsize(path) >= MOST_BYTES:
            for n in range(KEPT, 0, -1):
                older = path if n == 1 else path.with_name(f"{path.name}.{n - 1}")
                if await aiofiles.os.path.exists(older):
                    await aiofiles.os.replace(older, path.with_name(f"{path.name}.{n}"))
        async with aiofiles.open(path, "a", encoding="utf-8") as file:
            await file.write(f"{line}\n")


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
            await self._log.write(
                {
                    "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "who": state.get("caller", ""),
                    "method": scope["method"],
                    "path": scope["path"],
                    "body": body.decode(errors="replace"),
                    "status": status,
                }
            )

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
