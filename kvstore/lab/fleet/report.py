"""The report of an experiment with fleets: plain data, written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.lab.report import TraceInfo

VERSION = 1


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The settings of all fleets. `copies_per_node` None: `copies` are the same for every number of nodes.

    `common_block_ratio`: accesses of the trace to blocks that all copies share / all accesses. `policy` and
    `options`: those of each node. `users` to `shared` are None if the trace has its own clock.
    """

    block_tokens: int
    block_bytes: int
    capacity: str
    policy: str
    prefill_tokens_per_s: float
    nvme_bytes_per_s: float
    network_bytes_per_s: float
    network_latency_s: float
    network_admission: str
    copies_per_node: float | None
    common_share: float
    common_block_ratio: float
    decode_share: float
    seed: int
    options: dict[str, str] = field(default_factory=dict)
    users: int | None = None
    gap_cap_s: float | None = None
    shared: float | None = None


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """One fleet: a number of nodes with one routing and one network tier.

    `copies`: copies of the trace that it played. `hit_ratio`: tokens served / input tokens, of which
    `network_hit_ratio` came from the network; `best_hit_ratio`: that of one cache for all with room for
    everything. `hits_by_tier` and `computed_blocks` add up to `accesses`. Blocks that are handed off to
    decode nodes are no hits, but they are network bytes. `ttft`: from a request's arrival to its first token.
    `busy_ratio`: share of the time in which a node that prefills works. `most_requests_ratio`: requests of
    the node with the most / mean of all nodes that prefill.
    """

    nodes: int
    decode_nodes: int
    routing: str
    network: str
    copies: float
    requests: int
    requests_per_s: float
    accesses: int
    best_hit_ratio: float
    hit_ratio: float
    network_hit_ratio: float
    hits_by_tier: dict[str, int]
    computed_blocks: int
    denied_blocks: int
    network_read_bytes: int
    network_written_bytes: int
    network_bytes_per_request: float
    network_stored_bytes: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    busy_ratio: float
    most_requests_ratio: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """An experiment with fleets. `version`: the version of this format."""

    trace: TraceInfo
    settings: FleetSettings
    points: list[FleetPoint]
    version: int = VERSION
