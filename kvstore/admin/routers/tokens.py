"""Paths of tokens: those of tenants, and those of the REST interface.

The configuration stores only hashes. A token appears once, in the response to the request that makes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Path, Request

from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.configuration import configured_tenant
from kvstore.admin.routers.configuration_editor import TOKENS, Edit, Editor, Part, read_admin
from kvstore.admin.routers.dependencies import VIEWER, Daemon, TenantPath, changing_router, reading_router
from kvstore.admin.schemas import configuration as views
from kvstore.config import HOLDER_PATTERN, Token, Values
from kvstore.daemon.tenancy.auth import hash_of, new_token

reading = reading_router("configuration")
changing = changing_router("configuration")

_ADMIN: Part = ("admin",)
_ID_DIGITS = 16

TokenPath = Annotated[str, Path(pattern=rf"^[0-9a-f]{{{_ID_DIGITS}}}$", description="The `id` of a token.")]
NamePath = Annotated[str, Path(pattern=HOLDER_PATTERN, description="The `name` of a token.")]


# -- of tenants


@reading.get("/tenants/{name}/tokens", dependencies=[VIEWER], responses=documented(404, 422))
async def list_tenant_tokens(daemon: Daemon, name: TenantPath) -> views.Tokens:
    """The tokens of a tenant: id, role and expiry. The tokens themselves are not stored."""
    settings = await configured_tenant(daemon, name)
    tokens = [Token.model_validate(token) for token in settings.get(TOKENS, ())]
    rows = [views.Token(id=_id_of(token.hash), role=token.role, expires=token.expires) for token in tokens]
    return views.Tokens(tokens=rows)


@changing.post("/tenants/{name}/tokens", status_code=201)
async def make_tenant_token(
    editor: Edit, name: TenantPath, wanted: views.TenantTokenWanted
) -> views.NewToken:
    """Makes a token for members of a tenant. Only this response contains it."""
    await configured_tenant(editor.daemon, name)
    return await _make(editor, ("tenants", name), {"role": wanted.role}, wanted.expires_in_s)


@changing.delete("/tenants/{name}/tokens/{id}")
async def end_tenant_token(editor: Edit, name: TenantPath, id: TokenPath) -> views.SettingsChanged:
    """Revokes a token of a tenant and disconnects its holders."""
    await configured_tenant(editor.daemon, name)
    return await _remove(editor, ("tenants", name), lambda token: _id_of(token["hash"]) == id)


# -- of the REST interface


@reading.get("/tokens", dependencies=[VIEWER])
async def list_tokens(daemon: Daemon) -> views.AdminTokens:
    """The tokens of the REST interface: name, role and expiry. The tokens themselves are not stored."""
    tokens = (await read_admin(daemon)).tokens
    rows = [views.AdminToken(name=token.name, role=token.role, expires=token.expires) for token in tokens]
    return views.AdminTokens(tokens=rows)


@changing.post("/tokens", status_code=201)
async def make_token(editor: Edit, wanted: views.TokenWanted) -> views.NewToken:
    """Makes a token for the REST interface. Only this response contains it."""
    return await _make(editor, _ADMIN, {"name": wanted.name, "role": wanted.role}, wanted.expires_in_s)


@changing.delete("/tokens/{name}")
async def end_token(editor: Edit, request: Request, name: NamePath) -> views.SettingsChanged:
    """Revokes a token of the REST interface. The token that authorizes this request cannot be revoked."""
    if request.state.caller == name:
        raise ProblemError(409, f"{name} is the token of this request", "make another token and use that one")
    return await _remove(editor, _ADMIN, lambda token: token.get("name") == name)


async def _make(editor: Editor, part: Part, entry: Values, expires_in_s: float | None) -> views.NewToken:
    token, expires = new_token(secrets.token_bytes(32)), None
    entry = {"hash": f"sha256:{hash_of(token).hex()}", **entry}
    if expires_in_s is not None:
        expires = (datetime.now(UTC) + timedelta(seconds=expires_in_s)).replace(microsecond=0)
        entry["expires"] = expires.isoformat()
    await editor.edit(part, lambda settings: {TOKENS: [*(settings or {}).get(TOKENS, ()), entry]})
    return views.NewToken(id=_id_of(entry["hash"]), token=token, role=entry["role"], expires=expires)


async def _remove(editor: Editor, part: Part, matches: Callable[[Values], bool]) -> views.SettingsChanged:
    def patch(settings: Values | None) -> Values:
        tokens = (settings or {}).get(TOKENS, ())
        left = [token for token in tokens if not matches(token)]
        if len(left) == len(tokens):
            raise ProblemError(404, "there is no such token", "GET the tokens to list them")
        return {TOKENS: left or None}

    return await editor.edit(part, patch)


def _id_of(token_hash: str) -> str:
    """Returns the id of a token: the first digits of its hash."""
    return token_hash.lower().removeprefix("sha256:")[:_ID_DIGITS]
