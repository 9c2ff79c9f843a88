"""The `[tenants.NAME]` and `[encryption]` sections: members, tokens and quotas, and checks across tenants."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvstore.config.sections import FilePath, Section
from kvstore.config.units import GIB, MIB, Duration, Notation, Size, format_size
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


_HASH = f"sha256:{'0' * 64}"
_Number = Annotated[int, Field(ge=0, lt=(1 << 32) - 1), Notation("id", "ids")]
_Numbers = Annotated[tuple[_Number, ...], Field(strict=False)]


class Secret(Section):
    """A token, known by its hash."""

    hash: Annotated[
        str, BeforeValidator(_hash), Notation("`sha256:` and 64 hexadecimal digits"), Field(examples=[_HASH])
    ]
    """SHA-256 of the token

    `kvstore tenant token NAME` prints it.
    """
    expires: Annotated[
        Annotated[datetime, BeforeValidator(_time), Notation("date and time with an offset")] | None,
        Field(examples=[datetime(2030, 1, 1, tzinfo=UTC)]),
    ] = None
    """End of validity; absent: never"""

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the hash."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def ends(self) -> float:
        """The expiry as Unix time in seconds; infinity if it never expires."""
        return math.inf if self.expires is None else self.expires.timestamp()


class Token(Secret):
    """A token of a tenant, which may have several."""

    role: Role = "write"
    """Role of holders of the token"""


class TierQuota(Section):
    """A tenant's quota in a tier."""

    floor: Size = 0
    """Guaranteed bytes; all floors together are at most the tier's limit"""
    limit: Annotated[Size | None, Field(examples=[16 * GIB])] = None
    """Hard limit; absent: the tier's limit"""

    @model_validator(mode="after")
    def _in_order(self) -> TierQuota:
        if self.limit is not None and self.floor > self.limit:
            raise MisuseError(
                f"a floor of {format_size(self.floor)} is above the limit of {format_size(self.limit)}",
                "lower the floor, or raise the limit",
            )
        return self


class Tenant(Section):
    """A tenant. Without tenants, every peer may do everything.

    Its name has 1 to 64 letters, digits, "-", "_" and ".", and does not begin with a dot.
    Without tenants, every peer belongs to the tenant "default".
    """

    uids: Annotated[_Numbers, Field(examples=[[1001]])] = ()
    """User ids of peers of this tenant"""
    gids: _Numbers = ()
    """Group ids of peers of this tenant"""
    role: Role = "write"
    """Role of these peers"""
    ttl: Annotated[Annotated[Duration, Field(gt=0)] | None, Field(examples=[86400.0])] = None
    """Lifetime of blocks after their put; absent: unlimited"""
    pin: Annotated[Size | None, Field(examples=[GIB])] = None
    """Pinned bytes; absent: half of its DRAM limit"""
    share: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """Weight when tenants compete for room or bandwidth"""
    bandwidth: Annotated[Annotated[Size, AfterValidator(_above_0)] | None, Field(examples=[500 * MIB])] = None
    """Bytes per second between tiers; absent: no cap"""
    requests: Annotated[Annotated[int, Field(ge=1)] | None, Field(examples=[1000])] = None
    """Requests per second; absent: no cap"""
    encrypt: bool = False
    """Encrypts its blocks on NVMe with the key of `[encryption]`

    A tenant without namespaces changes at run time. Any other tenant needs a restart, which deletes its
    blocks on NVMe.
    """
    dram: TierQuota = Field(default_factory=TierQuota)
    """Quota in DRAM"""
    nvme: TierQuota = Field(default_factory=TierQuota)
    """Quota on all NVMe devices together"""
    hbm: TierQuota = Field(default_factory=TierQuota)
    """Quota in the pool of each GPU"""
    tokens: Annotated[tuple[Token, ...], Field(strict=False)] = ()

    @property
    def quotas(self) -> dict[str, TierQuota]:
        """Quotas by tier name. The quota of `hbm` applies to each GPU's pool."""
        return {"dram": self.dram, "nvme": self.nvme, "hbm": self.hbm}


class Encryption(Section):
    """Encryption of tenants with `encrypt = true`."""

    key_file: Annotated[FilePath | None, Field(examples=["/etc/kvstore/key"])] = None
    """Master key in hex, 32 bytes; absent: systemd credential `kvstore-key`"""


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
