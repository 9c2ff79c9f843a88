"""The page at `/`: a fixed set of files, read once. It shows nothing by itself, so it needs no token.

What it shows it asks for as any other caller does.
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
    """A file as it goes out."""

    body: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{blake3(body).hexdigest(8)}"')


_FILES = {
    path.name: _read(path) for path in (Path(__file__).parent / "page").iterdir() if path.suffix in _TYPES
}

# Not held back as callers are: a refusal would cost as much as a file.
page = APIRouter(include_in_schema=False)

IfNoneMatch = Annotated[str | None, Header()]


@page.api_route("/", methods=["GET", "HEAD"])
async def show_page(if_none_match: IfNoneMatch = None) -> Response:
    """The dashboard."""
    return _answer("index.html", if_none_match)


@page.api_route("/page/{name}", methods=["GET", "HEAD"])
async def show_file(name: str, if_none_match: IfNoneMatch = None) -> Response:
    """One of its files."""
    return _answer(name, if_none_match)


def _answer(name: str, known: str | None) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise ProblemError(404, f"the page has no file {name!r:.80}", "/ is the page")
    headers = {**_HEADERS, "ETag": file.etag}
    if known is not None and file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
