"""Options of commands that replay a trace in virtual time, and what the commands do with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType
from typer import Argument, Option

from kvstore.cli.shared.options import JsonOption, named, unwind_on_sigterm
from kvstore.cli.shared.output import console, show
from kvstore.config import parse_duration, parse_size

if TYPE_CHECKING:
    from kvstore.lab.experiment import Experiment
    from kvstore.lab.report import Report

TraceArgument = Annotated[Path, Argument(help="Trace of chats or agent conversations: JSON lines, or .zst.")]
SkipBadOption = Annotated[bool, Option("--skip-bad", help="Skip bad lines, and count them.")]


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """Options of a simulated node, of the replayed trace, and of the output."""

    block_bytes: Annotated[str, Option(metavar="SIZE", help="Payload of a block.")] = "2MiB"
    block_tokens: Annotated[
        int | None,
        Option(help="Tokens per block, a multiple of the trace's. Without it: chats 512, conversations 256."),
    ] = None
    model: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Hybrid model: gpt-oss, gemma-3, qwen3-next; or groups of windows of tokens, 5x1024, or of "
            "states, 3xstate. Without it: full attention only.",
        ),
    ] = ""
    write_policy: Annotated[str, Option(help="Writes to NVMe: write_through or on_evict.")] = "write_through"
    admission: Annotated[str, Option(help="Admission to NVMe: always, twice or reuse.")] = "always"
    threshold: Annotated[
        float, Option(min=0, max=1, help="With --admission reuse: minimum probability of reuse.")
    ] = 0.2
    write_budget: Annotated[
        str,
        Option(
            metavar="SIZE",
            help="Bytes written to NVMe per day, or a multiple of the limit such as 1x; 0: unlimited.",
        ),
    ] = "0"
    repeat: Annotated[
        int, Option(min=1, help="Replay the trace this many times, each time with other blocks.")
    ] = 1
    users: Annotated[
        int | None, Option(help="Conversations: number replayed concurrently. Without it: 64.")
    ] = None
    gap_cap: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="Conversations: longest pause in and between conversations. Without it: 300s.",
        ),
    ] = None
    shared: Annotated[
        float | None,
        Option(help="Conversations: fraction of tools and system prompt that all share. Without it: 0.5."),
    ] = None
    seed: Annotated[
        int | None, Option(help="Conversations: seed of their order and pauses. Without it: 1.")
    ] = None
    skip_bad: SkipBadOption = False
    processes: Annotated[int, Option(min=0, help="Number of processes; 0: one per core.")] = 0
    plot: Annotated[Path | None, Option(metavar="FILE", help="Also plot to a .png or .svg file.")] = None
    as_json: JsonOption = False

    def experiment(self, trace: Path) -> Experiment:
        """Checks the options and reads the trace. Raises MisuseError, KVStoreError."""
        from kvstore.lab.closed_loop import ClosedLoop  # noqa: PLC0415
        from kvstore.lab.experiment import Experiment, Options  # noqa: PLC0415

        if self.plot is not None:
            from kvstore.lab import plots  # noqa: PLC0415

            plots.check(self.plot)
        unwind_on_sigterm()
        loop: dict[str, Any] = {"users": self.users, "shared": self.shared, "seed": self.seed}
        if self.gap_cap is not None:
            loop["gap_cap_s"] = named("--gap-cap", parse_duration, self.gap_cap)
        loop = {name: value for name, value in loop.items() if value is not None}
        options = Options(
            block_bytes=named("--block-bytes", parse_size, self.block_bytes),
            block_tokens=self.block_tokens,
            loop=ClosedLoop(**loop) if loop else None,
            skip_bad=self.skip_bad,
            placement={
                "write_policy": self.write_policy,
                "admission": self.admission,
                "admission_threshold": str(self.threshold),
                "write_budget": self.write_budget,
            },
            repeat=self.repeat,
            model=self.model,
            processes=self.processes or os.cpu_count() or 1,
        )
        with status_line() as show_step:
            show_step(f"reading {trace.name}")
            return Experiment(trace, options)

    def show(self, report: Report, values: dict[str, Any], render: Callable[[], RenderableType]) -> None:
        """Plots the report with `--plot`, then prints values as JSON or rendered."""
        if self.plot is not None:
            from kvstore.lab import plots  # noqa: PLC0415

            plots.draw(report, self.plot)
        show(values, self.as_json, render)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current step on a terminal, and does nothing elsewhere."""
    stderr = console(stderr=True)
    if not stderr.is_terminal:
        yield lambda _: None
        return
    with stderr.status("") as status:
        yield status.update
