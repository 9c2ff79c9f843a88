"""The application: routes, errors as problems, and a bound on what a request may bring."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.admin import problem_details
from kvstore.admin.access.audit import Audited, AuditLog
from kvstore.admin.access.auth import Authenticator
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.dashboard import page
from kvstore.admin.history import History
from kvstore.admin.routers import configuration, queries
from kvstore.admin.routers.changes import changes
from kvstore.admin.routers.recordings import Recorder, recordings
from kvstore.client.aio import AsyncClient
from kvstore.config import Config
from kvstore.daemon.server.connection import VERSION

_MOST_BODY_BYTES = 64 << 10
_MOST_AT_WORK = 96
"""The most requests at once; what asks for health comes on top."""

_HEALTH = {"/livez", "/readyz"}
_DEADLINE_S = 5.0
_CHANGING_S = 60.0
"""Deleting is answered when nothing is left."""

_ABOUT = """The REST interface of one kvstore daemon.

Every path but the health checks needs `Authorization: Bearer TOKEN`, unless it is root or the daemon's own
user who asks over the Unix socket. Errors are problems (RFC 9457) with a `hint`.
"""


def make(config: Config, url: str) -> FastAPI:
    """An app that asks the daemon at `url`. Its state has `callers`, `snapshots` and `hour`."""
    app = FastAPI(
        title="kvstore admin",
        version=VERSION,
        description=_ABOUT,
        # These would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.callers = Authenticator(config.admin)
    app.state.snapshots = DaemonState(
        AsyncClient(url, token="", deadline_s=_DEADLINE_S),
        AsyncClient(url, token="", deadline_s=_CHANGING_S),
    )
    app.state.recorder = Recorder(url)
    app.state.hour = History()
    app.include_router(page)
    app.include_router(queries.health)
    app.include_router(queries.v1)
    for router in (changes, configuration.seen, configuration.changed, recordings):
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
            if path not in ("/livez", "/readyz"):
                for method in methods.values():
                    method["security"] = [{"token": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


class _Bounded:
    """Answers 503 to more requests than are worked on at once, 413 to a body that is too large, unread."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._at_work = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._at_work >= _MOST_AT_WORK and scope["path"] not in _HEALTH:
            await problem_details.answer(_too_many())(scope, receive, send)
        else:
            self._at_work += 1
            try:
                await self._sized(scope, receive, send)
            finally:
                self._at_work -= 1

    async def _sized(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > _MOST_BODY_BYTES:
            await problem_details.answer(_too_large())(scope, receive, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > _MOST_BODY_BYTES:
                raise _too_large()
            return message

        async def told(message: Message) -> None:
            # Whatever became of the exception on its way here.
            if read <= _MOST_BODY_BYTES:
                await send(message)
            elif message["type"] == "http.response.start":
                await problem_details.answer(_too_large())(scope, receive, send)

        await self._app(scope, bounded, told)


def _too_many() -> problem_details.ProblemError:
    hint = f"at most {_MOST_AT_WORK} at once: ask again"
    return problem_details.ProblemError(503, "too many requests are under way", hint, {"Retry-After": "1"})


def _too_large() -> problem_details.ProblemError:
    return problem_details.ProblemError(413, "the request is too large", f"at most {_MOST_BODY_BYTES} bytes")
