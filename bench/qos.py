"""qos: effect on a tenant of another tenant with maximum load, and of a device that hangs.

Each figure of the victim is compared with the figure without the aggressor in several rounds; the ratio is
the median over rounds. Further figures are measured without fair queueing: both use the token of one tenant,
so that their requests and copies wait in one FIFO queue.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import GIB, KIB, MIB, Bench, NotDone, Result, Target, quantile
from bench.served import complete, wait_until
from bench.tenant_load import Load, Site, burn, closed, fill, flood, late, new_chains, paced, puts, running
from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon, Settings
from tests.crash.shimmed import ShimmedDaemon

VICTIM, AGGRESSOR = "victim", "aggressor"
CHAIN, DEVICE_CHAIN, READERS, FLOODS = 32, 16, 4, 2
PACE_S = 0.002
_TIMES = 1.5
_SHARE = 0.9 / 2
_ASKED = 0.8
_NEAR_MS = 5.0
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each load runs for `warm_up_s`, then for at least `least_s`, longer for a longer measuring time."""

    block_bytes: int = MIB
    small_bytes: int = 64 * KIB
    dram_bytes: int = 384 * MIB
    nvme_bytes: int = 2 * GIB
    stalled_bytes: int = 1 * GIB
    calls: int = 2000
    callers: int = 16
    rounds: int = 3
    warm_up_s: float = 1.0
    least_s: float = 0.5

    @property
    def layout(self) -> Layout:
        """Returns the layout of blocks on the device."""
        return Layout(model="bench", block_bytes=self.block_bytes)

    @property
    def small(self) -> Layout:
        """Returns the layout of blocks in DRAM."""
        return Layout(model="bench-small", block_bytes=self.small_bytes)


SMOKE = Sizes(64 * KIB, 16 * KIB, 16 * MIB, 48 * MIB, 48 * MIB, 96, 8, 1, 0.05, 0.15)

Aggressor = tuple[str, Load, tuple[object, ...]]
"""A load: its name, function and arguments after the first one, its site."""


@dataclass(slots=True)
class Latencies:
    """Latencies of complete calls of the victim in µs, by load; one dictionary per round."""

    rounds: list[dict[str, list[float]]]
    incomplete: Counter[str] = field(default_factory=Counter)

    def median(self, load: str, share: float) -> float:
        """Returns the median over rounds of a quantile."""
        return statistics.median(_quantile(figures[load], share) for figures in self.rounds)

    def ratios(self, load: str, reference: str, share: float) -> list[float]:
        """Returns for each round the quantile under one load divided by that under another."""
        return [_quantile(f[load], share) / _quantile(f[reference], share) for f in self.rounds]


def _quantile(figures: list[float], share: float) -> float:
    return quantile(figures, share) if figures else math.nan


def run(bench: Bench) -> Iterator[Result]:
    """Yields the rows of requests, of reads and writes of the device, and of a hanging device."""
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder:
        yield from _requests(bench, z)
        yield from _device(bench, z, folder / "nvme")
        yield from _stalled(bench, z, folder / "stalled")


def token(tenant: str) -> str:
    """Returns the token of a tenant."""
    return f"token-of-{tenant}"


def settings(dram_bytes: int, nvme: Path | None = None, nvme_bytes: int = 0) -> dict[str, dict[str, object]]:
    """Returns settings with two tenants of equal shares, without refusals and without the scrubber."""
    made: dict[str, dict[str, object]] = {
        "dram": {"limit": dram_bytes},
        "scrub": {"rate": 0},
        "policy": {"eviction": "lru"},
    }
    if nvme is not None:
        nvme.mkdir(exist_ok=True)
        made["nvme"] = {"path": nvme, "limit": nvme_bytes}
    for tenant in (VICTIM, AGGRESSOR):
        made[f"tenants.{tenant}"] = {"share": 1.0}
        made[f"tenants.{tenant}.dram"] = {"floor": dram_bytes * 2 // 5}
        if nvme is not None:
            made[f"tenants.{tenant}.nvme"] = {"floor": nvme_bytes * 2 // 5}
        digest = hashlib.sha256(token(tenant).encode()).hexdigest()
        # A list of tables is an array of tables in TOML.
        made[f"[tenants.{tenant}.tokens]"] = {"hash": f"sha256:{digest}", "role": "write"}
    return made


@contextmanager
def _served(made: Settings) -> Iterator[LocalDaemon]:
    with LocalDaemon(made) as daemon:
        # The creation of extents keeps one core busy.
        with Client(daemon.url, "", deadline_s=30.0) as client:
            wait_until(client, complete)
        yield daemon


def _site(daemon: LocalDaemon, tenant: str, layout: Layout) -> Site:
    return Site(daemon.url, token(tenant), layout)


def _measured(
    z: Sizes, seconds: float, victim: tuple[Load, tuple[object, ...]], others: list[Aggressor]
) -> list[float]:
    """Runs the victim with the other loads. Returns its figures after the warm-up."""
    with ExitStack() as stack:
        for _, load, arguments in others:
            stack.enter_context(running(load, *arguments))
        end = stack.enter_context(running(victim[0], *victim[1]))
        time.sleep(z.warm_up_s + seconds)
        over = time.monotonic()
        return end(), over


def _rate(
    bench: Bench, z: Sizes, victim: tuple[Load, tuple[object, ...]], others: list[Aggressor], tries: int = 1
) -> float:
    """Returns the victim's chains per second while all loads work; 0 if its chains were evicted.

    `tries`: number of measurements if none finished, which may be chance on a busy machine.
    """
    seconds = max(0.25 * bench.seconds, z.least_s)
    for _ in range(tries):
        ended, over = _measured(z, seconds, victim, others)
        if n := sum(over - seconds < at <= over for at in ended):
            return n / seconds
    return 0.0


def _requests(bench: Bench, z: Sizes) -> Iterator[Result]:
    """Measures leases on DRAM chains while others flood the daemon with requests or use as much CPU."""
    with _served(settings(z.dram_bytes)) as daemon:
        mine, theirs = _site(daemon, VICTIM, z.small), _site(daemon, AGGRESSOR, z.small)
        chains, batch = new_chains(8, CHAIN), new_chains(1, 1024)[0]
        fill(mine, chains)
        victim = (paced, (mine, chains, PACE_S))
        loads: dict[str, list[Aggressor]] = {
            "alone": [],
            "beside-burners": [("burn", burn, ())] * FLOODS,
            "beside-flood": [("flood", flood, (theirs, batch, 64))] * FLOODS,
        }
        ours = _victim(bench, z, "zero-copy", loads, victim, z.rounds)
        loads = {"unscheduled": [("flood", flood, (mine, batch, 64))] * FLOODS}
        one = _victim(bench, z, "zero-copy", loads, victim, 1)
    for reference, target in (("alone", Target("<=", _TIMES)), ("beside-burners", None)):
        yield _line(f"qos/zero-copy-p99/against-{reference}", ours, reference, target, one)


def _device(bench: Bench, z: Sizes, folder: Path) -> Iterator[Result]:
    """Measures chains on NVMe only: at full speed, then at four fifths of the victim's share."""
    # DRAM cannot hold all chains, so the next one in order is on NVMe only.
    n = z.nvme_bytes * 3 // 10 // z.block_bytes // DEVICE_CHAIN
    with _served(settings(z.dram_bytes, folder, z.nvme_bytes)) as daemon:
        mine, theirs = _site(daemon, VICTIM, z.layout), _site(daemon, AGGRESSOR, z.layout)
        my_chains, their_chains = new_chains(n, DEVICE_CHAIN), new_chains(n, DEVICE_CHAIN)
        bench.doing("writing the blocks")
        fill(mine, my_chains)
        fill(theirs, their_chains)
        with Client(daemon.url, "", deadline_s=30.0) as client:  # an operator
            wait_until(client, lambda status: not status["copies_under_way"])
        greedy = (closed, (mine, my_chains, READERS))
        kinds: dict[str, dict[str, list[Aggressor]]] = {
            "reads": {
                "scheduled": [("closed", closed, (theirs, their_chains, 2 * READERS))],
                "unscheduled": [("closed", closed, (mine, my_chains, 2 * READERS))],
            },
            "writes": {
                "scheduled": [("puts", puts, (theirs, DEVICE_CHAIN, READERS))],
                "unscheduled": [("puts", puts, (mine, DEVICE_CHAIN, READERS))],
            },
        }
        for kind, loads in kinds.items():
            rates: list[tuple[float, float]] = []
            for number in range(z.rounds):
                bench.doing(f"throughput beside {kind}, round {number + 1} of {z.rounds}")
                alone = _rate(bench, z, greedy, [], _TRIES)
                scheduled = _rate(bench, z, greedy, loads["scheduled"], _TRIES)
                if not alone or not scheduled:
                    raise NotDone("no chain of the victim's ended")
                rates.append((scheduled, alone))
            scheduled, alone = (statistics.median(each) for each in zip(*rates, strict=True))
            # Its share is half of the total throughput. A higher rate makes queues grow. Devices drift, so
            # the requested rate stays below the share.
            pace_s = 1.0 / (_ASKED * min(alone / 2, scheduled))
            victim = (paced, (mine, my_chains, pace_s, READERS))
            everything: dict[str, list[Aggressor]] = {
                "alone": [],
                "beside-burners": [("burn", burn, ())] * FLOODS,
                "beside-flood": loads["scheduled"],
            }
            ours = _victim(bench, z, f"nvme beside {kind}", everything, victim, z.rounds)
            # The last load: puts of one tenant evict its own blocks.
            one = _victim(
                bench, z, f"nvme beside {kind}", {"unscheduled": loads["unscheduled"]}, victim, 1, whole=False
            )
            unscheduled = _rate(bench, z, greedy, loads["unscheduled"])
            for reference, target in (("alone", Target("<=", _TIMES)), ("beside-burners", None)):
                name = f"qos/nvme-p99-beside-{kind}/against-{reference}"
                yield _line(name, ours, reference, target, one)
            gib = DEVICE_CHAIN * z.block_bytes / GIB
            yield Result(
                f"qos/nvme-throughput/beside-{kind}",
                scheduled * gib,
                "GiB/s",
                alone * gib,
                statistics.median(ours / theirs for ours, theirs in rates),
                z.rounds,
                target=Target(">=", _SHARE),
                extra={"unscheduled": unscheduled * gib, "unscheduled_is": "one tenant's token"},
            )


def _stalled(bench: Bench, z: Sizes, folder: Path) -> Iterator[Result]:
    """Measures calls with deadlines while every read and write of the device blocks."""
    bench.doing("a device that hangs")
    folder.mkdir()
    hang = folder.parent / "hang"
    with ShimmedDaemon(
        settings(z.dram_bytes, folder, z.stalled_bytes), ["--do", "hang", "--while", str(hang)]
    ) as daemon:
        mine = _site(daemon, VICTIM, z.layout)
        chains = new_chains(16, CHAIN)
        fill(mine, chains)
        hang.touch()
        try:
            with running(late, mine, chains, z.calls, z.callers) as end:
                time.sleep(z.calls * 0.12 / z.callers + 2 * z.warm_up_s)
                over_ms = [1e3 * over for over in end()]
        finally:
            hang.unlink()
    if max(over_ms) < -_NEAR_MS:
        raise NotDone("no call came near its deadline: the device did not hang")
    yield Result(
        "qos/stalled-device/after-the-deadline-p99.9",
        quantile(over_ms, 0.999),
        "ms",
        None,
        None,
        len(over_ms),
        target=Target("<=", 10.0, "value"),
        extra={"max": max(over_ms)},
    )


def _victim(
    bench: Bench,
    z: Sizes,
    what: str,
    loads: dict[str, list[Aggressor]],
    victim: tuple[Load, tuple[object, ...]],
    rounds: int,
    whole: bool = True,
) -> Latencies:
    """Returns the victim's latencies by load and round. `whole`: raises NotDone if no call was complete."""
    latencies = Latencies([])
    for number in range(rounds):
        latencies.rounds.append({})
        for name, others in loads.items():
            bench.doing(f"{what}, {name}, round {number + 1} of {rounds}")
            took, _ = _measured(z, 0.25 * bench.seconds + z.least_s, victim, others)
            complete_us = [1e6 * s for s in took if not math.isnan(s)]
            if whole and not complete_us:
                raise NotDone(f"none of {len(took)} calls of the victim's got all of its chain, {name}")
            latencies.rounds[-1][name] = complete_us
            latencies.incomplete[name] += len(took) - len(complete_us)
    return latencies


def _line(name: str, ours: Latencies, reference: str, target: Target | None, one: Latencies) -> Result:
    """Returns a row. `one`: the latencies when both are one tenant."""
    ratios = ours.ratios("beside-flood", reference, 0.99)
    return Result(
        name,
        ours.median("beside-flood", 0.99),
        "µs",
        ours.median(reference, 0.99),
        statistics.median(ratios),
        len(ratios),
        target=target,
        extra={
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
            "ratio_p50": statistics.median(ours.ratios("beside-flood", reference, 0.5)),
            "ratio_p90": statistics.median(ours.ratios("beside-flood", reference, 0.9)),
            "incomplete": ours.incomplete["beside-flood"],
            "unscheduled": one.median("unscheduled", 0.99),
            "unscheduled_incomplete": one.incomplete["unscheduled"],
            "unscheduled_is": "one tenant's token",
        },
    )
