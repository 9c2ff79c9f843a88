"""Options of commands that replay a trace in virtual time, and what the commands do with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType
from rich.progress import TaskProgressColumn
from typer import Argument, Option

from kvstore.cli.shared.options import JsonOption, named, unwind_on_sigterm
from kvstore.cli.shared.output import console, progress_bar, show
from kvstore.config import parse_duration, parse_size
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.lab.closed_loop import ClosedLoop
    from kvstore.lab.experiment import Experiment
    from kvstore.lab.recommendation import Speeds
    from kvstore.lab.report import Report

TraceArgument = Annotated[Path, Argument(help="Trace of chats or agent conversations: JSON lines, or .zst.")]
SkipBadOption = Annotated[bool, Option("--skip-bad", help="Skip bad lines, and count them.")]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of simulated nodes, of the replayed trace, and of the output."""

    block_tokens: Annotated[
        int | None,
        Option(help="Tokens per block, a multiple of the trace's. Without it: its own, conversations 256."),
    ] = None
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
    skip_bad: SkipBadOption = False
    processes: Annotated[int, Option(min=0, help="Number of processes; 0: one per core.")] = 0
    plot: Annotated[Path | None, Option(metavar="FILE", help="Also plot to a .png or .svg file.")] = None
    as_json: JsonOption = False

    def placement(self) -> dict[str, str]:
        """Returns the options of the node that are not its size."""
        return {
            "write_policy": self.write_policy,
            "admission": self.admission,
            "admission_threshold": str(self.threshold),
            "write_budget": self.write_budget,
        }

    def loop(self, **seed: int | None) -> ClosedLoop | None:
        """Returns the closed loop of conversations; None if no option of it was given."""
        from kvstore.lab.closed_loop import ClosedLoop  # noqa: PLC0415

        loop: dict[str, Any] = {"users": self.users, "shared": self.shared, **seed}
        if self.gap_cap is not None:
            loop["gap_cap_s"] = named("--gap-cap", parse_duration, self.gap_cap)
        loop = {name: value for name, value in loop.items() if value is not None}
        return ClosedLoop(**loop) if loop else None

    def start(self) -> None:
        """Checks `--plot`, and makes SIGTERM end the replays too."""
        if self.plot is not None:
            from kvstore.lab import plots  # noqa: PLC0415

            plots.check(self.plot)
        unwind_on_sigterm()


@dataclass(frozen=True, slots=True)
class ExperimentOptions(SimulationOptions):
    """Options of commands that replay a trace on one node."""

    model: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Hybrid model: gpt-oss, gemma-3, qwen3-next; or groups of windows of tokens, 5x1024, or of "
            "states, 3xstate. Without it: full attention only.",
        ),
    ] = ""
    repeat: Annotated[
        int, Option(min=1, help="Replay the trace this many times, each time with other blocks.")
    ] = 1
    seed: Annotated[
        int | None, Option(help="Conversations: seed of their order and pauses. Without it: 1.")
    ] = None

    def experiment(self, trace: Path) -> Experiment:
        """Checks the options and reads the trace. Raises MisuseError, KVStoreError."""
        from kvstore.lab.experiment import Experiment, Options  # noqa: PLC0415

        self.start()
        options = Options(
            **self.sizes(),
            block_tokens=self.block_tokens,
            loop=self.loop(seed=self.seed),
            skip_bad=self.skip_bad,
            placement=self.placement(),
            repeat=self.repeat,
            model=self.model,
            processes=self.processes or os.cpu_count() or 1,
        )
        with status_line() as show_step:
            show_step(f"reading {trace.name}")
            return Experiment(trace, options)

    def sizes(self) -> dict[str, int]:
        """Returns the size of a block, as options of an experiment."""
        raise NotImplementedError

    def show(self, report: Report, values: dict[str, Any], render: Callable[[], RenderableType]) -> None:
        """Plots the report with `--plot`, then prints values as JSON or rendered."""
        if self.plot is not None:
            from kvstore.lab import plots  # noqa: PLC0415

            plots.draw(report, self.plot)
        show(values, self.as_json, render)


@dataclass(frozen=True, slots=True)
class ReplayOptions(ExperimentOptions):
    """Options of replays with blocks of a given size."""

    block_bytes: Annotated[str, Option(metavar="SIZE", help="Payload of a block.")] = "2MiB"

    def sizes(self) -> dict[str, int]:
        """Returns the size of a block. Raises MisuseError."""
        return {"block_bytes": named("--block-bytes", parse_size, self.block_bytes)}


@dataclass(frozen=True, slots=True)
class RecommendOptions(ExperimentOptions):
    """Options of a recommendation. Writes to NVMe are the fewest, and within the rating of a usual drive."""

    token_bytes: Annotated[
        str, Option(metavar="SIZE", help="KV of one token: 128KiB for Llama 3 8B, 320KiB for 70B (16 bit).")
    ] = "128KiB"
    prefill: Annotated[
        float, Option(metavar="TOKENS", help="Tokens per second that the engine computes.")
    ] = 10_000
    nvme_rate: Annotated[
        str, Option(metavar="SIZE", help="Bytes per second that the engine loads from NVMe.")
    ] = "3GB"
    write_policy: Annotated[str, Option(help="Writes to NVMe: write_through or on_evict.")] = "on_evict"
    admission: Annotated[str, Option(help="Admission to NVMe: always, twice or reuse.")] = "reuse"
    write_budget: Annotated[
        str,
        Option(
            metavar="SIZE",
            help="Bytes written to NVMe per day, or a multiple of the limit such as 1x; 0: unlimited.",
        ),
    ] = "1x"

    def sizes(self) -> dict[str, int]:
        """Returns the KV of a token. Raises MisuseError."""
        nbytes = named("--token-bytes", parse_size, self.token_bytes)
        if not nbytes:
            raise MisuseError(f"--token-bytes is {self.token_bytes}", "at least 1 byte")
        return {"token_bytes": nbytes}

    def speeds(self) -> Speeds:
        """Returns the speeds of engine and drive. Raises MisuseError."""
        from kvstore.lab.recommendation import Speeds  # noqa: PLC0415

        return Speeds(self.prefill, named("--nvme-rate", parse_size, self.nvme_rate))


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current step on a terminal, and does nothing elsewhere."""
    stderr = console(stderr=True)
    if not stderr.is_terminal:
        yield lambda _: None
        return
    with stderr.status("") as status:
        yield status.update


def items_of(option: str, text: str) -> list[str]:
    """Returns the distinct items of a comma-separated list. Raises MisuseError for empty items."""
    items = list(dict.fromkeys(item.strip() for item in text.split(",")))
    if "" in items:
        raise MisuseError(f"{option}: {text!r:.80} has an empty item", "separate names by commas")
    return items


def percent_of(text: str) -> float:
    """Returns the fraction of a text such as `30%`. Raises MisuseError."""
    number = text.strip().removesuffix("%")
    try:
        percent = float(number)
    except ValueError:
        percent = -1.0
    if number == text.strip() or not 0 < percent <= 100:
        raise MisuseError(f"{text!r:.80} is not a percentage", "more than 0 %, at most 100 %, such as 30%")
    return percent / 100


@contextmanager
def replay_progress(accesses: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal. Yields a function that gets the number of accesses done."""
    with progress_bar(TaskProgressColumn(), hidden=not console(stderr=True).is_terminal) as bar:
        task = bar.add_task("replaying", total=accesses)
        yield lambda done: bar.update(task, completed=done)
