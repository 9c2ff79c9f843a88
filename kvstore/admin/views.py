"""What the interface answers with: the shapes that OpenAPI documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstore.daemon.control import LONGEST_S
from kvstore.types import TENANT_PATTERN


class View(BaseModel):
    """Fields that are not documented are left out."""

    model_config = ConfigDict(extra="ignore")


class Live(View):
    """This process answers."""

    status: Literal["alive"] = "alive"


class Ready(View):
    """Whether the daemon serves from all of its tiers; if not, why."""

    ready: bool
    reasons: list[str] = Field(examples=[["nvme: writes are left out after failures"]])


class Version(View):
    """What runs. The daemon's is "" while it is away."""

    admin: str = Field(examples=["0.1.0"])
    daemon: str = Field(examples=["0.1.0"])


class Tier(View):
    """One tier: its limit, what it holds, and how its device does."""

    name: str = Field(examples=["dram"])
    limit_bytes: int
    capacity_bytes: int
    used_bytes: int
    blocks: int
    extents: dict[str, int] = Field(examples=[{"2097152 bytes a slot": 12}])
    retired_slots: int
    bandwidth_bytes_per_s: int
    readable: bool
    writable: bool
    fenced: bool
    scrub_passes: int


class TenantTier(View):
    """A tenant's part of a tier. `limit_bytes` null: no limit of its own."""

    name: str
    used_bytes: int
    floor_bytes: int
    limit_bytes: int | None


class Tenant(View):
    """What a tenant has of every tier, and may have."""

    name: str = Field(examples=["chat"])
    share: float
    tiers: list[TenantTier]


class Status(View):
    """The daemon as a whole."""

    version: str
    pid: int
    uptime_s: float
    connections: int
    queued_requests: int
    refused_requests: int
    blocks: int
    namespaces: int
    leases: int
    reservations: int
    copies_under_way: int
    core_ram_bytes: int
    huge_pages: bool
    nvme_io: str
    problems: list[str]
    counters: dict[str, int]


class Tiers(View):
    """All tiers, the fastest first."""

    tiers: list[Tier]


class Tenants(View):
    """A page of tenants. `next` is the `after` of the page that follows, null on the last one."""

    tenants: list[Tenant]
    next: str | None


class Namespace(View):
    """A namespace: whose it is, what its blocks are."""

    number: int
    id: str = Field(description="Names it for good; its number may change.")
    tenant: str
    layout: dict[str, Any] | None
    block_bytes: int
    published_to: list[str]
    ttl_s: float


class Namespaces(View):
    """A page of namespaces. `next` is the `after` of the page that follows, null on the last one."""

    namespaces: list[Namespace]
    next: int | None


class Copy(View):
    """Where a tier has a block, and what its policy says of it."""

    tier: str
    extent: int
    slot: int
    users: int
    policy: str
    says: str


class Decision(View):
    """What was decided about a block, how long ago."""

    what: str = Field(examples=["evicted"])
    tier: str
    ago_s: float
    score: float | None
    block_class: str = Field("", validation_alias="class", serialization_alias="class")


class Block(View):
    """What is known of a key in one namespace. Of what is not stored, only decisions."""

    key: str = Field(description="In hex.")
    tenant: str
    model: str
    revision: str
    shard: str
    state: str
    copies: list[Copy] = []
    moving: list[str] = []
    parent: str = ""
    parent_state: str = ""
    children: int | None = None
    pinned_s: float | None = None
    expires_s: float | None = None
    uses: int | None = None
    last_used_s: float | None = None
    decisions: list[Decision]


class Blocks(View):
    """What is known of one key, by namespace."""

    blocks: list[Block]


class Changed(View):
    """How many blocks a change was about."""

    blocks: int


class Readers(BaseModel):
    """Who may read a namespace besides its own tenant."""

    model_config = ConfigDict(extra="forbid")

    tenants: list[Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]] = Field(
        max_length=64, examples=[["batch"]]
    )


class Pin(BaseModel):
    """For how long a block is kept."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: float = Field(gt=0, le=LONGEST_S, examples=[3600])
