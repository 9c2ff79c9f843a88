"""An experiment with fleets: one trace, and a fleet for each number of nodes, routing and network tier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from kvstore.config import parse_size
from kvstore.core.policy import find
from kvstore.core.policy.admission import Rule
from kvstore.errors import MisuseError
from kvstore.lab.capacity import parse_capacities
from kvstore.lab.closed_loop import ClosedLoop
from kvstore.lab.experiment import check_node, loop_of, trace_info, workload_of
from kvstore.lab.fleet.load import common_blocks
from kvstore.lab.fleet.network_tier import NetworkSize
from kvstore.lab.fleet.report import FleetReport, FleetSettings
from kvstore.lab.fleet.routing import ROUTERS
from kvstore.lab.fleet.simulation import FleetTask, Rates, play
from kvstore.lab.sweep import Progress, run_all
from kvstore.lab.traces import Trace
from kvstore.tiers.network.objects import HEADER_BYTES

MOST_NODES = 10_000
_ADMISSIONS = ("always", "twice", "reuse")
_NETWORK_HINT = (
    "none, unlimited, a share of the unique blocks of all requests such as 20%, or a size such as 10TiB"
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The fleets to simulate, and their load.

    A fleet of N nodes plays `copies` copies of the trace, or N times `copies_per_node` without `copies`.
    `capacity`: the tiers of each node; percentages are of the unique blocks of a node's part of the load.
    `loop`: for traces of conversations; its seed is `seed`. `placement`: options of SimulatedNode.
    """

    nodes: Sequence[int] = (1, 10, 100, 1000)
    routings: Sequence[str] = ("random", "sticky", "events")
    networks: Sequence[str] = ("none", "unlimited")
    capacity: str = "25%+50%"
    policy: str = "hazard"
    block_bytes: int = 64 << 20
    block_tokens: int | None = None
    rates: Rates = field(default_factory=lambda: Rates(1000, 3e9, 1.25e9, 0.002))
    uploads: Rule = field(default_factory=Rule)
    copies_per_node: float = 0.01
    copies: float | None = None
    common_share: float = 0.01
    decode_share: float = 0.0
    seed: int = 1
    loop: ClosedLoop | None = None
    skip_bad: bool = False
    placement: dict[str, str] = field(default_factory=dict)
    processes: int = 1

    def __post_init__(self) -> None:
        for n in self.nodes:
            if not 1 <= n <= MOST_NODES:
                raise MisuseError(f"a fleet has {n} nodes", f"1 to {MOST_NODES:,}")
        for name in self.routings:
            if name not in ROUTERS:
                raise MisuseError(f"no routing {name!r:.80}", f"one of {', '.join(ROUTERS)}")
        find(self.policy)
        check_node(self.block_bytes, self.placement)
        if self.uploads.mode not in _ADMISSIONS:
            raise MisuseError(
                f"unknown network admission {self.uploads.mode!r:.80}", f"one of {', '.join(_ADMISSIONS)}"
            )
        copies = self.copies_per_node if self.copies is None else self.copies
        if not 0 < copies <= MOST_NODES:
            raise MisuseError(f"{copies:g} copies of the trace", "more than 0, such as 0.01 a node")
        if not 0 < self.common_share <= 1:
            raise MisuseError(f"common_share is {self.common_share:g}", "more than 0, at most 1")
        if not 0 <= self.decode_share < 1:
            raise MisuseError(f"decode_share is {self.decode_share:g}", "at least 0, less than 1")
        if self.decode_share and min(self.nodes) < 2:
            raise MisuseError("one node cannot both prefill and decode apart", "at least 2 --nodes")
        if self.decode_share and "none" in self.networks:
            raise MisuseError("decode nodes get their blocks over the network", "--network unlimited")

    def copies_of(self, nodes: int) -> float:
        """Returns the copies of the trace that this many nodes play."""
        return round(nodes * self.copies_per_node, 9) if self.copies is None else self.copies


def parse_network(text: str, unique_blocks: int, block_bytes: int) -> NetworkSize:
    """Parses `none`, `unlimited`, a share of `unique_blocks` such as `20%`, or a size. Raises MisuseError."""
    if text in ("none", "unlimited"):
        return NetworkSize(text, 0 if text == "none" else None)
    if m := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%", text):
        blocks = int(unique_blocks * float(m[1]) / 100)
    elif text.isdecimal():
        raise MisuseError(f"{text} may mean blocks or bytes", _NETWORK_HINT)
    else:
        try:
            blocks = parse_size(text) // (block_bytes + HEADER_BYTES)
        except MisuseError:
            raise MisuseError(f"{text!r:.80} is no network tier", _NETWORK_HINT) from None
    if not blocks:
        raise MisuseError(f"{text} on the network holds no block", "a larger one, or none")
    return NetworkSize(text, blocks)


class FleetExperiment:
    """Reads a trace and simulates fleets.

    Raises KVStoreError if the trace cannot be read, MisuseError if the options do not fit the trace.
    """

    def __init__(self, path: Path, options: FleetOptions) -> None:
        self.options = options
        self._trace = Trace(path, options.skip_bad)
        loop = loop_of(self._trace, options.loop)
        self._loop = None if loop is None else replace(loop, seed=options.seed)
        self.workload = workload_of(self._trace, options.block_tokens, self._loop)
        self._check_rates()
        self.tasks = [
            self._task(nodes, routing, network)
            for nodes in dict.fromkeys(options.nodes)
            for routing in dict.fromkeys(options.routings)
            for network in dict.fromkeys(options.networks)
        ]

    @property
    def accesses(self) -> int:
        """About how many accesses all fleets have together."""
        return round(sum(task.copies * self.workload.accesses for task in self.tasks))

    def report(self, progress: Progress | None = None) -> FleetReport:
        """Simulates all fleets. `progress` gets the number of accesses done."""
        # The largest fleets first, so that no process ends long after the others.
        order = sorted(range(len(self.tasks)), key=lambda i: -self.tasks[i].copies * self.tasks[i].nodes)
        tasks = [self.tasks[i] for i in order]
        points = run_all(play, self.workload, tasks, self.options.processes, progress)
        in_order = [point for _, point in sorted(zip(order, points, strict=True), key=lambda pair: pair[0])]
        w = self.workload
        best = (w.accesses - w.unique_blocks) * w.block_tokens / max(1, int(w.input_tokens.sum()))
        return FleetReport(trace_info(self._trace, w, best), self._settings(), in_order)

    def _task(self, nodes: int, routing: str, network: str) -> FleetTask:
        o, copies = self.options, self.options.copies_of(nodes)
        unique = self.workload.unique_blocks * copies
        decode = min(max(1, round(o.decode_share * nodes)), nodes - 1) if o.decode_share else 0
        return FleetTask(
            nodes=nodes,
            routing=routing,
            network=parse_network(network, int(unique), o.block_bytes),
            capacities=parse_capacities(o.capacity, int(unique / nodes), o.block_bytes),
            block_bytes=o.block_bytes,
            rates=o.rates,
            copies=copies,
            common_share=o.common_share,
            decode_nodes=decode,
            options={"policy": o.policy, **o.placement},
            uploads=o.uploads,
            seed=o.seed,
        )

    def _check_rates(self) -> None:
        """Raises MisuseError for a tier that is slower than computing: a daemon would not load from it."""
        o = self.options
        compute_s = o.rates.compute_s(self.workload.block_tokens)
        used = {
            "NVMe": o.rates.nvme_bytes_per_s if "+" in o.capacity else 0.0,
            "the network": o.rates.network_bytes_per_s if set(o.networks) != {"none"} else 0.0,
        }
        for name, speed in used.items():
            if speed and o.block_bytes / speed > compute_s:
                raise MisuseError(
                    f"a block is loaded from {name} in {1000 * o.block_bytes / speed:.0f} ms "
                    f"and computed in {1000 * compute_s:.0f} ms",
                    "blocks that load more slowly than they are computed are misses: leave this tier out",
                )

    def _settings(self) -> FleetSettings:
        o, w = self.options, self.workload
        common = common_blocks(w, o.common_share)
        loop = asdict(self._loop) if self._loop else {}
        loop.pop("seed", None)
        return FleetSettings(
            block_tokens=w.block_tokens,
            block_bytes=o.block_bytes,
            capacity=o.capacity,
            policy=o.policy,
            prefill_tokens_per_s=o.rates.prefill_tokens_per_s,
            nvme_bytes_per_s=o.rates.nvme_bytes_per_s,
            network_bytes_per_s=o.rates.network_bytes_per_s,
            network_latency_s=o.rates.latency_s,
            network_admission=o.uploads.mode,
            copies_per_node=o.copies_per_node if o.copies is None else None,
            common_share=o.common_share,
            common_block_ratio=int(np.count_nonzero(common[w.blocks])) / max(1, w.accesses),
            decode_share=o.decode_share,
            seed=o.seed,
            options=o.placement,
            **loop,
        )
