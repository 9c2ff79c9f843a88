"""Fleets compared with single nodes, with sums, with times computed by hand, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy.admission import Rule
from kvstore.errors import MisuseError
from kvstore.lab import sweep
from kvstore.lab.capacity import Capacities, Capacity
from kvstore.lab.experiment import Experiment, Options
from kvstore.lab.fleet.experiment import FleetExperiment, FleetOptions, parse_network
from kvstore.lab.fleet.load import MOST_DELAY_S, common_blocks, load_of
from kvstore.lab.fleet.network_tier import NetworkSize, NetworkTier
from kvstore.lab.fleet.node import Prompt
from kvstore.lab.fleet.report import FleetPoint
from kvstore.lab.fleet.routing import ROUTERS, BlockIndex, EventsRouter, Router, router_of
from kvstore.lab.fleet.simulation import Fleet, FleetTask, Rates, play
from kvstore.lab.simulated_node import CHAIN
from kvstore.lab.sweep import Task
from kvstore.lab.workload import Workload
from kvstore.types import Tier
from tests.lab.small import chats, prompts_of, workload

BLOCK = 64 << 10
INSTANT = Rates(inf, inf, inf, 0.0)
SLOW = Rates(1.0, BLOCK * 4, BLOCK * 2, 0.1)
NONE, UNLIMITED = NetworkSize("none", 0), NetworkSize("unlimited", None)
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)


def slots(dram: int, nvme: int = 0) -> Capacities:
    tiers = (Capacity(Tier.DRAM, slots=dram), Capacity(Tier.NVME, slots=nvme))
    return tiers if nvme else tiers[:1]


def task(
    nodes: int, routing: str = "random", network: NetworkSize = NONE, dram: int = 400, **changes: Any
) -> FleetTask:
    made = FleetTask(nodes, routing, network, slots(dram), BLOCK, INSTANT, options={"policy": "lru"})
    return replace(made, **changes)


def sum_of(point: FleetPoint) -> int:
    return sum(point.hits_by_tier.values()) + point.computed_blocks


def hits(point: FleetPoint) -> int:
    return sum(point.hits_by_tier.values())


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """300 requests that share 60 heads; they repeat."""
    path = chats(tmp_path_factory.mktemp("fleet") / "t", 300)
    return Experiment(path, Options(block_bytes=BLOCK)).workload


# -- against a single node and against sums


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("capacities", [slots(60), slots(30, 90)])
def test_one_node_without_a_network_equals_a_replay(
    load: Workload, policy: str, capacities: Capacities
) -> None:
    alone = sweep.replay(load, Task(policy, "", capacities, BLOCK))
    fleet = play(load, task(1, capacities=capacities, options={"policy": policy}))
    assert alone.evicted_blocks > 50, "the capacity decides"
    assert fleet.hits_by_tier == {**alone.hits_by_tier, "network": 0}
    assert fleet.hit_ratio == pytest.approx(alone.hit_ratio)
    assert fleet.denied_blocks == alone.denied_blocks
    assert (fleet.ttft_p99_s, fleet.busy_ratio) == (0, 0)


@pytest.mark.parametrize("network", [NONE, NetworkSize("9", 9), UNLIMITED])
@given(PROMPTS, st.sampled_from(sorted(ROUTERS)), st.sampled_from([INSTANT, SLOW]))
def test_hits_and_computed_blocks_add_up(
    network: NetworkSize, prompts: list[list[int]], routing: str, rates: Rates
) -> None:
    load = workload(prompts)
    point = play(load, task(3, routing, network, 6, rates=rates))
    assert sum_of(point) == load.accesses
    assert hits(point) <= load.accesses - load.unique_blocks
    assert point.network_read_bytes >= point.hits_by_tier["network"] * BLOCK
    assert (point.network_written_bytes > 0) is (network is not NONE and load.accesses > 0)


@pytest.mark.parametrize("routing", sorted(ROUTERS))
def test_an_unlimited_network_serves_what_was_ever_computed(load: Workload, routing: str) -> None:
    point = play(load, task(7, routing, UNLIMITED))
    assert hits(point) == load.accesses - load.unique_blocks
    assert point.hit_ratio == pytest.approx(point.best_hit_ratio)
    assert point.network_written_bytes == point.network_stored_bytes == load.unique_blocks * BLOCK


def test_the_network_raises_hits_and_a_limited_one_less(load: Workload) -> None:
    served = [
        hits(play(load, task(7, "random", network, 40)))
        for network in (NONE, NetworkSize("60", 60), NetworkSize("150", 150), UNLIMITED)
    ]
    assert served == sorted(served)
    assert len(set(served)) == len(served)


def test_routing_by_events_finds_more_than_other_routers(load: Workload) -> None:
    none = {name: hits(play(load, task(10, name, NONE, 30))) for name in ROUTERS}
    assert none["events"] > none["sticky"] > none["random"]
    assert none["events"] > none["shortest-queue"]
    network = {name: play(load, task(10, name, UNLIMITED, 30)) for name in ROUTERS}
    assert network["events"].network_read_bytes < network["random"].network_read_bytes / 2


def test_routing_by_events_finds_everything_where_nodes_have_room_and_time(load: Workload) -> None:
    """The node that computed the end of a stored prefix has its beginning too."""
    found = {name: hits(play(load, task(10, name))) for name in ROUTERS}
    assert found["events"] == load.accesses - load.unique_blocks > found["sticky"] > found["random"]


def test_more_nodes_scatter_prompts_under_random_routing(load: Workload) -> None:
    served = [hits(play(load, task(nodes))) for nodes in (1, 3, 10, 100)]
    assert served == sorted(served, reverse=True)
    assert len(set(served)) == 4


def same(points: Sequence[FleetPoint]) -> list[FleetPoint]:
    """Returns the points without their duration."""
    return [replace(point, wall_s=0.0) for point in points]


def test_the_same_seed_gives_the_same_fleet(load: Workload) -> None:
    rates = Rates(2000.0, 1e9, 1e9, 0.001)
    for routing in ROUTERS:
        tasks = [
            task(5, routing, UNLIMITED, 60, rates=rates, copies=0.5, seed=seed, options={"policy": "hazard"})
            for seed in (1, 1, 2)
        ]
        one, again, other = same([play(load, each) for each in tasks])
        assert one == again
        assert one != other


def test_fleets_are_the_same_in_other_processes(load: Workload) -> None:
    tasks = [task(nodes, "events", UNLIMITED, 60, copies=0.5) for nodes in (2, 4)]
    told: list[int] = []
    here = sweep.run_all(play, load, tasks, 1, told.append)
    assert told == sorted(told)
    assert told[-1] == 2 * load_of(load, 0.5, 0.01, 1).accesses
    assert same(here) == same(sweep.run_all(play, load, tasks, 2))


# -- time


def times_of(point_of: Fleet) -> list[float]:
    return np.round(point_of._waited_s, 6).tolist()


def timed(prompts: list[list[int]], times_s: list[float], made: FleetTask) -> Fleet:
    load = replace(workload(prompts), times_s=np.array(times_s))
    fleet = Fleet(load, made)
    fleet.run()
    return fleet


def test_a_node_computes_prompts_one_after_the_other() -> None:
    # A block has one token, and a node computes two a second.
    rates = Rates(2.0, inf, inf, 0.0)
    fleet = timed([[1, 2], [1, 2, 3, 4], [5]], [0.0, 0.5, 0.5], task(1, rates=rates))
    # The second waits 0.5 s and computes 2 of 4 blocks; the third waits for both.
    assert times_of(fleet) == [1.0, 1.5, 2.0]
    point = fleet.point(0.0)
    assert point.busy_ratio == pytest.approx(1.0)
    assert point.ttft_p50_s == pytest.approx(1.5)
    assert point.ttft_mean_s == pytest.approx(1.5)


def test_blocks_are_not_found_before_they_are_computed() -> None:
    rates = Rates(2.0, inf, inf, 0.0)
    early = timed([[1, 2], [1, 2]], [0.0, 0.5], task(2, "shortest-queue", UNLIMITED, rates=rates))
    assert times_of(early) == [1.0, 1.0], "another node begins before the first one has ended"
    late = timed([[1, 2], [1, 2]], [0.0, 1.5], task(2, "sticky", UNLIMITED, rates=rates))
    assert times_of(late) == [1.0, 0.0]


def test_loading_takes_time() -> None:
    # A block is computed in 10 s and loaded in 1 s from NVMe, in 2 s from the network, after 0.5 s.
    rates = Rates(0.1, BLOCK, BLOCK / 2, 0.5)
    prompts = [[1, 2], [3, 4], [1, 2]]
    one = task(1, capacities=slots(2, 9), rates=rates)
    fleet = timed(prompts, [0.0, 100.0, 200.0], one)
    assert fleet.point(0.0).hits_by_tier == {"dram": 0, "nvme": 2, "network": 0}
    assert times_of(fleet) == [20.0, 20.0, 2.0]
    fleet = timed(prompts, [0.0, 100.0, 200.0], task(1, "random", UNLIMITED, 2, rates=rates))
    assert fleet.point(0.0).hits_by_tier == {"dram": 0, "network": 2}
    assert times_of(fleet) == [20.0, 20.0, 4.5]
    assert fleet.point(0.0).network_read_bytes == 2 * BLOCK
    assert fleet.point(0.0).network_written_bytes == 4 * BLOCK
    assert fleet.point(0.0).network_bytes_per_request == 2 * BLOCK


def test_downloads_that_take_longer_than_computing_are_misses() -> None:
    # Computing takes 10 s a block, a download 5 s and 12 s at first: it pays off from three blocks on.
    rates = Rates(0.1, inf, BLOCK / 5, 12.0)
    assert rates.least_blocks(BLOCK, 1) == 3
    for n, served in ((2, 0), (3, 3)):
        fleet = timed(
            [list(range(n)), [7] * 3, list(range(n))],
            [0, 100, 200],
            task(1, "random", UNLIMITED, 3, rates=rates),
        )
        assert fleet.point(0.0).hits_by_tier == {"dram": 0, "network": served}
    assert Rates(0.1, inf, BLOCK / 11, 0.0).least_blocks(BLOCK, 1) == inf
    assert Rates(0.1, inf, BLOCK / 10, 0.1).least_blocks(BLOCK, 1) == inf
    assert INSTANT.least_blocks(BLOCK, 1) == 1


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1.0, 0.0), (1.0, -1.0, 1.0, 0.0), (1.0, 1.0, 1.0, inf)])
def test_impossible_rates_are_refused(bad: tuple[float, float, float, float]) -> None:
    with pytest.raises(MisuseError):
        Rates(*bad)


# -- decode nodes


def test_prompts_are_handed_off_to_decode_nodes() -> None:
    # Two nodes: one prefills at a block a second, one receives two blocks a second.
    rates = Rates(1.0, inf, 2 * BLOCK, 0.0)
    made = task(2, "sticky", UNLIMITED, decode_nodes=1, rates=rates)
    fleet = timed([[1, 2], [1, 2, 3, 4]], [0.0, 10.0], made)
    # The second prompt finds two blocks on both nodes: it computes two and hands two off.
    assert times_of(fleet) == [3.0, 3.0]
    point = fleet.point(0.0)
    assert (point.nodes, point.decode_nodes) == (2, 1)
    assert point.hits_by_tier == {"dram": 2, "network": 0}
    assert sum_of(point) == 6
    assert point.network_read_bytes == point.network_written_bytes == 4 * BLOCK


@pytest.mark.parametrize("routing", sorted(ROUTERS))
def test_decode_nodes_do_not_change_what_an_unlimited_network_serves(load: Workload, routing: str) -> None:
    point = play(load, task(6, routing, UNLIMITED, decode_nodes=3))
    assert sum_of(point) == load.accesses
    assert hits(point) == load.accesses - load.unique_blocks
    assert point.network_read_bytes > point.hits_by_tier["network"] * BLOCK, "and what was handed off"


# -- uploads


def test_admission_selects_the_blocks_that_are_uploaded() -> None:
    load = workload([[1, 2], [3], [1, 2], [1, 2]])
    always = play(load, task(1, "random", UNLIMITED))
    twice = play(load, task(1, "random", UNLIMITED, uploads=Rule("twice")))
    assert always.network_written_bytes == 3 * BLOCK
    assert twice.network_written_bytes == 2 * BLOCK


def test_downloaded_blocks_are_not_uploaded_again(load: Workload) -> None:
    fleet = Fleet(load, task(5, "random", UNLIMITED, 40))
    offered = 0
    store = fleet.network.store

    def count(keys: Sequence[int]) -> int:
        nonlocal offered
        offered += len(keys)
        return store(keys)

    fleet.network.store = count  # type: ignore[method-assign]
    fleet.run()
    assert offered == load.unique_blocks


def test_a_limited_network_evicts_the_least_recently_used() -> None:
    network = NetworkTier(NetworkSize("4", 4))
    assert network.store([1, 2]) == 2
    assert network.store([3, 4]) == 2
    network.use([1, 2])
    assert network.store([5]) == 1
    assert [network.prefix([key], 0) for key in (1, 2, 3, 4, 5)] == [1, 1, 1, 0, 1], (
        "4 is the last of its prompt"
    )
    assert network.prefix([9, 1, 2, 4, 5], 1) == 2
    assert network.store([1, 6]) == 1
    assert (len(network), network.stored, network.evicted) == (4, 6, 2)
    assert NetworkTier(NONE).store([1]) == 0


# -- routers


def prompt(words: list[int], session: int = 0) -> Prompt:
    return Prompt(0, Keys(np.array(words, np.uint64).tobytes(), 8), words, len(words), session)


def test_the_index_follows_tiers_of_nodes() -> None:
    index = BlockIndex()
    index.report(3, 0, [1, 2], gained=True)
    index.report(3, 1, [1], gained=True)
    index.report(4, 0, [1], gained=True)
    assert set(index.holders(1)) == {3, 4}
    index.report(3, 0, [1, 2], gained=False)
    assert set(index.holders(1)) == {3, 4}, "node 3 has it on NVMe"
    assert set(index.holders(2)) == set()
    index.report(3, 1, [1], gained=False)
    assert set(index.holders(1)) == {4}
    assert (index.stored(4, [1, 2]), index.stored(3, [1, 2])) == (1, 0)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_the_index_knows_what_nodes_hold(load: Workload, policy: str) -> None:
    """Under evictions from both tiers, and with downloads."""
    made = task(4, "events", NetworkSize("90", 90), capacities=slots(30, 30), options={"policy": policy})
    fleet = Fleet(load, made)
    fleet.run()
    assert isinstance(router := fleet._prefill.router, EventsRouter)
    everything = Keys(fleet._keys.tobytes(), 8)
    for number, node in enumerate(fleet.nodes()):
        node.placement.check()
        held = node.placement.view.readable(CHAIN, everything).tolist()
        assert 0 < sum(held) < load.unique_blocks
        assert held == [number in router._index.holders(key) for key in fleet._keys.tolist()]


def router_with(*held: tuple[int, list[int]]) -> Router:
    router = router_of("events", 3, 1.0, 1)
    for node, words in held:
        router.report(node, 0, words, gained=True)
    return router


def test_the_longest_prefix_wins_unless_its_node_is_busy() -> None:
    router = router_with((0, [1, 2, 3]), (1, [1]))
    asked = prompt([1, 2, 3, 4])
    idle = np.zeros(3)
    assert router.choose(asked, idle) == 0
    assert router.choose(asked, np.array([1.9, 0, 0])) == 0, "it saves two seconds more than node 1"
    assert router.choose(asked, np.array([2.1, 0, 0])) == 1
    assert router.choose(asked, np.array([3.5, 1.5, 0])) == 2, "the others wait for longer than they save"
    assert {router.choose(prompt([9]), np.array([0, 1, 0])) for _ in range(50)} == {0, 2}
    assert router.stored(0, asked) == 3


def test_equal_nodes_get_equal_shares() -> None:
    router = router_with((0, [1]), (2, [1]))
    assert {router.choose(prompt([1, 2]), np.zeros(3)) for _ in range(50)} == {0, 2}


def test_sticky_routing_keeps_sessions() -> None:
    router = router_of("sticky", 50, 1.0, 1)
    first = [router.choose(prompt([1], session), np.zeros(50)) for session in range(40)]
    assert [router.choose(prompt([2], session), np.zeros(50)) for session in range(40)] == first
    assert len(set(first)) > 20


def test_the_shortest_queue_is_chosen() -> None:
    router = router_of("shortest-queue", 3, 1.0, 1)
    assert {router.choose(prompt([1]), np.array([1.0, 0.5, 0.5])) for _ in range(50)} == {1, 2}


# -- the load


def test_one_copy_is_the_trace(load: Workload) -> None:
    assert load_of(load, 1, 0.01, 1) is load


def test_copies_have_blocks_of_their_own_beside_common_ones(tmp_path: Path) -> None:
    # Three conversations begin with block 1; two turns each.
    trace = workload([[1, 2], [1, 3], [1, 4], [1, 2, 5], [1, 3, 6], [7]])
    assert trace.sessions.tolist() == [0, 1, 2, 0, 1, 3]
    common = common_blocks(trace, 0.5)
    assert common.tolist() == [True, *[False] * 6]
    assert not common_blocks(trace, 1.0).any()
    load = load_of(trace, 3, 0.5, 1)
    assert load.requests == 18
    assert load.unique_blocks == 1 + 3 * 6
    assert load.session_count == 3 * 4
    assert load.block_tokens == trace.block_tokens
    assert (np.diff(load.times_s) >= 0).all()
    assert sorted(load.input_tokens.tolist()) == sorted(trace.input_tokens.tolist() * 3)
    prompts = prompts_of(load)
    sessions = load.sessions.tolist()
    for session in range(load.session_count):
        turns = [prompts[i] for i in range(load.requests) if sessions[i] == session]
        assert all(b[: len(a)] == a for a, b in pairwise(turns)), "a conversation goes on with its own blocks"
    heads = {each[0] for each in prompts}
    assert len(heads) == 1 + 3, "block 1 of all, and block 7 of each copy"


def test_sessions_of_copies_begin_later_and_keep_their_gaps() -> None:
    trace = workload([[1], [2], [1, 3], [2, 4]] * 3)
    load = load_of(trace, 2, 1.0, 1)
    for session in range(trace.session_count):
        first = load.times_s[load.sessions == session]
        copy = load.times_s[load.sessions == session + trace.session_count]
        assert np.allclose(first, trace.times_s[trace.sessions == session])
        assert np.allclose(np.diff(first), np.diff(copy))
        assert 0 <= copy[0] - first[0] <= MOST_DELAY_S


def test_a_fraction_of_a_copy_has_whole_sessions(load: Workload) -> None:
    part = load_of(load, 0.3, 0.01, 1)
    assert part.session_count <= load.session_count
    chosen = np.unique(part.sessions)
    assert len(chosen) == round(0.3 * load.session_count)
    for session in chosen.tolist():
        assert np.array_equal(part.times_s[part.sessions == session], load.times_s[load.sessions == session])
    assert part.blocks.max() + 1 == part.unique_blocks == len(np.unique(part.blocks))
    least = load_of(load, 1e-9, 0.01, 1)
    assert len(np.unique(least.sessions)) == 1, "never nothing"
    assert load_of(load, 2.5, 0.01, 1).requests > 2.3 * load.requests


def test_too_many_copies_are_refused() -> None:
    big = replace(workload([[1]]), unique_blocks=1 << 30)
    with pytest.raises(MisuseError, match="2 copies of this trace have too many blocks"):
        load_of(big, 2, 0.01, 1)


# -- experiments


def experiment(tmp_path: Path, **changes: Any) -> FleetExperiment:
    path = chats(tmp_path / "t", 150)
    return FleetExperiment(path, FleetOptions(**{"block_bytes": BLOCK, "nodes": (1, 4), **changes}))


def test_each_node_has_the_same_load_and_size(tmp_path: Path) -> None:
    made = experiment(tmp_path, copies_per_node=0.5, capacity="50%", networks=("none", "40%"))
    unique = made.workload.unique_blocks
    by_nodes = {each.nodes: each for each in made.tasks if each.network.name == "40%"}
    assert {n: each.copies for n, each in by_nodes.items()} == {1: 0.5, 4: 2.0}
    assert {each.capacities[0].slots for each in made.tasks} == {int(int(unique / 2) * 0.5)}
    assert by_nodes[4].network.blocks == int(2 * unique * 0.4)
    report = made.report()
    assert [(p.nodes, p.routing, p.network) for p in report.points] == [
        (nodes, routing, network)
        for nodes in (1, 4)
        for routing in ("random", "sticky", "events")
        for network in ("none", "40%")
    ]
    assert {p.requests for p in report.points if p.nodes == 4} == {300}
    assert report.trace.best_hit_ratio == pytest.approx(Experiment(tmp_path / "t", Options()).best_ratio)


def test_the_whole_load_can_be_the_same(tmp_path: Path) -> None:
    made = experiment(tmp_path, copies=1.0, networks=("none",), capacity="100%")
    assert {each.copies for each in made.tasks} == {1.0}
    assert {p.requests for p in made.report().points} == {150}


def test_networks() -> None:
    assert parse_network("none", 100, BLOCK).blocks == 0
    assert parse_network("unlimited", 100, BLOCK).blocks is None
    assert parse_network("12.5%", 100, BLOCK).blocks == 12
    assert parse_network("1MiB", 100, BLOCK).blocks == 15, "an object has a header"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": (0,)}, "a fleet has 0 nodes"),
        ({"nodes": (10_001,)}, "a fleet has 10001 nodes"),
        ({"routings": ("best",)}, "no routing 'best'"),
        ({"networks": ("much",)}, "'much' is no network tier"),
        ({"networks": ("20",)}, "20 may mean blocks or bytes"),
        ({"networks": ("0%",)}, "0% on the network holds no block"),
        ({"capacity": "0.1%"}, "less than one block"),
        ({"policy": "nru"}, "no eviction policy 'nru'"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"uploads": Rule("never")}, "unknown network admission 'never'"),
        ({"copies_per_node": 0.0}, "0 copies of the trace"),
        ({"copies": float("nan")}, "nan copies of the trace"),
        ({"common_share": 0.0}, "common_share is 0"),
        ({"decode_share": 1.0}, "decode_share is 1"),
        ({"decode_share": 0.5}, "one node cannot both prefill and decode apart"),
        ({"decode_share": 0.5, "nodes": (2,)}, "decode nodes get their blocks over the network"),
        ({"rates": Rates(1e9, 3e9, 1e9, 0.0)}, "a block is loaded from NVMe in"),
        ({"rates": Rates(1e9, 3e12, 1e9, 0.0)}, "a block is loaded from the network in"),
    ],
)
def test_impossible_fleets_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MisuseError) as caught:
        experiment(tmp_path, **changes)
    assert says in caught.value.message
    assert caught.value.hint


def test_decode_nodes_are_a_share_of_the_nodes(tmp_path: Path) -> None:
    fleets = {"nodes": (2, 10), "routings": ("random",), "networks": ("unlimited",), "capacity": "50%"}
    made = experiment(tmp_path, decode_share=0.3, copies_per_node=0.1, **fleets)
    assert {each.nodes: each.decode_nodes for each in made.tasks} == {2: 1, 10: 3}
    assert {p.decode_nodes for p in made.report().points} == {1, 3}
