"""Commands of the lab: what a cache of some size would have served of a recorded trace, in virtual time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.cli.lab import reports
from kvstore.cli.shared.options import JsonOption, named, unwind_on_sigterm
from kvstore.config import parse_duration, parse_size
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.lab.experiment import Experiment

app = typer.Typer(no_args_is_help=True)

TraceArgument = Annotated[
    Path, typer.Argument(help="Chat requests or agent conversations, JSON lines or .zst.")
]
BlockBytes = Annotated[str, typer.Option(metavar="SIZE", help="Payload of a block.")]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a block, a multiple of the trace's.", show_default="chats 512, conversations 256"
    ),
]
WritePolicy = Annotated[str, typer.Option(help="write_through or on_evict.")]
AdmissionOption = Annotated[str, typer.Option(help="What goes to NVMe: always, twice or reuse.")]
Threshold = Annotated[float, typer.Option(min=0, max=1, help="With --admission reuse: how likely.")]
WriteBudget = Annotated[
    str, typer.Option(metavar="SIZE", help="Written to NVMe a day: 500GiB, or 1x its limit; 0: no bound.")
]
Repeat = Annotated[int, typer.Option(min=1, help="Play the trace so often, each time with other blocks.")]
Users = Annotated[
    int | None, typer.Option(help="Conversations: how many are played at a time.", show_default="64")
]
GapCap = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Conversations: longest pause within, and between two.", show_default="300s"
    ),
]
Shared = Annotated[
    float | None,
    typer.Option(help="Conversations: part of tools and system prompt that all share.", show_default="0.5"),
]
Seed = Annotated[
    int | None, typer.Option(help="Conversations: for their order and the pauses.", show_default="1")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that are bad, and count them.")]
Processes = Annotated[int, typer.Option(min=0, help="Replays at a time; 0: one a core.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it too, as .png or .svg.")]


@app.callback()
def main() -> None:
    """How much DRAM and NVMe a trace needs, with which policy, and how long the drives last."""


@app.command()
def replay(
    trace: TraceArgument,
    *,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Eviction policies, by commas.")] = "hazard",
    capacities: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="By commas: 5% of the unique blocks, 64GiB, or DRAM+NVMe: 5%+1TiB."
        ),
    ] = "1%,2%,5%,10%,25%",
    block_bytes: BlockBytes = "2MiB",
    block_tokens: BlockTokens = None,
    write_policy: WritePolicy = "write_through",
    admission: AdmissionOption = "always",
    threshold: Threshold = 0.2,
    write_budget: WriteBudget = "0",
    repeat: Repeat = 1,
    users: Users = None,
    gap_cap: GapCap = None,
    shared: Shared = None,
    seed: Seed = None,
    skip_bad: SkipBad = False,
    processes: Processes = 0,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace in virtual time: every policy with every capacity, and Belady's bound beside.

    Example: kvstore lab replay trace.jsonl --capacities 5%,10%,5%+10%
    """
    crowd = {"users": users, "gap_cap": gap_cap, "shared": shared, "seed": seed}
    names, sizes = _items("--policies", policies), _items("--capacities", capacities)
    _check_plot(plot)
    node = _node(write_policy, admission, threshold, write_budget)
    study = _study(trace, block_bytes, block_tokens, node, repeat, crowd, skip_bad, processes)
    with _progress(len(names) * len(sizes) * study.workload.accesses) as tell:
        report = study.report(names, sizes, tell)
    _draw(report, plot)
    _show(report.to_map(), as_json, lambda: reports.report_table(report))


@app.command()
def size(
    trace: TraceArgument,
    *,
    hit: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Find the smallest DRAM that serves so many tokens.")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --hit: the NVMe beside it, 1TiB or 20%.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Find the best DRAM and NVMe for so much money.")
    ] = None,
    dram_cost: Annotated[float | None, typer.Option(help="With --budget: what a GiB of DRAM costs.")] = None,
    nvme_cost: Annotated[float | None, typer.Option(help="With --budget: what a GiB of NVMe costs.")] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Eviction policy.")] = "hazard",
    block_bytes: BlockBytes = "2MiB",
    block_tokens: BlockTokens = None,
    write_policy: WritePolicy = "write_through",
    admission: AdmissionOption = "always",
    threshold: Threshold = 0.2,
    write_budget: WriteBudget = "0",
    repeat: Repeat = 1,
    users: Users = None,
    gap_cap: GapCap = None,
    shared: Shared = None,
    seed: Seed = None,
    skip_bad: SkipBad = False,
    processes: Processes = 0,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest DRAM for a hit ratio, or the best split of a budget, by replaying.

    Example: kvstore lab size trace.jsonl --hit 30%
    """
    from kvstore.lab import sizing  # noqa: PLC0415

    if (hit is None) == (budget is None):
        raise MisuseError("either --hit or --budget says what to look for", "--hit 30%")
    if budget is None and (dram_cost, nvme_cost) != (None, None):
        raise MisuseError("--dram-cost and --nvme-cost are for --budget", "drop them")
    if hit is None and nvme is not None:
        raise MisuseError("--nvme is for --hit", "--budget finds the NVMe itself")
    if budget is not None and (dram_cost is None or nvme_cost is None):
        raise MisuseError("--budget needs prices", "--dram-cost 4 --nvme-cost 0.1, for a GiB")
    _check_plot(plot)
    crowd = {"users": users, "gap_cap": gap_cap, "shared": shared, "seed": seed}
    node = _node(write_policy, admission, threshold, write_budget)
    study = _study(trace, block_bytes, block_tokens, node, repeat, crowd, skip_bad, processes)
    with _status() as doing:
        if hit is not None:
            tiers = named("--nvme", study.parse_nvme, nvme) if nvme is not None else ()
            found = sizing.for_hit_ratio(study, policy, named("--hit", _percent, hit), tiers, doing)
        else:
            assert budget is not None
            assert dram_cost is not None
            assert nvme_cost is not None
            found = sizing.for_budget(study, policy, budget, sizing.Prices(dram_cost, nvme_cost), doing)
    _draw(found.report, plot)
    _show(found.to_map(), as_json, lambda: reports.sizing_table(found))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A report of `kvstore lab replay --json`.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Two reports side by side: differences in points, and what else is not the same.

    Example: kvstore lab compare a.json b.json
    """
    from kvstore.lab.compare import compare as pair_up  # noqa: PLC0415
    from kvstore.lab.report import load  # noqa: PLC0415

    both = pair_up(load(a), load(b))
    _show(both.to_map(), as_json, lambda: reports.comparison_table(both, a.name, b.name))


def _node(write_policy: str, admission: str, threshold: float, write_budget: str) -> dict[str, str]:
    return {
        "write_policy": write_policy,
        "admission": admission,
        "admission_threshold": str(threshold),
        "write_budget": write_budget,
    }


def _study(
    trace: Path,
    block_bytes: str,
    block_tokens: int | None,
    node: dict[str, str],
    repeat: int,
    crowd: dict[str, Any],
    skip_bad: bool,
    processes: int,
) -> Experiment:
    from kvstore.lab.closed_loop import ClosedLoop  # noqa: PLC0415
    from kvstore.lab.experiment import Experiment, Options  # noqa: PLC0415

    unwind_on_sigterm()
    given = {name: value for name, value in crowd.items() if value is not None}
    if "gap_cap" in given:
        given["gap_cap_s"] = named("--gap-cap", parse_duration, given.pop("gap_cap"))
    options = Options(
        block_bytes=named("--block-bytes", parse_size, block_bytes),
        block_tokens=block_tokens,
        loop=ClosedLoop(**given) if given else None,
        skip_bad=skip_bad,
        placement=node,
        repeat=repeat,
        processes=processes or os.cpu_count() or 1,
    )
    with _status() as doing:
        doing(f"reading {trace.name}")
        return Experiment(trace, options)


def _items(option: str, text: str) -> list[str]:
    """What stands between commas, each once."""
    items = list(dict.fromkeys(item.strip() for item in text.split(",")))
    if "" in items:
        raise MisuseError(f"{option}: {text!r:.80} has an empty entry", "names between commas")
    return items


def _percent(text: object) -> float:
    """The share meant by `30%`."""
    number = str(text).strip().removesuffix("%")
    try:
        percent = float(number)
    except ValueError:
        percent = -1.0
    if number == str(text).strip() or not 0 < percent <= 100:
        raise MisuseError(f"{text!r:.80} is not a hit ratio", "more than 0 %, at most 100 %, such as 30%")
    return percent / 100


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from kvstore.lab import plots  # noqa: PLC0415

        plots.check(plot)


def _draw(report: Any, plot: Path | None) -> None:
    if plot is not None:
        from kvstore.lab import plots  # noqa: PLC0415

        plots.draw(report, plot)


def _show(values: dict[str, Any], as_json: bool, table: Callable[[], Group]) -> None:
    if as_json:
        typer.echo(json.dumps(values))
    else:
        Console().print(table())


@contextmanager
def _progress(accesses: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=accesses)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Something that is told what is being done, and shows it where somebody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update
