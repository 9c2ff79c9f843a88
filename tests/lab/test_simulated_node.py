"""Replays in virtual time compared with a dictionary, a live daemon, and other replays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Client
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy import POLICIES
from kvstore.errors import KVStoreError
from kvstore.lab import sweep
from kvstore.lab.belady import Bound
from kvstore.lab.capacity import Capacities, Capacity
from kvstore.lab.experiment import Experiment, Options
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.replay import Options as LiveOptions
from kvstore.lab.replay import replay as replay_live
from kvstore.lab.report import Point
from kvstore.lab.simulated_node import SimulatedNode, keys_of
from kvstore.lab.sweep import Task
from kvstore.lab.traces import Trace
from kvstore.lab.workload import Workload
from kvstore.types import Tier
from tests.lab.small import chats, prompts_of, workload

BLOCK = 64 << 10
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)


def slots(dram: int, nvme: int = 0) -> Capacities:
    tiers = (Capacity(Tier.DRAM, slots=dram), Capacity(Tier.NVME, slots=nvme))
    return tiers if nvme else tiers[:1]


def play(load: Workload, capacities: Capacities, policy: str = "lru", **options: str) -> Point:
    return sweep.replay(load, Task(policy, "", capacities, BLOCK, options))


def test_steps_that_are_due_are_taken_between_the_parts_of_a_put() -> None:
    """Blocks that wait to be written would be dropped to make room for the rest of their chain."""
    node, dice = SimulatedNode(slots(300, 400), BLOCK, {"policy": "hazard"}), np.random.default_rng(0)
    system = [dice.bytes(32) for _ in range(50)]
    for i in range(20):
        rest = [dice.bytes(32) for _ in range(int(dice.integers(20, 400)))]
        node.prompt(Keys(b"".join(system + rest), 32), i / 2)
    assert node.hits.sum()


def lru_hits(load: Workload, capacity: int) -> int:
    """Returns the hits of LRU in a dictionary that evicts the tail of a prompt first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts_of(load):
        found = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        hits += found
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(PROMPTS, st.integers(5, 12))
def test_lru_equals_an_ordered_dictionary(prompts: list[list[int]], capacity: int) -> None:
    load = workload(prompts)
    point = play(load, slots(capacity))
    assert sum(point.hits_by_tier.values()) == lru_hits(load, capacity)
    assert point.denied_blocks == 0


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
@given(PROMPTS)
def test_two_tiers_reach_the_bound_of_their_sum(write_policy: str, prompts: list[list[int]]) -> None:
    load = workload(prompts)
    point = play(load, slots(6, 400), write_policy=write_policy)
    assert sum(point.hits_by_tier.values()) == Bound(load).hits(400), "NVMe has room for everything"
    if write_policy == "write_through":
        # Each block is written once, when it is stored.
        assert point.written_bytes_by_tier == {"nvme": BLOCK * load.unique_blocks}


def test_on_evict_writes_evicted_blocks() -> None:
    point = play(workload([range(4), range(10, 14), range(4)]), slots(4, 64), write_policy="on_evict")
    assert point.hits_by_tier == {"dram": 0, "nvme": 4}
    assert point.stored_blocks == 8
    assert point.written_bytes_by_tier == {"nvme": 8 * BLOCK}
    point = play(workload([range(4), range(10, 14)]), slots(4, 64), write_policy="on_evict")
    assert point.written_bytes_by_tier == {"nvme": 4 * BLOCK}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_exceeds_the_bound(tmp_path: Path, policy: str) -> None:
    experiment = Experiment(chats(tmp_path / "t", 150), Options(block_bytes=BLOCK))
    report = experiment.report([policy], ["5%", "20%", "5%+5%", "100%"])
    bounds = {bound.capacity: bound for bound in report.bounds}
    for point in report.points:
        assert point.hit_ratio <= bounds[point.capacity].hit_ratio
        assert sum(point.blocks_by_tier.values()) == bounds[point.capacity].blocks
    assert report.points[-1].hit_ratio > 0.3, "the trace has something to serve"


@pytest.mark.parametrize(
    ("policy", "speed"), [("lru", 0.0), pytest.param("hazard", 1.0, marks=pytest.mark.long)]
)
def test_the_simulation_equals_a_live_daemon(tmp_path: Path, policy: str, speed: float) -> None:
    """LRU depends on the order only and runs at full speed; hazard learns from the times of the trace."""
    path = chats(tmp_path / "t", 1200, apart_ms=25)
    experiment = Experiment(path, Options(block_bytes=BLOCK))
    # Without the scrubber, which would protect a quarter of these few blocks from eviction.
    settings = {"dram": {"limit": "18MiB"}, "policy": {"eviction": policy}, "scrub": {"rate": 0}}
    [point] = experiment.report([policy], ["18MiB"]).points
    # A busy machine replays late and the policy learns other times: one more try is allowed.
    for _ in range(3 if speed else 1):
        with LocalDaemon(settings) as daemon, Client(daemon.url) as client:
            live = replay_live(
                client, Trace(path), LiveOptions(concurrency=1, block_bytes=BLOCK, speed=speed)
            )
        assert live.token_hit_ratio is not None
        if point.block_hit_ratio == pytest.approx(live.token_hit_ratio, abs=0.005):
            break
    assert point.evicted_blocks > 300
    assert 0.2 < point.block_hit_ratio < experiment.best_ratio - 0.1, "the capacity decides"
    assert point.block_hit_ratio == pytest.approx(live.token_hit_ratio, abs=0.005)


def test_prompts_longer_than_dram_are_served_in_pieces() -> None:
    node = SimulatedNode(slots(4, 64), BLOCK)
    keys = Keys(keys_of(workload([range(12)]).blocks).tobytes(), 8)
    long, other = keys.take(0, 8), keys.take(8, 12)
    assert [node.prompt(each, 0.0) for each in (long.take(0, 4), long, other, long)] == [0, 4, 0, 8]
    assert node.hits[Tier.NVME] >= 4
    assert node.denied == 0


def test_prompts_denied_for_room_are_counted() -> None:
    point = play(workload([range(10)] * 2), slots(4))
    assert point.denied_blocks == 12
    assert point.hits_by_tier == {"dram": 4}


def same(points: list[Point]) -> list[Point]:
    """Returns the points without their timings."""
    return [replace(point, wall_s=0.0, accesses_per_s=0.0) for point in points]


def test_replays_are_deterministic_across_processes(tmp_path: Path) -> None:
    experiment = Experiment(chats(tmp_path / "t", 100), Options(block_bytes=BLOCK))
    tasks = [Task("lru", name, experiment.parse(name), BLOCK) for name in ("5%", "20%", "5%+10%")]
    told: list[int] = []
    here = sweep.run(experiment.workload, tasks, 1, told.append)
    assert told == sorted(told)
    assert told[-1] == 3 * experiment.workload.accesses
    told.clear()
    there = sweep.run(experiment.workload, tasks, 2, told.append)
    assert told[-1] == 3 * experiment.workload.accesses
    assert same(here) == same(there)


def test_other_processes_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(chats(tmp_path / "t", 20), Options(block_bytes=BLOCK))
    task = Task("lru", "", slots(9), BLOCK)
    (tmp_path / "multiprocessing.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')\n")
    monkeypatch.chdir(tmp_path)
    assert len(sweep.run(experiment.workload, [task, task], 2)) == 2
    assert not (tmp_path / "ran").exists()


def test_errors_of_child_processes_are_raised(tmp_path: Path) -> None:
    experiment = Experiment(chats(tmp_path / "t", 20), Options(block_bytes=BLOCK))
    bad = Task("lru", "", (Capacity(Tier.DRAM, limit_bytes=2 << 20),), 4 << 20)
    with pytest.raises(KVStoreError, match="does not fit into an extent"):
        sweep.run(experiment.workload, [bad, bad], 2)


def test_a_dead_child_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(chats(tmp_path / "t", 20), Options(block_bytes=BLOCK))
    task = Task("lru", "", slots(9), BLOCK, {"policy_that_dies": Dying()})
    with pytest.raises(KVStoreError, match="a process of the lab died"):
        sweep.run(experiment.workload, [task, task], 2)


def test_replays_stop_by_the_flag(tmp_path: Path) -> None:
    load = workload([[1, 2], [1, 3]])
    load.save(tmp_path)
    task = Task("lru", "", slots(9), BLOCK)
    np.save(tmp_path / "done.npy", np.zeros(2, np.int64))
    assert sweep._run_there(sweep.replay, tmp_path, 0, task).hits_by_tier == {"dram": 1}
    assert np.load(tmp_path / "done.npy").tolist() == [4, 0]
    np.save(tmp_path / "done.npy", np.ones(2, np.int64))
    with pytest.raises(KVStoreError, match="stopped"):
        sweep._run_there(sweep.replay, tmp_path, 0, task)


class Dying:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        import os  # noqa: PLC0415

        return os._exit, (3,)
