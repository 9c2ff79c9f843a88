"""Errors as problem details (RFC 9457), each with a hint.

Every exception that reaches the application becomes one JSON object of `Problem`'s fields. Bugs become a 500
without details; their traceback is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from kvstore.errors import DeniedError, KVStoreError, LocalProtocolError, MisuseError, UnavailableError

_log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


_STATUSES = {UnavailableError: 503, LocalProtocolError: 409, DeniedError: 409, MisuseError: 422}


class Problem(BaseModel):
    """An error. `detail` describes it, `hint` says how to resolve it."""

    type: str = "about:blank"
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["there is no tenant 'chat'"])
    hint: str = Field("", examples=["`kvstore tenant list` names them"])


class ProblemError(Exception):
    """Ends a request with a problem response of this HTTP status."""

    def __init__(
        self, status: int, detail: str, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI entries of problem responses with these statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content, "model": Problem}
        for status in statuses
    }


def answer(problem: ProblemError) -> JSONResponse:
    """Returns the response for a problem."""
    headers = problem.headers
    if problem.status == 401:
        headers = {**headers, "WWW-Authenticate": "Bearer"}
    body = Problem(
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        hint=problem.hint,
    )
    return JSONResponse(body.model_dump(), problem.status, headers, MEDIA_TYPE)


def _allowed(request: Request) -> list[str]:
    """Returns all methods of a path. Each method is a route of its own and knows only itself."""
    methods: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), request.url.path):
            methods |= {method.upper() for method in operations}
    return sorted(methods)


def install(app: FastAPI) -> None:
    """Registers exception handlers that turn every error of an app into a problem response."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        hint = "/openapi.json lists all paths" if error.status_code in (404, 405) else ""
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # Paths outside OpenAPI have one route for all of their methods.
            headers["Allow"] = ", ".join(_allowed(request)) or headers["Allow"]
        return answer(ProblemError(error.status_code, str(error.detail), hint, headers))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(ProblemError(422, f"{where}: {first['msg']}", "/openapi.json documents valid requests"))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        _log.error("a request failed because of a bug", exc_info=error)
        return answer(ProblemError(500, "internal error", "see the log of kvstore admin"))

    for kind, status in _STATUSES.items():
        app.add_exception_handler(kind, partial(_answer_error, status))


async def _answer_error(status: int, _: Request, error: KVStoreError) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return answer(ProblemError(status, error.message, error.hint, headers))
