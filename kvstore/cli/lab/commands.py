"""Commands of the lab: hit ratios of a recorded trace for policies and capacities, in virtual time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvstore.cli.lab import reports
from kvstore.cli.lab.options import (
    RecommendOptions,
    ReplayOptions,
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

if TYPE_CHECKING:
    from kvstore.lab.capacity import Capacities

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
    options: ReplayOptions,
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
def recommend(
    trace: TraceArgument,
    *,
    hit: Annotated[
        str | None,
        Option(
            metavar="PERCENT",
            help="Hit ratio in tokens. Without it: 90 % of what a cache with room for everything serves.",
        ),
    ] = None,
    nvme: Annotated[
        str | None,
        Option(
            metavar="SIZE", help="Size of the NVMe tier, 1TiB or 20%; none: DRAM alone. Without it: searched."
        ),
    ] = None,
    budget: Annotated[
        float | None, Option(help="Find the best DRAM and NVMe sizes for this amount of money instead.")
    ] = None,
    dram_cost: Annotated[float | None, Option(help="With --budget: price of a GiB of DRAM.")] = None,
    nvme_cost: Annotated[float | None, Option(help="With --budget: price of a GiB of NVMe.")] = None,
    policies: Annotated[
        str,
        Option(metavar="NAMES", help="Eviction policies: the first is searched with, the others compared."),
    ] = "hazard,lru,s3fifo",
    options: RecommendOptions,
) -> None:
    """Recommend DRAM, NVMe and a policy, and tell what they save: one page.

    The smallest DRAM for a hit ratio, and less of it beside NVMe where that serves as much; or the best split
    of a budget.

    Example: kvstore lab recommend trace.jsonl --prefill 20000
    """
    from kvstore.lab import recommendation, sizing  # noqa: PLC0415

    if hit is not None and budget is not None:
        raise MisuseError("--hit and --budget exclude each other", "omit one of them")
    if budget is None and (dram_cost, nvme_cost) != (None, None):
        raise MisuseError("--dram-cost and --nvme-cost belong to --budget", "omit them")
    if budget is not None and nvme is not None:
        raise MisuseError("--nvme and --budget exclude each other", "--budget determines the size of NVMe")
    if budget is not None and (dram_cost is None or nvme_cost is None):
        raise MisuseError("--budget needs prices per GiB", "--dram-cost 4 --nvme-cost 0.1")
    names, speeds = items_of("--policies", policies), options.speeds()
    target = named("--hit", percent_of, hit) if hit is not None else None
    experiment = options.experiment(trace)
    with status_line() as show_step:
        if budget is not None:
            assert dram_cost is not None
            assert nvme_cost is not None
            found = sizing.for_budget(
                experiment, names, budget, sizing.Prices(dram_cost, nvme_cost), show_step
            )
        else:
            loads_faster = recommendation.nvme_tokens_per_s(experiment, speeds) >= speeds.prefill_tokens_per_s
            tiers: Capacities | None = None if nvme is None and loads_faster else ()
            if nvme is not None and nvme != "none":
                tiers = named("--nvme", experiment.parse_nvme, nvme)
            wanted = target or recommendation.OF_BEST * experiment.best_ratio
            found = sizing.for_hit_ratio(experiment, names, wanted, tiers, speeds.nvme_bytes_per_s, show_step)
    page = recommendation.recommend(experiment, found, speeds)
    options.show(found.report, asdict(page), lambda: reports.recommendation_page(page))


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
