"""Commands of the lab: what a cache of some size would have served of a recorded trace, in virtual time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.cli.common import JsonOption
from kvstore.config import parse_duration, parse_size

if TYPE_CHECKING:
    from kvstore.lab.grid import Progress as Tell
    from kvstore.lab.study import Options

app = typer.Typer(no_args_is_help=True)


@app.callback()
def main() -> None:
    """How much DRAM and NVMe a trace needs, with which policy, and how long drives last."""


TraceArgument = Annotated[
    Path, typer.Argument(help="Chat requests or agent conversations, JSON lines or .zst.")
]


@app.command()
def replay(
    trace: TraceArgument,
    *,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Eviction policies, by commas.")] = "lru",
    capacities: Annotated[
        str, typer.Option(metavar="SIZES", help="By commas: 5% of the unique blocks, 64GiB, DRAM+NVMe.")
    ] = "1%,2%,5%,10%,25%",
    block_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Payload of a block.")] = "2MiB",
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    write_policy: Annotated[str, typer.Option(help="write_through or on_evict.")] = "write_through",
    users: Annotated[int | None, typer.Option(help="Conversations: how many at a time.")] = None,
    gap_cap: Annotated[str | None, typer.Option(metavar="TIME", help="Conversations: longest pause.")] = None,
    shared: Annotated[
        float | None, typer.Option(help="Conversations: part of prompt heads in common.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Conversations: their order, and pauses between.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out.")] = False,
    processes: Annotated[int, typer.Option(help="At most so many at a time; 0: one a core.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace in virtual time, every policy with every capacity, and Belady's bound beside."""
    from kvstore.lab.study import Options, Study  # noqa: PLC0415
    from kvstore.lab.users import Crowd  # noqa: PLC0415

    given = {
        "users": users,
        "gap_cap_s": parse_duration(gap_cap) if gap_cap else None,
        "shared": shared,
        "seed": seed,
    }
    crowd = {name: value for name, value in given.items() if value is not None}
    study = Study(
        trace,
        Options(
            block_bytes=parse_size(block_bytes),
            block_tokens=block_tokens,
            crowd=Crowd(**crowd) if crowd else None,
            skip_bad=skip_bad,
            placement={"write_policy": write_policy},
            processes=processes or os.cpu_count() or 1,
        ),
    )
    names, sizes = policies.split(","), capacities.split(",")
    with _progress(len(names) * len(sizes) * study.workload.accesses) as tell:
        report = study.report(names, sizes, tell)
    typer.echo(json.dumps(report.to_map()))


@contextmanager
def _progress(accesses: int) -> Iterator[Tell]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=accesses)
        yield lambda done: bar.update(task, completed=done)
