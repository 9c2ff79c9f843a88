"""What the interface answers with: the shapes that OpenAPI documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.daemon.operator.blocks import LONGEST_S
from kvstore.types import MAX_KEY_BYTES, TENANT_PATTERN


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""For integers as JSON has them: 1.0 is one."""


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
    fenced: bool = Field(description="Its device hangs.")
    state: str = Field(examples=["serving"])
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
    lent_bytes: dict[str, int] = Field(description="What others' leases hold of its DRAM, by tenant.")


class NetworkTier(View):
    """What this node shares with others: whether it is asked, and why not; blocks by what became of them."""

    kind: str = Field(examples=["filesystem"])
    usable: bool
    problem: str
    bandwidth_bytes_per_s: int
    coming_blocks: int
    going_blocks: int
    owed_removals: int
    counters: dict[str, int]


class Status(View):
    """The daemon as a whole."""

    version: str
    pid: int
    uptime_s: float
    connections: int
    queued_requests: int
    wire_versions: dict[str, int] = Field(description="Connections by the version of the wire.")
    refused_requests: int
    blocks: int
    namespaces: int
    leases: int
    reservations: int
    copies_under_way: int
    core_ram_bytes: int
    huge_pages: bool
    policy: str = Field(examples=["hazard"])
    gpus: dict[str, str] = Field(description="UUIDs of GPUs, by the names of their pools.")
    network: NetworkTier | None
    events: dict[str, int | str] = Field(description="KV events for routers, if they are published.")
    nvme_io: str
    problems: list[str]
    counters: dict[str, int]


class TierHistory(View):
    """One tier, point by point: what it held; what was found, served and written since the point before."""

    name: str = Field(examples=["dram"])
    used_bytes: list[int | None]
    limit_bytes: list[int | None]
    found_blocks: list[int | None] = Field(description="Of prompts, when they were asked for.")
    served_blocks: list[int | None] = Field(description="Delivered to engines.")
    served_tokens: list[int | None]
    served_bytes: list[int | None]
    written_bytes: list[int | None]


class DecisionHistory(View):
    """Blocks that something was decided about, since the point before. `tier` "": all of them."""

    what: str = Field(examples=["evicted"])
    tier: str
    blocks: list[int | None]


class Admission(View):
    """What a tier takes, by which threshold now. `bytes_a_day` 0: no bound; `spent`: none is left for now."""

    mode: str = Field(examples=["reuse"])
    threshold: float
    bytes_a_day: int
    written_bytes: int
    refused_blocks: int
    spent: bool


class DeviceHistory(View):
    """A tier's device as it was lately: its queue by class, and what went to it today."""

    tier: str = Field(examples=["nvme"])
    queued_bytes: dict[str, int]
    moving_bytes: dict[str, int]
    admission: Admission
    written_today_bytes: int


class History(View):
    """The last hour by columns, all as long as `at_s` (Unix time): counts are since the point before.

    `seconds` is the time between both, null where that is not known: so are its counts. Ratios and durations
    are null too where nothing was asked for. `today_since_s`: since when what went to devices today is known.
    """

    every_s: float
    at_s: list[float]
    seconds: list[float | None]
    hit_ratio: list[float | None] = Field(description="Found / requested.")
    delivered_ratio: list[float | None] = Field(description="Delivered / requested.")
    requested_blocks: list[int | None] = Field(description="Whole blocks of prompts, each counted once.")
    not_worth_loading_blocks: list[int | None] = Field(description="Found: computing them again is faster.")
    too_late_blocks: list[int | None] = Field(description="Found: not loaded by the deadline.")
    corrupt_blocks: list[int | None] = Field(description="Found: wrong bytes.")
    acquires: list[int | None]
    acquire_p50_s: list[float | None]
    acquire_p99_s: list[float | None]
    missed_blocks: list[int | None]
    missed_tokens: list[int | None]
    missed_bytes: list[int | None]
    tiers: list[TierHistory]
    decisions: list[DecisionHistory]
    devices: list[DeviceHistory]
    today_since_s: float


class Tiers(View):
    """All tiers, the fastest first."""

    tiers: list[Tier]


class PolicyTier(View):
    """What the policies of one tier know. `weighs`: they know what blocks earn, and refuse new ones by it."""

    tier: str
    pools: int
    blocks: int
    state_bytes: int
    weighs: bool


class Policy(View):
    """The eviction policy: `name` is at work, `wanted` what it is to be.

    `pools_left` still have the one from before.
    """

    name: str = Field(examples=["hazard"])
    wanted: str = Field(examples=["hazard"])
    available: list[str] = Field(description="By name; there may be others, as `module:Class`.")
    pools_left: int
    tiers: list[PolicyTier]


class Device(View):
    """What a tier lies on, what waits for it and is under way, in bytes by class, and what it takes."""

    name: str = Field(examples=["nvme"])
    state: str = Field(description="What an operator wants: serving, draining, fenced; leaving: removed.")
    hangs: bool
    readable: bool
    writable: bool
    queued_bytes: dict[str, int]
    moving_bytes: dict[str, int]
    moving: int
    bandwidth_bytes_per_s: int
    admission: Admission
    written_in_a_day_bytes: int
    drive_writes_a_day: float = Field(description="Written in the last 24 hours, in limits of the tier.")


class Devices(View):
    """All devices, the fastest first."""

    devices: list[Device]


class Transfer(View):
    """Some blocks of one namespace on their way from one tier to another."""

    number: int
    source: str = Field(examples=["nvme"])
    target: str = Field(examples=["dram"])
    work: str = Field(validation_alias="class", serialization_alias="class", examples=["demand"])
    state: str = Field(examples=["queued"])
    tenant: str
    namespace: str
    blocks: int
    bytes: int


class Transfers(View):
    """A page of transfers. `next` is the `after` of the page that follows, null on the last one."""

    transfers: list[Transfer]
    next: int | None


class Tenants(View):
    """A page of tenants. `next` is the `after` of the page that follows, null on the last one."""

    tenants: list[Tenant]
    next: str | None


class Prompts(View):
    """Blocks of a namespace's prompts, since the daemon began or the namespace was opened, whoever asked."""

    requested_blocks: int
    found_blocks: dict[str, int] = Field(description="By tier.", examples=[{"dram": 12, "nvme": 3}])
    delivered_blocks: dict[str, int] = Field(description="By tier.")
    not_worth_loading_blocks: int
    too_late_blocks: int
    corrupt_blocks: int
    hit_ratio: float | None = Field(description="Found / requested.")
    delivered_ratio: float | None


class Namespace(View):
    """A namespace: whose it is, what its blocks are, what its prompts found."""

    number: int
    id: str = Field(description="Names it for good; its number may change.")
    tenant: str
    layout: dict[str, Any] | None
    block_bytes: int
    published_to: list[str]
    ttl_s: float
    prompts: Prompts


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


class Event(View):
    """What was decided about a block, or happened to the daemon. `detail` is for people."""

    number: int
    at_s: float = Field(description="Unix time.")
    what: str = Field(examples=["evicted"])
    tier: str = Field(description='"" for all of them, or none.')
    tenant: str
    namespace: str = Field(description="Its `id`.")
    key: str = Field(description='In hex; "" if it is about no block.')
    score: float | None = Field(description="Uses a second that were expected of the block.")
    detail: str


class Events(View):
    """Some events, the oldest first. `next` is the `after` of the page that follows, itself at the end.

    `lost`: how many that came after had been overwritten. `instance`: another one has other numbers.
    """

    events: list[Event]
    next: int
    lost: int
    instance: str


class Changed(View):
    """How many blocks a change was about."""

    blocks: int


class Readers(BaseModel):
    """Who may read a namespace besides its own tenant."""

    model_config = ConfigDict(extra="forbid")

    tenants: list[Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]] = Field(
        max_length=64, examples=[["batch"]]
    )


class DeviceState(BaseModel):
    """What a device is to do. draining: nothing more is written there. fenced: nothing is read either."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["serving", "draining", "fenced"]


KEY_PATTERN = rf"^([0-9a-fA-F]{{2}}){{1,{MAX_KEY_BYTES}}}$"
"""A key in hex."""

_Key = Annotated[str, Field(pattern=KEY_PATTERN)]


class Prefix(BaseModel):
    """A chain of blocks from its first one on: keys in hex, all of the same length."""

    model_config = ConfigDict(extra="forbid")

    keys: list[_Key] = Field(min_length=1, max_length=512, examples=[["00ff", "01ff"]])


class Pin(BaseModel):
    """For how long a block is kept."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: float = Field(gt=0, le=LONGEST_S, examples=[3600])
