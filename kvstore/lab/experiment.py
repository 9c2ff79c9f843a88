"""An experiment: one trace, read once, and replays of it with any policy and capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.config.units import parse_write_budget
from kvstore.core.policy import find
from kvstore.errors import MisuseError
from kvstore.lab.belady import Bound
from kvstore.lab.capacity import Capacities, parse_capacities, parse_tier
from kvstore.lab.closed_loop import ClosedLoop, of_conversations
from kvstore.lab.hybrid import best_hits, parse_model
from kvstore.lab.report import BoundPoint, Point, ReplaySettings, Report, TraceInfo
from kvstore.lab.sweep import Progress, Task, run
from kvstore.lab.traces import Trace
from kvstore.lab.workload import Workload, of_chats
from kvstore.types import MAX_BLOCK_BYTES, Tier

AGENT_BLOCK_TOKENS = 256
_CHECKED_OPTIONS = {"write_policy": ("write_through", "on_evict"), "admission": ("always", "twice", "reuse")}


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay a trace. `block_tokens` None: 256 for conversations, otherwise the trace's own.

    `token_bytes`: bytes of KV per token; the size of a block follows from it. 0: it is `block_bytes`.
    `loop` None: the default closed loop, for conversations only. `placement`: options of `SimulatedNode`.
    `repeat`: how many times the trace is replayed in a row; each time has blocks of its own. `model`: a
    hybrid model, see `parse_model`; "": full attention only.
    """

    block_bytes: int = 2 << 20
    token_bytes: int = 0
    block_tokens: int | None = None
    loop: ClosedLoop | None = None
    skip_bad: bool = False
    placement: dict[str, str] = field(default_factory=dict)
    processes: int = 1
    repeat: int = 1
    model: str = ""


def check_node(block_bytes: int, placement: Mapping[str, str]) -> None:
    """Raises MisuseError for a block size or options that no simulated node can have."""
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        raise MisuseError(f"block_bytes is {block_bytes}", f"1 to {MAX_BLOCK_BYTES} bytes")
    for name, allowed in _CHECKED_OPTIONS.items():
        if placement.get(name, allowed[0]) not in allowed:
            raise MisuseError(f"unknown {name} {placement[name]!r}", f"one of {', '.join(allowed)}")
    parse_write_budget(placement.get("write_budget", "0"), 1)


def loop_of(trace: Trace, given: ClosedLoop | None) -> ClosedLoop | None:
    """Returns the closed loop that plays a trace of conversations: the given or the default one.

    Raises MisuseError if one is given for single requests.
    """
    if trace.kind == "conversations":
        return given or ClosedLoop()
    if given is not None:
        raise MisuseError(
            f"{trace.path} holds single requests, which have a clock of their own",
            "--users, --gap-cap, --shared and --seed are for conversations",
        )
    return None


def workload_of(trace: Trace, block_tokens: int | None, loop: ClosedLoop | None) -> Workload:
    """Returns the workload of a trace with its `loop_of`. `block_tokens`: see `Options`."""
    if loop is not None:
        return of_conversations(trace, AGENT_BLOCK_TOKENS if block_tokens is None else block_tokens, loop)
    return of_chats(trace, trace.block_tokens if block_tokens is None else block_tokens)


def trace_info(trace: Trace, w: Workload, best_ratio: float) -> TraceInfo:
    """Describes a trace for a report. `best_ratio`: the hit ratio of a cache that holds every block."""
    return TraceInfo(
        name=trace.path.name,
        digest=w.digest(),
        kind=trace.kind,
        requests=w.requests,
        accesses=w.accesses,
        unique_blocks=w.unique_blocks,
        input_tokens=int(w.input_tokens.sum()),
        duration_s=w.duration_s,
        skipped_lines=len(trace.skipped),
        best_hit_ratio=best_ratio,
    )


class Experiment:
    """Reads a trace and replays it.

    Raises KVStoreError if the trace cannot be read, MisuseError if the options do not fit the trace.
    """

    def __init__(self, path: Path, options: Options) -> None:
        check_node(options.block_bytes, options.placement)
        self.processes = options.processes
        self._placement = dict(options.placement)
        self.model = parse_model(options.model) if options.model else None
        self._trace = Trace(path, options.skip_bad)
        self._loop = loop_of(self._trace, options.loop)
        workload = workload_of(self._trace, options.block_tokens, self._loop)
        self.workload = workload.repeated(options.repeat)
        self.block_bytes = options.token_bytes * workload.block_tokens or options.block_bytes
        check_node(self.block_bytes, options.placement)
        self.bound = Bound(self.workload)
        self._model_name = options.model
        self._best = self.bound.hits(self.workload.unique_blocks)
        if self.model is not None:
            self._best = best_hits(self.workload, self.model)
        self.best_ratio = self.ratio(self._best)
        """The hit ratio of a cache that holds every block."""

    def report(
        self, policies: Sequence[str], capacities: Sequence[str], progress: Progress | None = None
    ) -> Report:
        """Replays every policy with every capacity. Raises MisuseError for an unknown policy or capacity."""
        parsed = [(text, self.parse(text)) for text in capacities]
        return self.summary(self.replay(policies, parsed, progress), parsed)

    def replay(
        self,
        policies: Sequence[str],
        capacities: Sequence[tuple[str, Capacities]],
        progress: Progress | None = None,
    ) -> list[Point]:
        """Returns a point for every policy with every capacity, policies first."""
        for policy in policies:
            find(policy)
        tasks = [
            Task(policy, text, tiers, self.block_bytes, self._placement, self.model)
            for policy in policies
            for text, tiers in capacities
        ]
        return run(self.workload, tasks, self.processes, progress)

    def summary(self, points: list[Point], parsed: Sequence[tuple[str, Capacities]]) -> Report:
        """Returns a report of these points, with Belady's bound for the sum of all tiers at each capacity."""
        sizes = [(text, sum(tier.blocks(self.block_bytes) for tier in tiers)) for text, tiers in parsed]
        # What a hybrid model serves is a prefix of full attention too.
        hits = [(text, blocks, min(self.bound.hits(blocks), self._best)) for text, blocks in sizes]
        bounds = [BoundPoint(text, blocks, self.ratio(n)) for text, blocks, n in hits]
        loop = asdict(self._loop) if self._loop else {}
        settings = ReplaySettings(
            self.workload.block_tokens, self.block_bytes, self._placement, self._model_name, **loop
        )
        return Report(trace_info(self._trace, self.workload, self.best_ratio), settings, points, bounds)

    def parse(self, capacity: str) -> Capacities:
        """Parses a capacity. Percentages are of this trace's unique blocks."""
        return parse_capacities(capacity, self.workload.unique_blocks, self.block_bytes)

    def parse_nvme(self, size: str) -> Capacities:
        """Parses the capacity of an NVMe tier."""
        return (parse_tier(size, Tier.NVME, self.workload.unique_blocks, self.block_bytes),)

    def ratio(self, blocks: int) -> float:
        """Returns the token hit ratio of `blocks` served blocks."""
        return blocks * self.workload.block_tokens / max(1, int(self.workload.input_tokens.sum()))
