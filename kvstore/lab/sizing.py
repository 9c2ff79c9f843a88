"""Sizes a node by replays: DRAM and NVMe for a hit ratio, or the best split of a budget.

A search replays the first of some policies. The answer's tiers are then replayed with the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from kvstore.config import GIB, MIB, format_size
from kvstore.core.policy import find
from kvstore.errors import KVStoreError, MisuseError
from kvstore.lab.capacity import Capacities, Capacity
from kvstore.lab.experiment import Experiment
from kvstore.lab.report import Point, Report
from kvstore.types import Tier

Doing = Callable[[str], None]
"""Called with a text before each batch of replays."""

_CLOSE = 1.02
_SPLITS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.03125)
_REFINEMENTS = 2
_ALIKE = 0.001
_BETTER = 0.005
"""Points by which another policy must be better than the first to be the answer."""
_DRAM_PARTS = (2, 4, 8)
_NVME_TIMES = 4
_STEP_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Sizing:
    """The result of a search. `searched`: the range, as text. `answer`: the best of the report's points.

    `limits_bytes`: the limits that a daemon needs for it, by tier. `cost`: None without prices.
    """

    searched: str
    answer: Point
    limits_bytes: dict[str, int]
    cost: float | None
    report: Report


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a GiB of each tier, in the currency of the budget."""

    dram: float
    nvme: float

    def __post_init__(self) -> None:
        for name in ("dram", "nvme"):
            if not 0 < getattr(self, name) < inf:
                raise MisuseError(f"a GiB of {name} costs {getattr(self, name)}", "a price above 0")

    def of(self, limits_bytes: dict[str, int]) -> float:
        """Returns the price of these limits."""
        return (self.dram * limits_bytes.get("dram", 0) + self.nvme * limits_bytes.get("nvme", 0)) / GIB


class _Tried:
    """Replays of the first of `policies`; each capacity is replayed once."""

    def __init__(self, experiment: Experiment, policies: Sequence[str], doing: Doing) -> None:
        for policy in policies:
            find(policy)
        self._experiment, self._policies, self._doing = experiment, policies, doing
        self._named: dict[str, Capacities] = {}
        self._points: dict[str, Point] = {}

    def run(self, nodes: Iterable[Capacities]) -> list[Point]:
        """Returns the points of these capacities. Replays those without one."""
        named = [(self._name(tiers), tiers) for tiers in nodes]
        todo = {name: tiers for name, tiers in named if name not in self._points}
        if todo:
            self._doing("; ".join(todo))
            self._named |= todo
            points = self._experiment.replay(self._policies[:1], list(todo.items()))
            self._points |= dict(zip(todo, points, strict=True))
        return [self._points[name] for name, _ in named]

    def _name(self, tiers: Capacities) -> str:
        blocks = (tier.blocks(self._experiment.block_bytes) for tier in tiers)
        return f"{'+'.join(f'{n:,}' for n in blocks)} blocks"

    def sizing(self, searched: str, answer: Point, prices: Prices | None) -> Sizing:
        """Returns the result, with all points as its report. Replays its tiers with the other policies."""
        others: list[Point] = []
        if self._policies[1:]:
            self._doing(f"{answer.capacity} with {', '.join(self._policies[1:])}")
            at = [(answer.capacity, self._named[answer.capacity])]
            others = self._experiment.replay(self._policies[1:], at)
        best = max(others, key=lambda p: p.hit_ratio, default=answer)
        if best.hit_ratio > answer.hit_ratio + _BETTER:
            answer = best
        nbytes = self._experiment.block_bytes
        limits = {
            t.tier.name.lower(): t.limit_bytes or limit_for(t.blocks(nbytes), t.tier, nbytes)
            for t in self._named[answer.capacity]
        }
        cost = prices.of(limits) if prices else None
        points = [*self._points.values(), *others]
        report = self._experiment.summary(points, list(self._named.items()))
        return Sizing(f"{searched}: {len(points)} replays", answer, limits, cost, report)


def for_hit_ratio(
    experiment: Experiment,
    policies: Sequence[str],
    wanted: float,
    nvme: Capacities | None,
    nvme_bytes_per_s: float,
    doing: Doing,
) -> Sizing:
    """Finds the smallest DRAM, within 2 %, with a hit ratio of at least `wanted`, beside a fixed `nvme`.

    `nvme` None: DRAM alone; then a half, a quarter, an eighth of it, beside NVMe for four times its blocks,
    as long as they serve the hit ratio and a drive that loads `nvme_bytes_per_s` keeps up on average.
    Raises KVStoreError if no cache, or not the first policy, can reach the hit ratio.
    """
    tried = _Tried(experiment, policies, doing)
    searched, best = _least_dram(experiment, tried, wanted, nvme or ())
    if nvme is None:
        blocks = best.blocks_by_tier["dram"]
        least = experiment.workload.longest
        below = Capacity(Tier.NVME, slots=min(_NVME_TIMES * blocks, experiment.workload.unique_blocks))
        for part in (n for n in _DRAM_PARTS if blocks // n >= least):
            [point] = tried.run([(Capacity(Tier.DRAM, slots=blocks // part), below)])
            if point.hit_ratio < wanted or loads_bytes_per_s(experiment, point) > nvme_bytes_per_s:
                break
            best = point
        searched += ", then less beside NVMe"
    return tried.sizing(searched, best, None)


def loads_bytes_per_s(experiment: Experiment, point: Point) -> float:
    """Returns the bytes that NVMe loads per second of the trace, on average; 0 without times."""
    loaded = point.hits_by_tier.get("nvme", 0) * experiment.block_bytes
    return loaded / experiment.workload.duration_s if experiment.workload.duration_s else 0.0


def _least_dram(experiment: Experiment, tried: _Tried, wanted: float, nvme: Capacities) -> tuple[str, Point]:
    """Returns the searched range as text, and the point of the smallest DRAM found."""
    if wanted > experiment.best_ratio:
        raise KVStoreError(
            f"{100 * wanted:.1f} % of the tokens cannot be served",
            f"a cache with room for everything serves {100 * experiment.best_ratio:.1f} % of this trace",
        )

    def replay(sizes: Iterable[int]) -> list[Point]:
        return tried.run((Capacity(Tier.DRAM, slots=n), *nvme) for n in sizes)

    high = experiment.workload.unique_blocks
    low = _least(experiment, wanted) - sum(tier.blocks(experiment.block_bytes) for tier in nvme)
    low = min(high, max(low, experiment.workload.longest))
    searched = f"DRAM from {low:,} to {high:,} blocks, to 2 %"
    first, best = replay((low, high))
    if best.hit_ratio < wanted:
        raise KVStoreError(
            f"{best.policy} does not serve {100 * wanted:.1f} % of the tokens with room for everything",
            f"it serves {100 * best.hit_ratio:.1f} %, the best one {100 * experiment.best_ratio:.1f} %",
        )
    if first.hit_ratio >= wanted:
        return searched, first
    while high > low + 1 and high > low * _CLOSE:
        inner = np.geomspace(low, high, experiment.processes + 2)[1:-1].astype(int).tolist()
        sizes = sorted({min(max(n, low + 1), high - 1) for n in inner})
        for n, point in zip(sizes, replay(sizes), strict=True):
            if point.hit_ratio >= wanted:
                high, best = n, point
                break
            low = n
    return searched, best


def _least(experiment: Experiment, wanted: float) -> int:
    """Returns the smallest capacity in blocks at which Belady's bound reaches the hit ratio."""
    sizes = range(1, experiment.workload.unique_blocks + 1)
    return sizes[bisect_left(sizes, wanted, key=lambda n: experiment.ratio(experiment.bound.hits(n)))]


def for_budget(
    experiment: Experiment, policies: Sequence[str], budget: float, prices: Prices, doing: Doing
) -> Sizing:
    """Finds the split of a budget between DRAM and NVMe with the highest hit ratio.

    Among splits within 0.1 percentage points, the split with the most DRAM hits wins. Raises KVStoreError if
    the budget does not buy DRAM for the longest prompt.
    """
    tried = _Tried(experiment, policies, doing)
    nodes = {share: node for share in _SPLITS if (node := _bought(experiment, budget, share, prices))}
    if not nodes:
        raise KVStoreError(
            f"{budget:g} does not buy DRAM for the longest prompt",
            f"it has {experiment.workload.longest:,} blocks of {format_size(experiment.block_bytes)}",
        )
    points: dict[float, Point] = {}
    for _ in range(1 + _REFINEMENTS):
        points |= dict(zip(nodes, tried.run(nodes.values()), strict=True))
        best = max(points, key=lambda share: _worth(points[share]))
        shares = sorted(points)
        at = shares.index(best)
        beside = [sqrt(best * other) for other in shares[max(0, at - 1) : at + 2] if other != best]
        nodes = {share: node for share in beside if (node := _bought(experiment, budget, share, prices))}
    searched = (
        f"splits of {budget:g} between DRAM at {prices.dram:g} and NVMe at {prices.nvme:g} a GiB, "
        f"DRAM's part from {100 * min(points):.0f} % to {100 * max(points):.0f} %, "
        f"none with less DRAM than the longest prompt"
    )
    return tried.sizing(searched, points[best], prices)


def _worth(point: Point) -> tuple[float, int]:
    return round(point.hit_ratio / _ALIKE), point.hits_by_tier[Tier.DRAM.name.lower()]


def _bought(experiment: Experiment, budget: float, share: float, prices: Prices) -> Capacities:
    """Returns the tiers that a budget buys with a fraction `share` for DRAM, at most what the trace can use.

    Empty if DRAM cannot hold the longest prompt.
    """
    dram = _affordable(experiment, Tier.DRAM, budget * share / prices.dram, experiment.workload.longest)
    nvme = _affordable(experiment, Tier.NVME, budget * (1 - share) / prices.nvme, 1)
    return (*dram, *nvme) if dram else ()


def _affordable(experiment: Experiment, tier: Tier, gib: float, least_blocks: int) -> Capacities:
    """Returns a tier of `gib` GiB, at most what the trace can use; empty if it holds too few blocks."""
    most = limit_for(experiment.workload.unique_blocks, tier, experiment.block_bytes)
    limit = min(int(gib * GIB) // _STEP_BYTES * _STEP_BYTES, most)
    capacity = Capacity(tier, limit_bytes=limit)
    return (capacity,) if limit and capacity.blocks(experiment.block_bytes) >= least_blocks else ()


def limit_for(blocks: int, tier: Tier, block_bytes: int) -> int:
    """Returns the smallest limit in bytes, in steps of 2 MiB, with which a daemon holds `blocks` blocks."""
    most = 2 + 4 * (blocks + 16) * (block_bytes + (64 << 10)) // _STEP_BYTES
    limits = range(_STEP_BYTES, most * _STEP_BYTES, _STEP_BYTES)
    return limits[
        bisect_left(limits, blocks, key=lambda n: Capacity(tier, limit_bytes=n).blocks(block_bytes))
    ]
