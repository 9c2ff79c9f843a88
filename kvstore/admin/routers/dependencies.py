"""FastAPI dependencies, path parameters and router settings that several routers share."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request

from kvstore.admin.access.auth import PEER, Authenticator, Caller, Role
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.history import History
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.schemas.requests import KEY_PATTERN
from kvstore.types import TENANT_PATTERN

_MOST_ROWS = 1000
_FINGERPRINT = r"^[0-9a-f]{32}$"

IfMatch = Annotated[
    str | None, Header(description="Apply the change only if this is the current ETag; else 412.")
]
Limit = Annotated[int, Query(ge=1, le=_MOST_ROWS, description="Maximum number of rows.")]
OneTenant = Annotated[
    str, Query(pattern=f"^({TENANT_PATTERN})?$", description="Only this tenant's rows; empty: all tenants'.")
]
DevicePath = Annotated[str, Path(max_length=80, description="The name of a device.", examples=["nvme"])]
TenantPath = Annotated[
    str, Path(pattern=f"^{TENANT_PATTERN}$", description="The name of a tenant.", examples=["chat"])
]
TierPath = Annotated[str, Path(description="The name of a tier.", examples=["dram"])]
NamespacePath = Annotated[str, Path(pattern=_FINGERPRINT, description="The `id` of a namespace.")]
KeyPath = Annotated[str, Path(pattern=KEY_PATTERN, description="A key in hex.")]


def _daemon_state(request: Request) -> DaemonState:
    state: DaemonState = request.app.state.daemon_state
    return state


def _history(request: Request) -> History:
    history: History = request.app.state.history
    return history


def _authenticator(request: Request) -> Authenticator:
    authenticator: Authenticator = request.app.state.authenticator
    return authenticator


def _anonymous(request: Request) -> None:
    host, port = request.client or ("", 0)
    _authenticator(request).count(f"uid {port}" if host == PEER else f"host {host}")


def _caller(request: Request) -> Caller:
    authenticator = _authenticator(request)
    try:
        caller = authenticator.identify(request)
    except ProblemError:
        # The rate limit also bounds attempts to guess a token.
        _anonymous(request)
        raise
    request.state.caller = caller.name
    authenticator.count(caller.name)
    return caller


def _operator(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> None:
    if caller.role < Role.OPERATE:
        raise ProblemError(403, f"{caller.name} may only read", "use a token with role operate")
    request.state.operates = True


Daemon = Annotated[DaemonState, Depends(_daemon_state)]
LastHour = Annotated[History, Depends(_history)]
ANYBODY = Depends(_anonymous)
VIEWER = Depends(_caller)
OPERATOR = Depends(_operator)


def reading_router(*tags: str) -> APIRouter:
    """Returns a router for paths under /v1 that read. Each path requires `VIEWER` by its own dependencies."""
    return APIRouter(prefix="/v1", tags=list(tags), responses=documented(401, 429, 503))


def changing_router(*tags: str) -> APIRouter:
    """Returns a router for paths under /v1 that change something and therefore require `OPERATOR`."""
    errors = documented(400, 401, 403, 404, 409, 413, 422, 429, 503)
    return APIRouter(prefix="/v1", tags=list(tags), dependencies=[OPERATOR], responses=errors)
