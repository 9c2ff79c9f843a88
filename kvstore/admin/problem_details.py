"""Errors as RFC 9457 problems, with a hint what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from kvstore.errors import DeniedError, LocalProtocolError, MisuseError, UnavailableError

_log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """What went wrong, and what to do about it."""

    type: str = "about:blank"
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["there is no tenant 'chat'"])
    hint: str = Field("", examples=["`kvstore tenant list` names them"])


class ProblemError(Exception):
    """An answer that is a problem."""

    def __init__(
        self, status: int, detail: str, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of these answers."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content, "model": Problem}
        for status in statuses
    }


def answer(problem: ProblemError) -> JSONResponse:
    """A problem as it goes out."""
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
    """Every method that a path takes: its functions are a route each, and a route knows only its own."""
    methods: set[str] = set()
    for path, taken in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), request.url.path):
            methods |= {method.upper() for method in taken}
    return sorted(methods)


def install(app: FastAPI) -> None:
    """Has every error of an app answered as a problem."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        hint = "/openapi.json says what there is" if error.status_code in (404, 405) else ""
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # What is not in OpenAPI has one route for all of its methods.
            headers["Allow"] = ", ".join(_allowed(request)) or headers["Allow"]
        return answer(ProblemError(error.status_code, str(error.detail), hint, headers))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(ProblemError(422, f"{where}: {first['msg']}", "/openapi.json says what it takes"))

    @app.exception_handler(UnavailableError)
    async def away(_: Request, error: UnavailableError) -> JSONResponse:
        return answer(ProblemError(503, error.message, error.hint, {"Retry-After": "1"}))

    @app.exception_handler(LocalProtocolError)
    @app.exception_handler(DeniedError)
    async def denied(_: Request, error: DeniedError | LocalProtocolError) -> JSONResponse:
        return answer(ProblemError(409, error.message, error.hint))

    @app.exception_handler(MisuseError)
    async def misuse(_: Request, error: MisuseError) -> JSONResponse:
        return answer(ProblemError(422, error.message, error.hint))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        _log.error("a request failed", exc_info=error)
        return answer(ProblemError(500, "internal error", "see the log of kvstore admin"))
