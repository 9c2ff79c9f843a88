"""Paths that read: health, metrics, and the state of the daemon. Each function is one path."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from blake3 import blake3
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from pydantic import StringConstraints

from kvstore.admin import metrics
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import (
    ANYBODY,
    VIEWER,
    Daemon,
    DevicePath,
    KeyPath,
    LastHour,
    Limit,
    NamespacePath,
    OneTenant,
    TenantPath,
    TierPath,
    reading_router,
)
from kvstore.admin.schemas import responses
from kvstore.daemon.operator.command import MOST_AT_ONCE
from kvstore.daemon.operator.event_log import KINDS, MOST_EVENTS
from kvstore.daemon.server.connection import VERSION
from kvstore.errors import DeniedError, UnavailableError

_Kind = Annotated[str, StringConstraints(pattern=f"^({'|'.join(KINDS)})$")]
_V = TypeVar("_V", bound=responses.View)
_OPEN_METRICS = "application/openmetrics-text"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

health = APIRouter(tags=["health"])
v1 = reading_router()


# -- health


@health.get("/livez", dependencies=[ANYBODY], responses=documented(429))
async def livez() -> responses.Live:
    """Liveness of this process. Needs no token."""
    return responses.Live()


@health.get(
    "/readyz",
    dependencies=[ANYBODY],
    responses={
        **documented(429),
        503: {"model": responses.Ready, "description": "Not ready, with the reasons."},
    },
)
async def readyz(daemon: Daemon, response: Response) -> responses.Ready:
    """Readiness: whether the daemon serves from all of its tiers. Needs no token and names no tenant."""
    try:
        reasons = _reasons(await daemon.status())
    except UnavailableError:
        reasons = ["the daemon does not answer"]
    response.status_code = 503 if reasons else 200
    return responses.Ready(ready=not reasons, reasons=reasons)


def _reasons(status: dict[str, Any]) -> list[str]:
    reasons = []
    for tier in status["tiers"]:
        if tier["state"] == "fenced":
            reasons.append(f"{tier['name']}: fenced by an operator")
        elif tier["fenced"]:
            reasons.append(f"{tier['name']}: its device does not respond")
        elif not tier["readable"]:
            reasons.append(f"{tier['name']}: reads are suspended after failures")
        elif not tier["writable"] and tier["state"] == "serving":
            reasons.append(f"{tier['name']}: writes are suspended after failures")
    return reasons


@health.get("/version", dependencies=[VIEWER], responses=documented(401, 429))
async def show_version(daemon: Daemon) -> responses.Version:
    """The versions of this process and of the daemon."""
    try:
        of_daemon = (await daemon.status())["version"]
    except UnavailableError:
        of_daemon = ""
    return responses.Version(admin=VERSION, daemon=of_daemon)


@health.get(
    "/metrics",
    dependencies=[VIEWER],
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented(401, 429)},
)
async def show_metrics(daemon: Daemon, request: Request) -> Response:
    """All metrics, for Prometheus. While the daemon does not answer, only `kvstore_up` is sent, with 0.

    With `Accept: application/openmetrics-text`, buckets of call durations have ids of traces as exemplars.
    """
    is_open = _OPEN_METRICS in request.headers.get("accept", "")
    try:
        text = await (daemon.open_metrics() if is_open else daemon.metrics())
    except UnavailableError:
        text = metrics.exposition_of_nothing(b"# EOF\n" if is_open else b"")
    return Response(text, media_type=CONTENT_TYPE_LATEST if is_open else _METRICS_TYPE)


# -- state


@v1.get("/status", dependencies=[VIEWER], tags=["daemon"])
async def show_status(daemon: Daemon) -> responses.Status:
    """State of the daemon, and its counters since its start."""
    return responses.Status.model_validate(await daemon.status())


@v1.get("/history", dependencies=[VIEWER], tags=["daemon"])
async def show_history(history: LastHour) -> responses.History:
    """The last hour as columns, one point every ten seconds. Values are null in gaps."""
    return responses.History.model_validate(history.columns())


@v1.get("/tiers", dependencies=[VIEWER], tags=["tiers"])
async def list_tiers(daemon: Daemon) -> responses.Tiers:
    """All tiers, fastest first."""
    return responses.Tiers.model_validate(await daemon.status())


@v1.get("/tiers/{name}", dependencies=[VIEWER], tags=["tiers"], responses=documented(404, 422))
async def show_tier(daemon: Daemon, name: TierPath) -> responses.Tier:
    """One tier."""
    tiers = (await daemon.status())["tiers"]
    found = next((tier for tier in tiers if tier["name"] == name), None)
    if found is None:
        known = ", ".join(tier["name"] for tier in tiers)
        raise ProblemError(404, f"there is no tier {name!r:.80}", f"there are {known}")
    return responses.Tier.model_validate(found)


@v1.get("/policy", dependencies=[VIEWER], tags=["policy"])
async def show_policy(daemon: Daemon) -> responses.Policy:
    """The eviction policy. A change of `policy.eviction` takes effect while the daemon runs."""
    return responses.Policy.model_validate(await daemon.client.control("policy"))


@v1.get("/devices", dependencies=[VIEWER], tags=["devices"])
async def list_devices(daemon: Daemon) -> responses.Devices:
    """The devices of all tiers, fastest first."""
    return responses.Devices.model_validate(await daemon.client.control("devices"))


@v1.get("/devices/{name}", dependencies=[VIEWER], tags=["devices"], responses=documented(404, 422))
async def show_device(daemon: Daemon, name: DevicePath, response: Response) -> responses.Device:
    """The device of one tier. The ETag changes with the device's state."""
    device = await found_device(daemon, name)
    response.headers["ETag"] = state_etag(device)
    return device


@v1.get("/transfers", dependencies=[VIEWER], tags=["devices"], responses=documented(422))
async def list_transfers(
    daemon: Daemon,
    after: Annotated[int, Query(ge=0, le=1 << 52, description="Only numbers above this one.")] = 0,
    limit: Limit = 100,
) -> responses.Transfers:
    """Queued and running copies between tiers, oldest first, in pages."""
    return await _page(daemon, responses.Transfers, "transfers", limit, after, "number")


async def _found(daemon: DaemonState, view: type[_V], call: str, hint: str = "", **name: str) -> _V:
    """Returns the answer of a command about one object. Raises ProblemError 404 if there is none."""
    try:
        return view.model_validate(await daemon.client.control(call, **name))
    except DeniedError as error:
        raise ProblemError(404, error.message, hint or error.hint) from None


async def found_device(daemon: DaemonState, name: str) -> responses.Device:
    """Returns the device of a tier. Raises ProblemError 404."""
    return await _found(daemon, responses.Device, "device", name=name)


def state_etag(device: responses.Device) -> str:
    """Returns an ETag over everything of a device that can be changed."""
    return f'"{device.state}"'


@v1.get("/tenants", dependencies=[VIEWER], tags=["tenants"], responses=documented(422))
async def list_tenants(
    daemon: Daemon,
    after: Annotated[str, Query(description="Only names after this one.")] = "",
    limit: Limit = 100,
) -> responses.Tenants:
    """Tenants by name, in pages."""
    return await _page(daemon, responses.Tenants, "tenants", limit, after, "name")


async def _page(
    daemon: DaemonState, view: type[_V], call: str, limit: int, after: Any, by: str, **arguments: Any
) -> _V:
    """Returns up to `limit` rows, collected from the daemon's smaller pages."""
    rows: list[dict[str, Any]] = []
    more = True
    while more and len(rows) < limit:
        n = min(limit - len(rows), MOST_AT_ONCE)
        page = await daemon.page(call, after=after, limit=n, **arguments)
        rows += page[call]
        more = page["more"]
        after = rows[-1][by] if rows else after
    return view.model_validate({call: rows, "next": after if more else None})


@v1.get("/tenants/{name}", dependencies=[VIEWER], tags=["tenants"], responses=documented(404, 422))
async def show_tenant(daemon: Daemon, name: TenantPath) -> responses.Tenant:
    """One tenant."""
    return await found_tenant(daemon, name)


async def found_tenant(daemon: DaemonState, name: str) -> responses.Tenant:
    """Returns a tenant by name. Raises ProblemError 404."""
    return await _found(daemon, responses.Tenant, "tenant", "GET /v1/tenants lists them", name=name)


@v1.get("/namespaces", dependencies=[VIEWER], tags=["namespaces"], responses=documented(404, 422))
async def list_namespaces(
    daemon: Daemon,
    tenant: OneTenant = "",
    after: Annotated[int, Query(ge=0, lt=1 << 16, description="Only numbers above this one.")] = 0,
    limit: Limit = 100,
) -> responses.Namespaces:
    """Open namespaces by number, in pages."""
    if tenant:
        await found_tenant(daemon, tenant)
    return await _page(daemon, responses.Namespaces, "namespaces", limit, after, "number", tenant=tenant)


@v1.get("/namespaces/{id}", dependencies=[VIEWER], tags=["namespaces"], responses=documented(404, 422))
async def show_namespace(daemon: Daemon, id: NamespacePath, response: Response) -> responses.Namespace:
    """One namespace. The ETag changes with the tenants that it is published to."""
    namespace = await found_namespace(daemon, id)
    response.headers["ETag"] = etag(namespace)
    return namespace


async def found_namespace(daemon: DaemonState, id: str) -> responses.Namespace:
    """Returns a namespace by id. Raises ProblemError 404."""
    return await _found(daemon, responses.Namespace, "namespace", "GET /v1/namespaces lists them", id=id)


def etag(namespace: responses.Namespace) -> str:
    """Returns an ETag over everything of a namespace that can be changed."""
    return f'"{blake3(json.dumps(namespace.published_to).encode()).hexdigest(8)}"'


@v1.get("/blocks/{key}", dependencies=[VIEWER], tags=["blocks"], responses=documented(409, 422))
async def explain_block(
    daemon: Daemon,
    key: KeyPath,
    tenant: OneTenant = "",
    model: Annotated[str, Query(max_length=4096, description="Only in namespaces of this model.")] = "",
) -> responses.Blocks:
    """Copies, pins and latest decisions of a block in each namespace; empty if the key is unknown."""
    blocks = await daemon.client.explain([bytes.fromhex(key)], tenant, model)
    return responses.Blocks(blocks=[responses.Block.model_validate(_in_hex(block)) for block in blocks])


@v1.get("/events", dependencies=[VIEWER], tags=["daemon"], responses=documented(404, 422))
async def list_events(
    daemon: Daemon,
    after: Annotated[int, Query(ge=0, lt=1 << 63, description="Only numbers above this one.")] = 0,
    limit: Limit = 100,
    tenant: OneTenant = "",
    what: Annotated[list[_Kind], Query(description="Only events of these kinds; empty: all kinds.")] = [],  # noqa: B006
) -> responses.Events:
    """Latest decisions about blocks and events of the daemon, in pages."""
    if tenant:
        await found_tenant(daemon, tenant)
    events: list[dict[str, Any]] = []
    lost, more = 0, True
    while more and len(events) < limit:
        n = min(limit - len(events), MOST_EVENTS)
        page = await daemon.client.control("events", after=after, limit=n, tenant=tenant, what=what)
        events += page["events"]
        lost += page["lost"]
        more = page["next"] != after
        after = page["next"]
    return responses.Events.model_validate(page | {"events": events, "lost": lost})


def _in_hex(block: dict[str, Any]) -> dict[str, Any]:
    return block | {name: block[name].hex() for name in ("key", "parent") if name in block}
