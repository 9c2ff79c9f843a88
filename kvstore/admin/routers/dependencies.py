"""What paths have in common: who asks, whom they ask, and parts of their addresses."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request

from kvstore.admin.access.auth import PEER, Caller, Role
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.history import History
from kvstore.admin.problem_details import ProblemError
from kvstore.admin.schemas.responses import KEY_PATTERN
from kvstore.types import TENANT_PATTERN

_MOST_OF_A_PAGE = 1000
_FINGERPRINT = r"^[0-9a-f]{32}$"

IfMatch = Annotated[str | None, Header(description="Only if this is still its ETag; else 412.")]
Limit = Annotated[int, Query(ge=1, le=_MOST_OF_A_PAGE, description="Most to answer with.")]
OneTenant = Annotated[str, Query(pattern=f"^({TENANT_PATTERN})?$", description="Only this tenant's; or all.")]
DevicePath = Annotated[str, Path(max_length=80, examples=["nvme"])]
TenantPath = Annotated[str, Path(pattern=f"^{TENANT_PATTERN}$", examples=["chat"])]
NamespacePath = Annotated[str, Path(pattern=_FINGERPRINT, description="The `id` of a namespace.")]
KeyPath = Annotated[str, Path(pattern=KEY_PATTERN, description="A key in hex.")]


def _snapshots(request: Request) -> DaemonState:
    snapshots: DaemonState = request.app.state.snapshots
    return snapshots


def _hour(request: Request) -> History:
    hour: History = request.app.state.hour
    return hour


def _anybody(request: Request) -> None:
    host, port = request.client or ("", 0)
    request.app.state.callers.count(f"uid {port}" if host == PEER else f"host {host}")


def _caller(request: Request) -> Caller:
    try:
        caller: Caller = request.app.state.callers.identify(request)
    except ProblemError:
        # Who tries one token after another is held back too.
        _anybody(request)
        raise
    request.state.caller = caller.name
    request.app.state.callers.count(caller.name)
    return caller


def _operator(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> None:
    if caller.role < Role.OPERATE:
        raise ProblemError(
            403, f"{caller.name} may look, and not change anything", "use a token that operates"
        )
    request.state.operates = True


Daemon = Annotated[DaemonState, Depends(_snapshots)]
LastHour = Annotated[History, Depends(_hour)]
ANYBODY = Depends(_anybody)
VIEWER = Depends(_caller)
OPERATOR = Depends(_operator)
