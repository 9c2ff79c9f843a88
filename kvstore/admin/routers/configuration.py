"""The configuration over REST: what holds, what of it changes, tenants and tokens in it; tried out, or kept.

The daemon changes it and keeps the changes; here they are only put together, each against an ETag, so that
nobody's change undoes another's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import OPERATOR, VIEWER, Daemon, DevicePath, IfMatch, TenantPath
from kvstore.admin.schemas import configuration as views
from kvstore.config import (
    HOLDER_PATTERN,
    Admin,
    AdminToken,
    NvmeDevice,
    Tenant,
    Token,
    Values,
    difference,
    parse_write_budget,
)
from kvstore.daemon.tenancy.auth import hash_of, new_token

seen = APIRouter(prefix="/v1", tags=["configuration"], responses=documented(401, 429, 503))
changed = APIRouter(
    prefix="/v1",
    tags=["configuration"],
    dependencies=[OPERATOR],
    responses=documented(400, 401, 403, 404, 409, 413, 422, 429, 503),
)

_TRIES = 5
_ID_DIGITS = 16
_HIDDEN = "tokens"

DryRun = Annotated[bool, Query(description="Change nothing; say what would change, and who would lose what.")]
TokenPath = Annotated[str, Path(pattern=rf"^[0-9a-f]{{{_ID_DIGITS}}}$", description="The `id` of a token.")]
NamePath = Annotated[str, Path(pattern=HOLDER_PATTERN, description="The `name` of a token.")]


# -- all of it


@seen.get("/settings", dependencies=[VIEWER])
async def show_settings(daemon: Daemon, response: Response) -> views.Settings:
    """What is set, by the file or by changes since; all else is at its default. Tokens are left out."""
    shown = await daemon.client.control("settings")
    response.headers["ETag"] = _quoted(shown["etag"])
    return views.Settings(settings=_without_tokens(shown["value"]), changes=_without_tokens(shown["changes"]))


@changed.patch("/settings", responses=documented(412))
async def change_settings(
    daemon: Daemon,
    request: Request,
    response: Response,
    patch: dict[str, Any],
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> views.SettingsChanged:
    """Changes settings by a JSON merge patch (RFC 7396), as the file has them; null: back to the default."""
    answer = await _change(daemon, patch, (), if_match, dry_run)
    return await _answer(request, response, daemon, answer, dry_run)


@changed.post("/reload")
async def reload(daemon: Daemon, request: Request) -> views.Reloaded:
    """Reads the configuration's file again, as SIGHUP does, for the daemon and this interface."""
    answer = await daemon.changing.control("reload")
    await _take_over(request, daemon)
    return views.Reloaded.model_validate(answer)


# -- tenants


@seen.get("/tenants/{name}/settings", dependencies=[VIEWER], responses=documented(404, 422))
async def show_tenant_settings(daemon: Daemon, response: Response, name: TenantPath) -> views.TenantSettings:
    """Who is in a tenant, and what it may have: members, quotas in bytes, bandwidth. Tokens are apart."""
    value, etag = await _tenant(daemon, name)
    response.headers["ETag"] = _quoted(etag)
    return views.TenantSettings.model_validate(
        Tenant.model_validate(value).model_dump(mode="json", exclude={_HIDDEN})
    )


@changed.put("/tenants/{name}/settings", responses=documented(412))
async def put_tenant_settings(
    daemon: Daemon,
    request: Request,
    response: Response,
    name: TenantPath,
    settings: views.TenantSettings,
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> views.SettingsChanged:
    """Makes a tenant, or says anew who is in it and what it may have. Its tokens stay."""
    wanted = settings.model_dump(exclude_defaults=True)

    def patch(before: Values | None) -> Values:
        kept = {_HIDDEN: before[_HIDDEN]} if before and _HIDDEN in before else {}
        return wanted | kept if before is None else difference(before, wanted | kept)

    answer = await _edit(daemon, ("tenants", name), patch, if_match, dry_run)
    return await _answer(request, response, daemon, answer, dry_run)


@changed.delete("/tenants/{name}/settings", responses=documented(412))
async def remove_tenant(
    daemon: Daemon,
    request: Request,
    response: Response,
    name: TenantPath,
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> views.SettingsChanged:
    """Takes a tenant out of the configuration. What it has stored stays, for now: see `DELETE .../blocks`."""
    await _tenant(daemon, name)
    answer = await _change(daemon, {"tenants": {name: None}}, ("tenants", name), if_match, dry_run)
    return await _answer(request, response, daemon, answer, dry_run)


async def _tenant(daemon: DaemonState, name: str) -> tuple[Values, str]:
    """What is set of a tenant, and its ETag. Raises ProblemError 404."""
    shown = await daemon.client.control("settings", part=["tenants", name])
    if shown["value"] is None:
        hint = "PUT makes it; GET /v1/tenants also names those that only have something stored"
        raise ProblemError(404, f"no tenant {name!r} is configured", hint)
    return shown["value"], shown["etag"]


# -- devices


@seen.get("/devices/{name}/settings", dependencies=[VIEWER], responses=documented(404, 422))
async def show_device_settings(daemon: Daemon, response: Response, name: DevicePath) -> views.DeviceSettings:
    """Where a device of the NVMe tier is, and what it may have. The first one is `nvme` in the settings."""
    value, etag = await _device(daemon, name)
    response.headers["ETag"] = _quoted(etag)
    device = NvmeDevice.model_validate(value)
    times = isinstance(device.write_budget, str) and device.write_budget.endswith("x")
    budget = device.write_budget if times else parse_write_budget(device.write_budget, device.limit)
    return views.DeviceSettings(path=str(device.path), limit=device.limit, write_budget=budget)


@changed.put("/devices/{name}/settings", responses=documented(412))
async def put_device_settings(
    daemon: Daemon,
    request: Request,
    response: Response,
    name: DevicePath,
    settings: views.DeviceSettings,
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> views.SettingsChanged:
    """Adds a device, whose folder is there and empty, to the NVMe tier; or changes its limit and budget."""
    wanted = settings.model_dump()

    def patch(before: Values | None) -> Values:
        return wanted if before is None else difference(before, wanted)

    answer = await _edit(daemon, ("nvme", "devices", name), patch, if_match, dry_run)
    return await _answer(request, response, daemon, answer, dry_run)


@changed.delete("/devices/{name}/settings", responses=documented(412))
async def remove_device(
    daemon: Daemon,
    request: Request,
    response: Response,
    name: DevicePath,
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> views.SettingsChanged:
    """Removes a device: it takes no more writes, and is read until it is empty. What only it has goes."""
    await _device(daemon, name)
    part = ("nvme", "devices", name)
    answer = await _change(daemon, {"nvme": {"devices": {name: None}}}, part, if_match, dry_run)
    return await _answer(request, response, daemon, answer, dry_run)


async def _device(daemon: DaemonState, name: str) -> tuple[Values, str]:
    """What is set of a device, and its ETag. Raises ProblemError 404."""
    shown = await daemon.client.control("settings", part=["nvme", "devices", name])
    if shown["value"] is None:
        raise ProblemError(404, f"no device {name!r:.80} was added", "PUT adds it")
    return shown["value"], shown["etag"]


# -- tokens


@seen.get("/tenants/{name}/tokens", dependencies=[VIEWER], responses=documented(404, 422))
async def list_tenant_tokens(daemon: Daemon, name: TenantPath) -> views.Tokens:
    """Which tokens a tenant's members may show. The tokens themselves are not kept anywhere."""
    value, _ = await _tenant(daemon, name)
    tokens = [Token.model_validate(token) for token in value.get(_HIDDEN, ())]
    return views.Tokens(tokens=[views.Token(id=_id(t), role=t.role, expires=t.expires) for t in tokens])


@changed.post("/tenants/{name}/tokens", status_code=201)
async def make_tenant_token(
    daemon: Daemon, request: Request, name: TenantPath, wanted: views.TenantTokenWanted
) -> views.NewToken:
    """Makes a token for a tenant's members. It is in this answer, and nowhere else."""
    await _tenant(daemon, name)
    return await _make(daemon, request, ("tenants", name), {"role": wanted.role}, wanted.expires_in_s)


@changed.delete("/tenants/{name}/tokens/{id}")
async def end_tenant_token(
    daemon: Daemon, request: Request, response: Response, name: TenantPath, id: TokenPath
) -> views.SettingsChanged:
    """Ends a token: who shows it is nobody from now on, and is disconnected."""
    await _tenant(daemon, name)
    return await _end(daemon, request, response, ("tenants", name), lambda token: _id_of(token) == id)


@seen.get("/tokens", dependencies=[VIEWER])
async def list_tokens(daemon: Daemon) -> views.AdminTokens:
    """Who may use this interface. The tokens themselves are not kept anywhere."""
    admin = await _admin(daemon)
    shown = [views.AdminToken(name=t.name, role=t.role, expires=t.expires) for t in admin.tokens]
    return views.AdminTokens(tokens=shown)


@changed.post("/tokens", status_code=201)
async def make_token(daemon: Daemon, request: Request, wanted: views.TokenWanted) -> views.NewToken:
    """Makes a token for this interface. It is in this answer, and nowhere else."""
    return await _make(
        daemon, request, ("admin",), {"name": wanted.name, "role": wanted.role}, wanted.expires_in_s
    )


@changed.delete("/tokens/{name}")
async def end_token(
    daemon: Daemon, request: Request, response: Response, name: NamePath
) -> views.SettingsChanged:
    """Ends a token of this interface, but not the one that is shown to do it."""
    if request.state.caller == name:
        raise ProblemError(
            409, f"{name} is the token that you show", "make another one, and end this with it"
        )
    return await _end(daemon, request, response, ("admin",), lambda token: token.get("name") == name)


async def _make(
    daemon: DaemonState, request: Request, part: tuple[str, ...], entry: Values, expires_in_s: float | None
) -> views.NewToken:
    token, expires = new_token(secrets.token_bytes(32)), None
    entry = {"hash": f"sha256:{hash_of(token).hex()}", **entry}
    if expires_in_s is not None:
        expires = (datetime.now(UTC) + timedelta(seconds=expires_in_s)).replace(microsecond=0)
        entry["expires"] = expires.isoformat()
    await _edit(daemon, part, lambda before: {_HIDDEN: [*(before or {}).get(_HIDDEN, ()), entry]})
    await _take_over(request, daemon)
    return views.NewToken(id=_id_of(entry), token=token, role=entry["role"], expires=expires)


async def _end(
    daemon: DaemonState,
    request: Request,
    response: Response,
    part: tuple[str, ...],
    is_it: Callable[[Values], bool],
) -> views.SettingsChanged:
    def patch(before: Values | None) -> Values:
        tokens = (before or {}).get(_HIDDEN, ())
        left = [token for token in tokens if not is_it(token)]
        if len(left) == len(tokens):
            raise ProblemError(404, "there is no such token", "a GET of the tokens lists them")
        return {_HIDDEN: left or None}

    return await _answer(request, response, daemon, await _edit(daemon, part, patch), dry_run=False)


def _id(token: Token) -> str:
    return _id_of({"hash": token.hash})


def _id_of(token: Values) -> str:
    """Names a token without giving it away: of its hash, the first digits."""
    return str(token["hash"]).lower().removeprefix("sha256:")[:_ID_DIGITS]


# -- one change


async def _edit(
    daemon: DaemonState,
    part: tuple[str, ...],
    patch: Callable[[Values | None], Values],
    if_match: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Changes a part by what `patch` makes of it as it is; again if somebody else came in between."""
    for _ in range(_TRIES):
        shown = await daemon.client.control("settings", part=list(part))
        if if_match is not None and if_match not in ("*", _quoted(shown["etag"])):
            raise _changed_meanwhile(shown["etag"])
        whole = patch(shown["value"])
        for name in reversed(part):
            whole = {name: whole}
        answer = await daemon.changing.control(
            "change", patch=whole, part=list(part), expected=shown["etag"], dry_run=dry_run
        )
        if "is_now" not in answer:
            return answer
    raise ProblemError(409, "others change it all the time", "try again")


async def _change(
    daemon: DaemonState, patch: Values, part: tuple[str, ...], if_match: str | None, dry_run: bool
) -> dict[str, Any]:
    answer = await daemon.changing.control(
        "change", patch=patch, part=list(part), expected=(if_match or "").strip('"'), dry_run=dry_run
    )
    if "is_now" in answer:
        raise _changed_meanwhile(answer["is_now"])
    return answer


async def _answer(
    request: Request, response: Response, daemon: DaemonState, answer: dict[str, Any], dry_run: bool
) -> views.SettingsChanged:
    response.headers["ETag"] = _quoted(answer["etag"])
    if not dry_run:
        await _take_over(request, daemon)
    return views.SettingsChanged.model_validate({**answer, "dry_run": dry_run})


async def _take_over(request: Request, daemon: DaemonState) -> None:
    """This process has tokens and rates of its own."""
    request.app.state.callers.admin = await _admin(daemon)


async def _admin(daemon: DaemonState) -> Admin:
    value = (await daemon.client.control("settings", part=["admin"]))["value"] or {}
    # Paths are the only values that JSON has not: they can't change while this process runs.
    tokens = [AdminToken.model_validate(token) for token in value.get(_HIDDEN, ())]
    rate = value.get("requests_per_s", Admin().requests_per_s)
    return Admin(tokens=tuple(tokens), requests_per_s=rate)


def _changed_meanwhile(etag: str) -> ProblemError:
    hint = "look again, and send the ETag that you get"
    return ProblemError(412, "it has been changed by somebody else", hint, {"ETag": _quoted(etag)})


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _without_tokens(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_tokens(inner) for name, inner in value.items() if name != _HIDDEN}
