"""Commands of the lab: hit ratios of a recorded trace for policies and capacities, in virtual time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvstore.cli.lab import reports
from kvstore.cli.lab.options import (
    ExperimentOptions,
    TraceArgument,
    items_of,
    percent_of,
    replay_progress,
    status_line,
)
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import JsonOption, named
from kvstore.cli.shared.output import show
from kvstore.errors import MisuseError

app = Commands()


@app.callback()
def main() -> None:
    """Find the DRAM, NVMe and policy that a recorded trace needs."""


@app.command()
def replay(
    trace: TraceArgument,
    *,
    policies: Annotated[
        str, Option(metavar="NAMES", help="Eviction policies, separated by commas.")
    ] = "hazard",
    capacities: Annotated[
        str,
        Option(
            metavar="LIST",
            help="Separated by commas: 5% of the unique blocks, 64GiB, or DRAM+NVMe as 5%+1TiB.",
        ),
    ] = "1%,2%,5%,10%,25%",
    options: ExperimentOptions,
) -> None:
    """Compare policies and capacities on a trace, in virtual time.

    Belady's bound is the highest hit ratio that any policy reaches with this capacity.

    Example: kvstore lab replay trace.jsonl --capacities 5%,10%,5%+10%
    """
    names, sizes = items_of("--policies", policies), items_of("--capacities", capacities)
    experiment = options.experiment(trace)
    with replay_progress(len(names) * len(sizes) * experiment.workload.accesses) as update:
        report = experiment.report(names, sizes, update)
    options.show(report, asdict(report), lambda: reports.report_table(report))


@app.command()
def size(
    trace: TraceArgument,
    *,
    hit: Annotated[
        str | None, Option(metavar="PERCENT", help="Find the smallest DRAM with this hit ratio in tokens.")
    ] = None,
    nvme: Annotated[
        str | None, Option(metavar="SIZE", help="With --hit: size of the NVMe tier, 1TiB or 20%.")
    ] = None,
    budget: Annotated[
        float | None, Option(help="Find the best DRAM and NVMe sizes for this amount of money.")
    ] = None,
    dram_cost: Annotated[float | None, Option(help="With --budget: price of a GiB of DRAM.")] = None,
    nvme_cost: Annotated[float | None, Option(help="With --budget: price of a GiB of NVMe.")] = None,
    policy: Annotated[str, Option(metavar="NAME", help="Eviction policy.")] = "hazard",
    options: ExperimentOptions,
) -> None:
    """Find the smallest DRAM for a hit ratio, or the best split of a budget.

    Example: kvstore lab size trace.jsonl --hit 30%
    """
    from kvstore.lab import sizing  # noqa: PLC0415

    if (hit is None) == (budget is None):
        raise MisuseError("one of --hit and --budget is required", "--hit 30%")
    if budget is None and (dram_cost, nvme_cost) != (None, None):
        raise MisuseError("--dram-cost and --nvme-cost belong to --budget", "omit them")
    if hit is None and nvme is not None:
        raise MisuseError("--nvme belongs to --hit", "--budget determines the size of the NVMe tier")
    if budget is not None and (dram_cost is None or nvme_cost is None):
        raise MisuseError("--budget needs prices per GiB", "--dram-cost 4 --nvme-cost 0.1")
    experiment = options.experiment(trace)
    with status_line() as show_step:
        if hit is not None:
            tiers = named("--nvme", experiment.parse_nvme, nvme) if nvme is not None else ()
            target = named("--hit", percent_of, hit)
            found = sizing.for_hit_ratio(experiment, policy, target, tiers, show_step)
        else:
            assert budget is not None
            assert dram_cost is not None
            assert nvme_cost is not None
            prices = sizing.Prices(dram_cost, nvme_cost)
            found = sizing.for_budget(experiment, policy, budget, prices, show_step)
    options.show(found.report, asdict(found), lambda: reports.sizing_table(found))


@app.command()
def compare(
    a: Annotated[Path, Argument(help="A report of `kvstore lab replay --json`.")],
    b: Annotated[Path, Argument(help="The report to compare it with.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare the hit ratios and settings of two reports.

    Example: kvstore lab compare a.json b.json
    """
    from kvstore.lab.compare import compare as pair_up  # noqa: PLC0415
    from kvstore.lab.report import load  # noqa: PLC0415

    both = pair_up(load(a), load(b))
    show(both.to_map(), as_json, lambda: reports.comparison_table(both, a.name, b.name))
