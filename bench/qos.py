"""qos: what a tenant notices of another one that asks for all it can get, and of a device that hangs.

Each figure of the victim is taken beside what it is without the aggressor, in several rounds: the ratio is
the middle one of theirs. Without the scheduler: both use one tenant's token, so that their requests and
copies wait in one queue, first come, first served.
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
    """Each load runs for `warm_up_s`, `least_s` and a part of the bench's seconds."""

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
        """Blocks that are read from the device."""
        return Layout(model="bench", block_bytes=self.block_bytes)

    @property
    def small(self) -> Layout:
        """Blocks that stay in DRAM."""
        return Layout(model="bench-small", block_bytes=self.small_bytes)


SMOKE = Sizes(64 * KIB, 16 * KIB, 16 * MIB, 48 * MIB, 48 * MIB, 96, 8, 1, 0.05, 0.15)

Aggressor = tuple[str, Load, tuple[object, ...]]
"""What it is called, what it runs, with what (the first argument, its site, comes before)."""


@dataclass(slots=True)
class Latencies:
    """The victim's calls that got all they asked for, in µs, by load, a dictionary a round."""

    rounds: list[dict[str, list[float]]]
    incomplete: Counter[str] = field(default_factory=Counter)

    def median(self, load: str, share: float) -> float:
        """The middle round's quantile."""
        return statistics.median(_quantile(figures[load], share) for figures in self.rounds)

    def ratios(self, load: str, reference: str, share: float) -> list[float]:
        """Each round's quantile under one load over that under another."""
        return [_quantile(f[load], share) / _quantile(f[reference], share) for f in self.rounds]


def _quantile(figures: list[float], share: float) -> float:
    return quantile(figures, share) if figures else math.nan


def run(bench: Bench) -> Iterator[Result]:
    """Requests, then reads and writes at the device, then a device that hangs."""
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder:
        yield from _requests(bench, z)
        yield from _device(bench, z, folder / "nvme")
        yield from _stalled(bench, z, folder / "stalled")


def token(tenant: str) -> str:
    """The token by which a client is a tenant."""
    return f"token-of-{tenant}"


def settings(dram_bytes: int, nvme: Path | None = None, nvme_bytes: int = 0) -> dict[str, dict[str, object]]:
    """Two tenants of equal shares; nothing is refused, and no scrubber reads beside them."""
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
        # The brackets make it an array of tables, as TOML writes them.
        made[f"[tenants.{tenant}.tokens]"] = {"hash": f"sha256:{digest}", "role": "write"}
    return made


@contextmanager
def _served(made: Settings) -> Iterator[LocalDaemon]:
    with LocalDaemon(made) as daemon:
        # While extents are still being made, a core is busy with that.
        with Client(daemon.url, "", deadline_s=30.0) as client:
            wait_until(client, complete)
        yield daemon


def _site(daemon: LocalDaemon, tenant: str, layout: Layout) -> Site:
    return Site(daemon.url, token(tenant), layout)


def _measured(
    z: Sizes, seconds: float, victim: tuple[Load, tuple[object, ...]], others: list[Aggressor]
) -> list[float]:
    """The victim's figures of so many seconds and a while before, with the others at work."""
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
    """How many of the victim's chains a second ended, when all were at work: none where they were evicted.

    `tries`: measured so often if none ended, which on a busy machine may be chance.
    """
    seconds = max(0.25 * bench.seconds, z.least_s)
    for _ in range(tries):
        ended, over = _measured(z, seconds, victim, others)
        if n := sum(over - seconds < at <= over for at in ended):
            return n / seconds
    return 0.0


def _requests(bench: Bench, z: Sizes) -> Iterator[Result]:
    """Leases on chains in DRAM, while others flood the daemon with requests or burn as much CPU."""
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
    """Chains that are on NVMe only, as fast as it goes, then at four fifths of the victim's share."""
    # More than DRAM holds, and in turn, so that each is on NVMe only when it is asked for.
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
            # Its share is half of what there is when both are at work: beyond that, queues grow. Devices
            # drift, so what is asked stays away from that.
            pace_s = 1.0 / (_ASKED * min(alone / 2, scheduled))
            victim = (paced, (mine, my_chains, pace_s, READERS))
            everything: dict[str, list[Aggressor]] = {
                "alone": [],
                "beside-burners": [("burn", burn, ())] * FLOODS,
                "beside-flood": loads["scheduled"],
            }
            ours = _victim(bench, z, f"nvme beside {kind}", everything, victim, z.rounds)
            # Last: one tenant's puts are at the expense of its own blocks.
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
    """Calls with deadlines while every read and write of the device waits."""
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
    """The victim's latencies under each load, in each round. `whole`: it must have got some in full."""
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
    """`one`: the latencies when both are one tenant."""
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
