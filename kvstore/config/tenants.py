"""The `[tenants.NAME]` and `[encryption]` sections: members, tokens and quotas, and checks across tenants."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvstore.config.sections import FilePath, Section
from kvstore.config.units import Duration, Size, format_size
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

Role = Literal["read", "write", "admin"]
TenantName = Annotated[str, AfterValidator(check_tenant)]


def _hash(value: object) -> str:
    # The message omits the value, which may be the token itself.
    if not isinstance(value, str) or not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", value):
        raise MisuseError(
            "this is not sha256: and 64 hexadecimal digits", "`kvstore tenant token NAME` prints such a hash"
        )
    return value.lower()


def _time(value: object) -> datetime:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)  # JSON has no type for times
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise MisuseError(
            f"{value!s:.40} is not a time", "a date, a time and an offset: 2027-01-01T00:00:00Z"
        )
    return value


def _above_0(size: int) -> int:
    if not size:
        raise MisuseError("0B per second is too little", "omit the key for no cap")
    return size


_Number = Annotated[int, Field(ge=0, lt=(1 << 32) - 1)]
_Numbers = Annotated[tuple[_Number, ...], Field(strict=False)]


class Secret(Section):
    """A token's SHA-256 hash and expiry (None: it never expires)."""

    hash: Annotated[str, BeforeValidator(_hash)]
    expires: Annotated[datetime, BeforeValidator(_time)] | None = None

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the hash."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def ends(self) -> float:
        """The expiry as Unix time in seconds; infinity if it never expires."""
        return math.inf if self.expires is None else self.expires.timestamp()


class Token(Secret):
    """A token of a tenant, and the role of its holders."""

    role: Role = "write"


class TierQuota(Section):
    """A tenant's quota in a tier, in bytes: `floor` is guaranteed, `limit` is never exceeded."""

    floor: Size = 0
    limit: Size | None = None

    @model_validator(mode="after")
    def _in_order(self) -> TierQuota:
        if self.limit is not None and self.floor > self.limit:
            raise MisuseError(
                f"a floor of {format_size(self.floor)} is above the limit of {format_size(self.limit)}",
                "lower the floor, or raise the limit",
            )
        return self


class Tenant(Section):
    """A tenant: its members, its quotas per tier, and its caps on bandwidth (bytes/s) and requests (1/s).

    `ttl` is the lifetime of blocks in seconds, `pin` the bytes that it may pin, `share` its weight.
    """

    uids: _Numbers = ()
    gids: _Numbers = ()
    role: Role = "write"
    ttl: Annotated[Duration, Field(gt=0)] | None = None
    pin: Size | None = None
    share: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    bandwidth: Annotated[Size, AfterValidator(_above_0)] | None = None
    requests: Annotated[int, Field(ge=1)] | None = None
    encrypt: bool = False
    dram: TierQuota = TierQuota()
    nvme: TierQuota = TierQuota()
    hbm: TierQuota = TierQuota()
    tokens: Annotated[tuple[Token, ...], Field(strict=False)] = ()

    @property
    def quotas(self) -> dict[str, TierQuota]:
        """Quotas by tier name. The quota of `hbm` applies to each GPU's pool."""
        return {"dram": self.dram, "nvme": self.nvme, "hbm": self.hbm}


class Encryption(Section):
    """The master key of encrypted tenants; by default the systemd credential `kvstore-key`."""

    key_file: FilePath | None = None


def check_apart(tenants: Mapping[str, Tenant]) -> None:
    """Raises MisuseError if two tenants share a uid, gid or token."""
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        members = [f"uid {uid}" for uid in set(tenant.uids)] + [f"gid {gid}" for gid in set(tenant.gids)]
        for member in [*members, *(f"token {token.hash}" for token in tenant.tokens)]:
            if member in owners:
                raise MisuseError(
                    f"{member} is given twice: to tenants.{owners[member]} and to tenants.{name}",
                    "a peer belongs to one tenant: remove it from the other one",
                )
            owners[member] = name


def check_floors(tenants: Mapping[str, Tenant], tier: str, limit_bytes: int) -> None:
    """Raises MisuseError if the floors of all tenants exceed a tier's limit."""
    total = sum(tenant.quotas[tier].floor for tenant in tenants.values())
    if total > limit_bytes:
        raise MisuseError(
            f"the floors of all tenants in {tier} add up to {format_size(total)} ({total} bytes), "
            f"{tier}.limit is {format_size(limit_bytes)} ({limit_bytes} bytes)",
            f"lower tenants.NAME.{tier}.floor, or raise {tier}.limit",
        )
