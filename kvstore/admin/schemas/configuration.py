"""The shapes of what the interface says of the configuration, and takes for it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstore.admin.schemas.responses import WHOLE, View
from kvstore.config import HOLDER_PATTERN, NvmeDevice


class Settings(View):
    """What is set: by the file, and by changes since, which are a JSON merge patch on the file."""

    settings: dict[str, Any] = Field(examples=[{"dram": {"limit": "64GiB"}}])
    changes: dict[str, Any] = Field(examples=[{"scrub": {"rate": "8MiB"}}])


class Consequence(View):
    """What a change of quotas, or of a limit, does to a tenant (all of them: "") in a tier.

    `evicted_bytes` are over the new limit, and go. `claimed_bytes` of the new floor are not its own yet: it
    may take them from others when it needs them.
    """

    tenant: str
    tier: str
    evicted_bytes: int
    claimed_bytes: int


class SettingsChanged(View):
    """What has changed; or would, in a dry run. `kept`: also over a restart, see `daemon.changes`."""

    changed: list[str] = Field(examples=[["tenants.chat.dram.limit = 1073741824"]])
    consequences: list[Consequence]
    kept: bool
    dry_run: bool


class Reloaded(View):
    """What the file has that is new; and what of it needs a restart."""

    changed: list[str]
    needs_restart: list[str] = Field(examples=[["dram.limit"]])


_Bytes = Annotated[int, Field(ge=0, le=1 << 52), WHOLE]
_Id = Annotated[int, Field(ge=0, lt=(1 << 32) - 1), WHOLE]


class Quota(BaseModel):
    """A tenant's part of a tier, in bytes: never taken from it; never exceeded (null: the tier's limit)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    floor: _Bytes = 0
    limit: _Bytes | None = None


class TenantSettings(BaseModel):
    """Who is in a tenant, and what it may have. `ttl` in seconds; `pin`, `bandwidth` (a second) in bytes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    uids: list[_Id] = Field([], max_length=4096)
    gids: list[_Id] = Field([], max_length=4096)
    role: Literal["read", "write", "admin"] = "write"
    ttl: Annotated[float, Field(gt=0)] | None = None
    pin: _Bytes | None = None
    share: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    bandwidth: Annotated[int, Field(ge=1, le=1 << 52), WHOLE] | None = None
    requests: Annotated[int, Field(ge=1, le=1 << 52), WHOLE] | None = None
    encrypt: bool = False
    hbm: Quota = Quota()
    dram: Quota = Quota()
    nvme: Quota = Quota()


class DeviceSettings(BaseModel):
    """A device more in the NVMe tier: a folder on it, its limit in bytes, what may be written to it a day.

    `write_budget` in bytes, or in times the limit as in "1x"; 0: no bound.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096, examples=["/mnt/nvme1/kvstore"])]
    limit: Annotated[int, Field(ge=2 << 20, le=1 << 52), WHOLE] = NvmeDevice.model_fields["limit"].default
    write_budget: _Bytes | Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?x$", examples=["1x"])] = 0


class Token(View):
    """A token of a tenant's. `expires` null: never."""

    id: str
    role: str
    expires: datetime | None


class Tokens(View):
    """All tokens of a tenant."""

    tokens: list[Token]


class AdminToken(View):
    """A token of this interface. `expires` null: never."""

    name: str
    role: str
    expires: datetime | None


class AdminTokens(View):
    """All tokens of this interface."""

    tokens: list[AdminToken]


_Lifetime = Annotated[float, Field(gt=0, le=100 * 365 * 86400, examples=[7776000])]


class TenantTokenWanted(BaseModel):
    """What holders of a new token may do, and for how long (null: for ever)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["read", "write", "admin"] = "write"
    expires_in_s: _Lifetime | None = None


class TokenWanted(BaseModel):
    """Who is to get a token of this interface, what for, and for how long (null: for ever)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=HOLDER_PATTERN, examples=["grafana"])]
    role: Literal["view", "operate"] = "view"
    expires_in_s: _Lifetime | None = None


class NewToken(View):
    """A token that was just made. It is shown only here."""

    id: str
    token: str
    role: str
    expires: datetime | None
