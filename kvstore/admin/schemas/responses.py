"""Response bodies, except those about the configuration (see `configuration`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """Base of responses. Drops fields that the model does not declare."""

    model_config = ConfigDict(extra="ignore")


class Live(View):
    """Liveness of this process."""

    status: Literal["alive"] = "alive"


class Ready(View):
    """Whether the daemon serves from all of its tiers, and the reasons if it does not."""

    ready: bool
    reasons: list[str] = Field(examples=[["nvme: writes are suspended after failures"]])


class Version(View):
    """Running versions. `daemon` is empty while the daemon does not answer."""

    admin: str = Field(examples=["0.1.0"])
    daemon: str = Field(examples=["0.1.0"])


class Tier(View):
    """One tier: its limit, its contents, and the state of its device."""

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
    fenced: bool = Field(description="Its device does not respond.")
    state: str = Field(examples=["serving"])
    scrub_passes: int


class TenantTier(View):
    """A tenant's use of one tier and its quota. `limit_bytes` is null if only the tier's limit applies."""

    name: str
    used_bytes: int
    floor_bytes: int
    limit_bytes: int | None


class Tenant(View):
    """A tenant: its use of every tier, and its quotas."""

    name: str = Field(examples=["chat"])
    share: float
    tiers: list[TenantTier]
    lent_bytes: dict[str, int] = Field(
        description="Bytes of its DRAM that leases of other tenants hold, by tenant."
    )


class NetworkTier(View):
    """The network tier: whether it is usable, its problem if not, and blocks by outcome."""

    kind: str = Field(examples=["filesystem"])
    usable: bool
    problem: str
    bandwidth_bytes_per_s: int
    coming_blocks: int
    going_blocks: int
    owed_removals: int
    counters: dict[str, int]


class Status(View):
    """State and counters of the daemon."""

    version: str
    pid: int
    uptime_s: float
    connections: int
    queued_requests: int
    wire_versions: dict[str, int] = Field(description="Connections by wire version.")
    refused_requests: int
    blocks: int
    namespaces: int
    leases: int
    reservations: int
    copies_under_way: int
    core_ram_bytes: int
    huge_pages: bool
    policy: str = Field(examples=["hazard"])
    gpus: dict[str, str] = Field(description="GPU UUIDs by pool name.")
    network: NetworkTier | None
    events: dict[str, int | str] = Field(description="KV events for routers; empty if none are published.")
    tracing: dict[str, int | str] = Field(description="Traces of requests; empty if none are exported.")
    copies: str = Field(
        description="What copies and verifies blocks: the C extension and its instruction set, or Python.",
        examples=["native, AVX2"],
    )
    nvme_io: str
    problems: list[str]
    counters: dict[str, int]


class TierHistory(View):
    """One tier's columns: bytes held; blocks found, served and written since the previous point."""

    name: str = Field(examples=["dram"])
    used_bytes: list[int | None]
    limit_bytes: list[int | None]
    found_blocks: list[int | None] = Field(description="Blocks of prompts that were stored when requested.")
    served_blocks: list[int | None] = Field(description="Blocks delivered to engines.")
    served_tokens: list[int | None]
    served_bytes: list[int | None]
    written_bytes: list[int | None]


class DecisionHistory(View):
    """Blocks by decision since the previous point. `tier` is empty if the decision applies to all tiers."""

    what: str = Field(examples=["evicted"])
    tier: str
    blocks: list[int | None]


class Admission(View):
    """Admission to a tier: mode and current threshold.

    `bytes_a_day` is the write budget, 0 if there is none; `spent` says whether it is used up for now.
    """

    mode: str = Field(examples=["reuse"])
    threshold: float
    bytes_a_day: int
    written_bytes: int
    refused_blocks: int
    spent: bool


class DeviceHistory(View):
    """The device of a tier: queued and moving bytes by class, and bytes written today."""

    tier: str = Field(examples=["nvme"])
    queued_bytes: dict[str, int]
    moving_bytes: dict[str, int]
    admission: Admission
    written_today_bytes: int


class History(View):
    """The last hour as columns of equal length. `at_s` is the Unix time of each point.

    Counts are increments since the previous point, `seconds` the time since it; both are null in gaps. Ratios
    and durations are null if no block was requested. `written_today_bytes` counts from `today_since_s`.
    """

    every_s: float
    at_s: list[float]
    seconds: list[float | None]
    hit_ratio: list[float | None] = Field(description="Found / requested.")
    delivered_ratio: list[float | None] = Field(description="Delivered / requested.")
    requested_blocks: list[int | None] = Field(
        description="Whole blocks of prompts; each block is counted once."
    )
    not_worth_loading_blocks: list[int | None] = Field(
        description="Found, but slower to load than to recompute."
    )
    too_late_blocks: list[int | None] = Field(description="Found, but not loaded by the deadline.")
    corrupt_blocks: list[int | None] = Field(description="Found, but with a wrong checksum.")
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
    """All tiers, fastest first."""

    tiers: list[Tier]


class PolicyTier(View):
    """Policy state of one tier. `weighs`: the policy estimates reuse and may refuse new blocks."""

    tier: str
    pools: int
    blocks: int
    state_bytes: int
    weighs: bool


class Policy(View):
    """The eviction policy: `name` is active, `wanted` is configured.

    During a change, `pools_left` pools still use the previous policy.
    """

    name: str = Field(examples=["hazard"])
    wanted: str = Field(examples=["hazard"])
    available: list[str] = Field(description="Built-in policies; others are named `module:Class`.")
    pools_left: int
    tiers: list[PolicyTier]


class Device(View):
    """The device of a tier: its state, queued and moving bytes by class, and its admission."""

    name: str = Field(examples=["nvme"])
    state: str = Field(
        description="Set by an operator: serving, draining or fenced; leaving: it is being removed."
    )
    hangs: bool
    readable: bool
    writable: bool
    queued_bytes: dict[str, int]
    moving_bytes: dict[str, int]
    moving: int
    bandwidth_bytes_per_s: int
    admission: Admission
    written_in_a_day_bytes: int
    drive_writes_a_day: float = Field(
        description="Bytes written in the last 24 hours, divided by the tier's limit."
    )


class Devices(View):
    """All devices, fastest first."""

    devices: list[Device]


class Transfer(View):
    """A copy of blocks of one namespace from one tier to another."""

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
    """A page of transfers. `next` is the `after` of the following page, null on the last page."""

    transfers: list[Transfer]
    next: int | None


class Tenants(View):
    """A page of tenants. `next` is the `after` of the following page, null on the last page."""

    tenants: list[Tenant]
    next: str | None


class Prompts(View):
    """Hit counters of a namespace over all tenants, since the daemon started or the namespace was opened."""

    requested_blocks: int
    found_blocks: dict[str, int] = Field(description="By tier.", examples=[{"dram": 12, "nvme": 3}])
    delivered_blocks: dict[str, int] = Field(description="By tier.")
    not_worth_loading_blocks: int
    too_late_blocks: int
    corrupt_blocks: int
    hit_ratio: float | None = Field(description="Found / requested.")
    delivered_ratio: float | None


class Namespace(View):
    """A namespace: its owner, its layout, and the hits of its prompts."""

    number: int
    id: str = Field(description="Stable identifier; the number may change.")
    tenant: str
    layout: dict[str, Any] | None
    block_bytes: int
    published_to: list[str]
    ttl_s: float
    prompts: Prompts


class Namespaces(View):
    """A page of namespaces. `next` is the `after` of the following page, null on the last page."""

    namespaces: list[Namespace]
    next: int | None


class Copy(View):
    """A copy of a block in one tier, and the policy's state of it."""

    tier: str
    extent: int
    slot: int
    users: int
    policy: str
    says: str


class Decision(View):
    """A decision about a block."""

    what: str = Field(examples=["evicted"])
    tier: str
    ago_s: float
    score: float | None
    block_class: str = Field("", validation_alias="class", serialization_alias="class")


class Block(View):
    """A block in one namespace. A block that is not stored has decisions only."""

    key: str = Field(description="The key in hex.")
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
    """Blocks with one key, one per namespace."""

    blocks: list[Block]


class Event(View):
    """A decision about a block, or an event of the daemon. `detail` is free text."""

    number: int
    at_s: float = Field(description="Unix time.")
    what: str = Field(examples=["evicted"])
    tier: str = Field(description="Empty if the event is about all tiers or none.")
    tenant: str
    namespace: str = Field(description="The `id` of the namespace.")
    key: str = Field(description="The key in hex; empty if the event is about no block.")
    score: float | None = Field(description="Expected uses of the block per second.")
    detail: str


class Events(View):
    """A page of events, oldest first. `next` is the `after` of the following page, unchanged at the end.

    `lost` counts events after `after` that were overwritten. Numbers are valid for one `instance` only.
    """

    events: list[Event]
    next: int
    lost: int
    instance: str


class Changed(View):
    """Number of blocks that a change affected."""

    blocks: int


class Recording(View):
    """Progress of a recording. `dropped` requests exceeded its size; `problem` says why it ended early."""

    running: bool = False
    passed_s: float = 0.0
    requests: int = 0
    blocks: int = 0
    dropped: int = 0
    problem: str = ""
