"""Edits the configuration: sends merge patches to the daemon, each conditional on an ETag.

The daemon validates, applies and persists a change. The ETag of the changed part ensures that no concurrent
change is lost. Tokens and rates of this process are reloaded after every change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response

from kvstore.admin.access.auth import Authenticator
from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError
from kvstore.admin.routers.dependencies import Daemon, IfMatch
from kvstore.admin.schemas.configuration import SettingsChanged
from kvstore.config import Admin, AdminToken, Values

TOKENS = "tokens"
"""Key of the tokens in a part. No response about settings contains it."""

_TRIES = 5

Part = tuple[str, ...]
"""Keys that lead to a part of the configuration, such as ("tenants", "chat"). Empty: all of it."""

DryRun = Annotated[bool, Query(description="Change nothing; report the changes and their consequences.")]


@dataclass(frozen=True, slots=True)
class Editor:
    """Changes the configuration for one request. `if_match` and `dry_run` are the request's parameters."""

    daemon: DaemonState
    authenticator: Authenticator
    response: Response
    if_match: str | None = None
    dry_run: bool = False

    async def patch(self, part: Part, patch: Values) -> SettingsChanged:
        """Applies a merge patch on the whole configuration. Raises ProblemError 412 if `part` has changed."""
        expected = (self.if_match or "").strip('"')
        answer = await self._change(part, patch, expected)
        if "is_now" in answer:
            raise _changed_meanwhile(answer["is_now"])
        return await self._changed(answer)

    async def edit(self, part: Part, patch: Callable[[Values | None], Values]) -> SettingsChanged:
        """Applies the merge patch that `patch` makes from the part's current value; None: it is not set.

        Reads the part again if another change came in between. Raises ProblemError: 409 after five tries, 412
        if the part's ETag is not `if_match`.
        """
        for _ in range(_TRIES):
            shown = await self.daemon.client.control("settings", part=list(part))
            if self.if_match is not None and self.if_match not in ("*", quoted(shown["etag"])):
                raise _changed_meanwhile(shown["etag"])
            whole = patch(shown["value"])
            for name in reversed(part):
                whole = {name: whole}
            answer = await self._change(part, whole, shown["etag"])
            if "is_now" not in answer:
                return await self._changed(answer)
        raise ProblemError(409, "concurrent changes kept interfering", "try again")

    async def reload(self) -> dict[str, Any]:
        """Reloads the configuration file, in the daemon and here. Returns the daemon's answer."""
        answer = await self.daemon.changing.control("reload")
        self.authenticator.admin = await read_admin(self.daemon)
        return answer

    async def _change(self, part: Part, patch: Values, expected: str) -> dict[str, Any]:
        return await self.daemon.changing.control(
            "change", patch=patch, part=list(part), expected=expected, dry_run=self.dry_run
        )

    async def _changed(self, answer: dict[str, Any]) -> SettingsChanged:
        self.response.headers["ETag"] = quoted(answer["etag"])
        if not self.dry_run:
            self.authenticator.admin = await read_admin(self.daemon)
        return SettingsChanged.model_validate({**answer, "dry_run": self.dry_run})


def _editor(daemon: Daemon, request: Request, response: Response) -> Editor:
    return Editor(daemon, request.app.state.authenticator, response)


def _conditional_editor(
    daemon: Daemon, request: Request, response: Response, if_match: IfMatch = None, dry_run: DryRun = False
) -> Editor:
    return Editor(daemon, request.app.state.authenticator, response, if_match, dry_run)


Edit = Annotated[Editor, Depends(_editor)]
ConditionalEdit = Annotated[Editor, Depends(_conditional_editor)]


async def read_part(daemon: DaemonState, part: Part, response: Response | None = None) -> Values | None:
    """Returns the value of a part, None if it is not set. Sets the response's ETag."""
    shown = await daemon.client.control("settings", part=list(part))
    if response is not None:
        response.headers["ETag"] = quoted(shown["etag"])
    value: Values | None = shown["value"]
    return value


async def read_admin(daemon: DaemonState) -> Admin:
    """Returns the tokens and rates of the REST interface as configured now."""
    value = await read_part(daemon, ("admin",)) or {}
    # Other keys hold paths, which JSON cannot represent and which need a restart anyway.
    tokens = [AdminToken.model_validate(token) for token in value.get(TOKENS, ())]
    return Admin(tokens=tuple(tokens), requests_per_s=value.get("requests_per_s", Admin().requests_per_s))


def _changed_meanwhile(etag: str) -> ProblemError:
    hint = "read it again and send the new ETag"
    return ProblemError(412, "another request has changed it", hint, {"ETag": quoted(etag)})


def quoted(etag: str) -> str:
    """Returns an ETag as HTTP writes it."""
    return f'"{etag}"'
