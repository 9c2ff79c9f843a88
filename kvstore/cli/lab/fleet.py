"""The command that simulates fleets: hit ratios, network bytes and times by the number of nodes."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvstore.cli.lab import reports
from kvstore.cli.lab.options import (
    SimulationOptions,
    TraceArgument,
    items_of,
    percent_of,
    replay_progress,
    status_line,
)
from kvstore.cli.shared.options import named
from kvstore.cli.shared.output import show
from kvstore.config import parse_duration, parse_size
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.lab.fleet.experiment import FleetExperiment


@dataclass(frozen=True, slots=True)
class FleetCommandOptions(SimulationOptions):
    """Options of the load, the network and the speeds of a fleet."""

    block_bytes: Annotated[
        str, Option(metavar="SIZE", help="Payload of a block, on all shards of a node.")
    ] = "64MiB"
    per_node: Annotated[
        str | None,
        Option(
            metavar="PERCENT",
            help="Load of each node: this share of the trace's conversations. Without it: 1%.",
        ),
    ] = None
    copies: Annotated[
        float | None,
        Option(help="Load of the whole fleet, for every number of nodes: 1 is the trace itself."),
    ] = None
    common: Annotated[
        str,
        Option(
            metavar="PERCENT",
            help="Blocks that this share of the trace's conversations uses are the same in all copies.",
        ),
    ] = "1%"
    decode: Annotated[
        str | None,
        Option(
            metavar="PERCENT", help="Share of the nodes that decode only. Without it: every node does both."
        ),
    ] = None
    prefill: Annotated[float, Option(metavar="TOKENS", help="Tokens per second that a node computes.")] = 1000
    nvme_rate: Annotated[
        str, Option(metavar="SIZE", help="Bytes per second that a node loads from NVMe.")
    ] = "3GB"
    network_rate: Annotated[
        str, Option(metavar="SIZE", help="Bytes per second that a node loads from the network.")
    ] = "1250MB"
    latency: Annotated[str, Option(metavar="TIME", help="Time before a download begins.")] = "2ms"
    network_admission: Annotated[
        str, Option(help="Blocks that are written to the network: always, twice or reuse.")
    ] = "always"
    network_threshold: Annotated[
        float, Option(min=0, max=1, help="With --network-admission reuse: minimum probability of reuse.")
    ] = 0.2
    seed: Annotated[int, Option(min=0, help="Seed of samples, copies, routing and conversations.")] = 1

    def experiment(
        self, trace: Path, nodes: str, routing: str, network: str, capacity: str, policy: str
    ) -> FleetExperiment:
        """Checks the options and reads the trace. Raises MisuseError, KVStoreError."""
        from kvstore.core.policy.admission import Rule  # noqa: PLC0415
        from kvstore.lab.fleet.experiment import FleetExperiment, FleetOptions  # noqa: PLC0415
        from kvstore.lab.fleet.simulation import Rates  # noqa: PLC0415

        if self.per_node is not None and self.copies is not None:
            raise MisuseError("--per-node and --copies exclude each other", "omit one of them")
        self.start()
        rates = Rates(
            prefill_tokens_per_s=self.prefill,
            nvme_bytes_per_s=named("--nvme-rate", parse_size, self.nvme_rate),
            network_bytes_per_s=named("--network-rate", parse_size, self.network_rate),
            latency_s=named("--latency", parse_duration, self.latency),
        )
        options = FleetOptions(
            nodes=[_count(item) for item in items_of("--nodes", nodes)],
            routings=items_of("--routing", routing),
            networks=items_of("--network", network),
            capacity=capacity,
            policy=policy,
            block_bytes=named("--block-bytes", parse_size, self.block_bytes),
            block_tokens=self.block_tokens,
            rates=rates,
            uploads=Rule(self.network_admission, self.network_threshold),  # type: ignore[arg-type]
            copies_per_node=named("--per-node", percent_of, self.per_node or "1%"),
            copies=self.copies,
            common_share=named("--common", percent_of, self.common),
            decode_share=named("--decode", percent_of, self.decode) if self.decode is not None else 0.0,
            seed=self.seed,
            loop=self.loop(),
            skip_bad=self.skip_bad,
            placement=self.placement(),
            processes=self.processes or os.cpu_count() or 1,
        )
        with status_line() as show_step:
            show_step(f"reading {trace.name}")
            return FleetExperiment(trace, options)


def fleet(
    trace: TraceArgument,
    *,
    nodes: Annotated[
        str, Option(metavar="LIST", help="Numbers of nodes, separated by commas.")
    ] = "1,10,100,1000",
    routing: Annotated[
        str,
        Option(metavar="LIST", help="Separated by commas: random, sticky, shortest-queue, events."),
    ] = "random,sticky,events",
    network: Annotated[
        str,
        Option(
            metavar="LIST",
            help="Network tiers, separated by commas: none, unlimited, 20% of the unique blocks, or 10TiB.",
        ),
    ] = "none,unlimited",
    capacity: Annotated[
        str,
        Option(
            metavar="SIZE",
            help="DRAM+NVMe of each node: 25%+50% of the unique blocks of its load, or 64GiB+1TiB.",
        ),
    ] = "25%+50%",
    policy: Annotated[str, Option(metavar="NAME", help="Eviction policy.")] = "hazard",
    options: FleetCommandOptions,
) -> None:
    """Compare routing and network tiers of fleets on a trace, in virtual time.

    Every node has the same load, so a larger fleet plays more of the trace, and then copies of it: a copy has
    blocks of its own, except those that many conversations share. A thousand nodes take minutes and about
    5 MiB each.

    Example: kvstore lab fleet trace.jsonl --nodes 1,10 --per-node 10%
    """
    from kvstore.lab.fleet import plots  # noqa: PLC0415

    experiment = options.experiment(trace, nodes, routing, network, capacity, policy)
    with replay_progress(experiment.accesses) as update:
        report = experiment.report(update)
    if options.plot is not None:
        plots.draw(report, options.plot)
    show(asdict(report), options.as_json, lambda: reports.fleet_table(report))


def _count(text: str) -> int:
    """Returns a number of nodes. Raises MisuseError for other texts."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise MisuseError(f"--nodes: {text!r:.80} is not a number of nodes", "such as 1,10,100")
    return int(text)
