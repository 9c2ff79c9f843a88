"""Serves the dashboard at `/`: static files, read once at start.

The files contain no data of the daemon and need no token. The page's script calls the REST paths with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from fastapi import APIRouter, Header, Response

from kvstore.admin.problem_details import ProblemError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    """A static file with its headers' values."""

    body: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{blake3(body).hexdigest(8)}"')


_FILES = {
    path.name: _read(path) for path in (Path(__file__).parent / "page").iterdir() if path.suffix in _TYPES
}

# No rate limit: refusing a request costs as much as sending a file.
page = APIRouter(include_in_schema=False)

IfNoneMatch = Annotated[str | None, Header()]


@page.api_route("/", methods=["GET", "HEAD"])
async def show_page(if_none_match: IfNoneMatch = None) -> Response:
    """Sends the dashboard."""
    return _answer("index.html", if_none_match)


@page.api_route("/page/{name}", methods=["GET", "HEAD"])
async def show_file(name: str, if_none_match: IfNoneMatch = None) -> Response:
    """Sends a file of the dashboard."""
    return _answer(name, if_none_match)


def _answer(name: str, if_none_match: str | None) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise ProblemError(404, f"the dashboard has no file {name!r:.80}", "the dashboard is at /")
    headers = {**_HEADERS, "ETag": file.etag}
    if if_none_match is not None and file.etag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
