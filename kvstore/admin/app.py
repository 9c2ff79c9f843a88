"""The ASGI application: routers, error handlers, and bounds on request size and concurrency."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.admin import dashboard, problem_details
from kvstore.admin.access.audit import Audited, AuditLog
from kvstore.admin.access.auth import Authenticator
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.history import History
from kvstore.admin.routers import changes, configuration, queries, recordings, tokens
from kvstore.client.aio import AsyncClient
from kvstore.config import Config
from kvstore.daemon.server.connection import VERSION

_MOST_BODY_BYTES = 64 << 10
_MOST_CONCURRENT = 96
"""Concurrent requests. Health checks are not counted against it."""

_ROUTERS = (
    dashboard.page,
    queries.health,
    queries.v1,
    changes.changing,
    configuration.reading,
    configuration.changing,
    tokens.reading,
    tokens.changing,
    recordings.recordings,
)
_HEALTH = {"/livez", "/readyz"}
_DEADLINE_S = 5.0
_CHANGE_DEADLINE_S = 60.0
"""Deadline of changes. A deletion is answered when all of its blocks are gone."""

_ABOUT = """The REST interface of one kvstore daemon.

Every path except the health checks needs `Authorization: Bearer TOKEN`. On the Unix socket, root and the
daemon's own user need no token. Errors are problem details (RFC 9457) with a `hint`.
"""


def make(config: Config, url: str) -> FastAPI:
    """Returns an app for the daemon at `url`.

    Its `state` has `authenticator`, `daemon_state`, `recorder` and `history`.
    """
    app = FastAPI(
        title="kvstore admin",
        version=VERSION,
        description=_ABOUT,
        # These pages would load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.authenticator = Authenticator(config.admin)
    app.state.daemon_state = DaemonState(
        AsyncClient(url, token="", deadline_s=_DEADLINE_S),
        AsyncClient(url, token="", deadline_s=_CHANGE_DEADLINE_S),
    )
    app.state.recorder = recordings.Recorder(url)
    app.state.history = History()
    for router in _ROUTERS:
        app.include_router(router)
    problem_details.install(app)
    app.add_middleware(_Bounded)
    app.add_middleware(Audited, log=AuditLog(config.admin.audit_log))
    make_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make_openapi()
        scheme = {"type": "http", "scheme": "bearer"}
        schema.setdefault("components", {})["securitySchemes"] = {"token": scheme}
        for path, methods in schema["paths"].items():
            if path not in _HEALTH:
                for method in methods.values():
                    method["security"] = [{"token": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


class _Bounded:
    """ASGI middleware: answers 503 above the concurrency bound and 413 to oversized bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._concurrent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._concurrent >= _MOST_CONCURRENT and scope["path"] not in _HEALTH:
            await problem_details.answer(_too_many())(scope, receive, send)
        else:
            self._concurrent += 1
            try:
                await self._bounded_body(scope, receive, send)
            finally:
                self._concurrent -= 1

    async def _bounded_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > _MOST_BODY_BYTES:
            await problem_details.answer(_too_large())(scope, receive, send)
            return
        read = 0

        async def receive_bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > _MOST_BODY_BYTES:
                raise _too_large()
            return message

        async def send_unless_too_large(message: Message) -> None:
            # The app may have handled the exception and answered with another status.
            if read <= _MOST_BODY_BYTES:
                await send(message)
            elif message["type"] == "http.response.start":
                await problem_details.answer(_too_large())(scope, receive, send)

        await self._app(scope, receive_bounded, send_unless_too_large)


def _too_many() -> problem_details.ProblemError:
    hint = f"at most {_MOST_CONCURRENT} run at once: try again"
    return problem_details.ProblemError(503, "too many concurrent requests", hint, {"Retry-After": "1"})


def _too_large() -> problem_details.ProblemError:
    return problem_details.ProblemError(413, "the request is too large", f"at most {_MOST_BODY_BYTES} bytes")
