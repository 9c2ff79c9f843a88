"""Request and response bodies about the configuration: settings, quotas, devices, tokens."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from kvstore.admin.schemas.requests import WHOLE, StrictBody
from kvstore.admin.schemas.responses import View
from kvstore.config import HOLDER_PATTERN, NvmeDevice


class Settings(View):
    """Effective settings, and the changes since the file was read as a JSON merge patch on the file."""

    settings: dict[str, Any] = Field(examples=[{"dram": {"limit": "64GiB"}}])
    changes: dict[str, Any] = Field(examples=[{"scrub": {"rate": "8MiB"}}])


class Consequence(View):
    """Effect of a changed quota or limit on a tenant (empty: all tenants) in one tier.

    `evicted_bytes` exceed the new limit and are evicted. `claimed_bytes` belong to the new floor but are used
    by other tenants; the tenant takes them over when it needs them.
    """

    tenant: str
    tier: str
    evicted_bytes: int
    claimed_bytes: int


class SettingsChanged(View):
    """Changed settings, or the settings that would change in a dry run. `kept`: they survive a restart."""

    changed: list[str] = Field(examples=[["tenants.chat.dram.limit = 1073741824"]])
    consequences: list[Consequence]
    kept: bool
    dry_run: bool


class Reloaded(View):
    """Settings that a reload changed, and settings that need a restart."""

    changed: list[str]
    needs_restart: list[str] = Field(examples=[["dram.limit"]])


_Bytes = Annotated[int, Field(ge=0, le=1 << 52), WHOLE]
_Id = Annotated[int, Field(ge=0, lt=(1 << 32) - 1), WHOLE]


class Quota(StrictBody):
    """A tenant's quota in one tier, in bytes: guaranteed `floor`, hard `limit` (null: the tier's limit)."""

    floor: _Bytes = 0
    limit: _Bytes | None = None


class TenantSettings(StrictBody):
    """Members and quotas of a tenant. `ttl` is in s, `pin` in bytes, `bandwidth` in bytes/s."""

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


class DeviceSettings(StrictBody):
    """A device of the NVMe tier: its folder, its limit in bytes, its write budget per day.

    `write_budget` is in bytes, or a multiple of the limit such as "1x"; 0: no budget.
    """

    path: Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096, examples=["/mnt/nvme1/kvstore"])]
    limit: Annotated[int, Field(ge=2 << 20, le=1 << 52), WHOLE] = NvmeDevice.model_fields["limit"].default
    write_budget: _Bytes | Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?x$", examples=["1x"])] = 0


class Token(View):
    """A token of a tenant. `expires` is null if it never expires."""

    id: str
    role: str
    expires: datetime | None


class Tokens(View):
    """The tokens of a tenant."""

    tokens: list[Token]


class AdminToken(View):
    """A token of the REST interface. `expires` is null if it never expires."""

    name: str
    role: str
    expires: datetime | None


class AdminTokens(View):
    """The tokens of the REST interface."""

    tokens: list[AdminToken]


_Lifetime = Annotated[float, Field(gt=0, le=100 * 365 * 86400, examples=[7776000])]


class TenantTokenWanted(StrictBody):
    """Role and lifetime of a new token of a tenant (null: it never expires)."""

    role: Literal["read", "write", "admin"] = "write"
    expires_in_s: _Lifetime | None = None


class TokenWanted(StrictBody):
    """Holder, role and lifetime of a new token of the REST interface (null: it never expires)."""

    name: Annotated[str, Field(pattern=HOLDER_PATTERN, examples=["grafana"])]
    role: Literal["view", "operate"] = "view"
    expires_in_s: _Lifetime | None = None


class NewToken(View):
    """A new token. No other response contains it."""

    id: str
    token: str
    role: str
    expires: datetime | None
