"""The engine's speed as its steps show it, and what loads may take by it."""

from __future__ import annotations

from functools import partial

import pytest

from kvstore import Layout
from kvstore_vllm.budget import estimates, patience_s
from kvstore_vllm.groups import Group
from kvstore_vllm.prefill_rate import PrefillRate

about = partial(pytest.approx, rel=0.01)


class Clock:
    """Runs steps of an engine that takes `bare` s for a step, and `token` s more for each token."""

    def __init__(self, step_tokens: int = 2048, bare: float = 0.01, token: float = 0.001) -> None:
        self.rate = PrefillRate(step_tokens)
        self.bare, self.token, self.now = bare, token, 100.0

    def step(
        self, *prompts: tuple[int, int], others: int = 0, wait: float = 0.0, more: float = 0.0, **how: bool
    ) -> None:
        serial = self.rate.begin(prompts, others, self.now, **how)
        self.now += self.bare + self.token * sum(n for _, n in prompts) + more
        self.rate.end(serial, self.now)
        self.now += wait

    def known(self, tokens: int = 1000) -> Clock:
        for _ in range(3):
            self.step((0, 1))
            self.step((0, tokens))
        return self


def test_unknown_until_three_steps_have_shown_it() -> None:
    clock = Clock()
    for _ in range(3):
        assert clock.rate.seconds(0, 1000) is None
        clock.step((0, 1000))
    assert clock.rate.seconds(0, 1000) == about(1.01), "no step without tokens to compare with"
    clock.step((1000, 1))
    assert clock.rate.seconds(0, 1000) == about(1.0)
    assert clock.rate.seconds(0, 500) == about(0.5)
    assert clock.rate.seconds(400, 1000) == about(0.6)
    assert clock.rate.seconds(0, 0) is None


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    for wait in (1.0, 60.0, 3600.0):
        clock.step((0, 1000), wait=wait)
        clock.step((0, 1), wait=wait)
    assert clock.rate.seconds(0, 1000) == about(1.0)


def test_a_step_scheduled_ahead_begins_where_the_last_ended() -> None:
    rate, serials = PrefillRate(2048), []
    for i in range(5):  # a step of 1 s each, scheduled while the one before runs
        serials.append(rate.begin([(0, 1000)], 0, float(i)))
        if i:
            rate.end(serials[i - 1], i + 0.5)
    assert rate.seconds(0, 1000) == about(1.0)


def test_steps_without_a_report_are_left_out() -> None:
    rate = PrefillRate(2048)
    for i in range(6):
        serial = rate.begin([(0, 1000)], 0, 10.0 * i)
        if i % 2:
            rate.end(serial, 10.0 * i + 1)
    assert rate.seconds(0, 1000) == about(1.0)


def test_one_slow_step_changes_nothing_and_many_do() -> None:
    clock = Clock().known()
    clock.step((0, 1000), more=30.0)
    assert clock.rate.seconds(0, 1000) == about(1.0)
    clock.token = 0.002
    for _ in range(9):
        clock.step((0, 1000))
    assert clock.rate.seconds(0, 1000) == about(2.0)


def test_only_steps_that_compute_mostly_prompts_count() -> None:
    clock = Clock().known()
    for _ in range(9):
        clock.step((0, 1000), others=200, more=9.0)
        clock.step((0, 1000), more=9.0, measured=False)
    assert clock.rate.seconds(0, 1000) == about(1.0)
    for _ in range(9):
        clock.step((0, 500), (500, 500), others=64, more=0.12)
    assert clock.rate.seconds(0, 1000) > 1.05


def test_sizes_that_differ_much_are_unknown() -> None:
    clock = Clock().known(1000)
    assert clock.rate.seconds(0, 300) is not None
    assert clock.rate.seconds(0, 200) is None
    assert clock.rate.seconds(0, 2040) is not None
    assert Clock(8192).known(1000).rate.seconds(0, 4000) is None
    chunks = Clock(1024).known(1000)
    assert chunks.rate.seconds(0, 4000) == about(4.0), "computed in steps of the size that is known"


def test_tokens_behind_a_long_context_take_longer() -> None:
    clock = Clock(1000)
    for _ in range(3):
        for first in range(0, 8000, 1000):
            clock.step((first, 1000), more=first * 1e-4)
        clock.step((0, 1))
    near, far = clock.rate.seconds(0, 1000), clock.rate.seconds(7000, 8000)
    assert near == about(1.0)
    assert far is not None
    assert far > 1.4
    whole = clock.rate.seconds(0, 8000)
    assert whole == pytest.approx(8.0 + sum(range(0, 8000, 1000)) * 1e-4, rel=0.1)


# -- what loads may take


def layout(nbytes: int, shard: str = "0/2") -> Layout:
    return Layout("m", nbytes, block_tokens=16, shard=shard)


FULL = Group(0, ("a",), 16, 1, 1)
WINDOW = Group(1, ("b",), 16, 1, 1, window_blocks=4)
STATE = Group(1, ("b",), 16, 1, 1, state=True)


@pytest.mark.parametrize(
    ("groups", "layouts"),
    [
        ([FULL], [[layout(4096)]]),
        ([FULL], [[layout(4096)], [layout(4096, "1/2")]]),
        ([FULL, WINDOW], [[layout(4096), layout(8192)]]),
        ([FULL, STATE], [[layout(4096), layout(1 << 20)], [layout(4096, "1/2"), layout(1 << 20, "1/2")]]),
    ],
    ids=["one", "shards", "window", "state"],
)
@pytest.mark.parametrize("computed", [0, 160])
def test_all_blocks_of_a_load_together_may_take_what_it_replaces(
    groups: list[Group], layouts: list[list[Layout]], computed: int
) -> None:
    made = estimates(2.0, groups, layouts, computed, 1600, 1.0)
    blocks = {0: (1600 - computed) // 16, 1: 4 if groups[-1] is WINDOW else 1}
    total = 0.0
    for shard in made:
        for group in groups:
            estimate = shard[group.number]
            assert estimate is not None
            assert (estimate.load_s, estimate.have) == (1.0, computed // 16)
            total += estimate.recompute_s * blocks[group.number]
    assert total == pytest.approx(0.9 * 2.0)


def test_without_a_speed_or_blocks_nothing_is_estimated() -> None:
    assert estimates(None, [FULL], [[layout(4096)]], 0, 1600, 1.0) == [[None]]
    assert estimates(1.0, [FULL], [[layout(4096)]], 1600, 1600, 1.0) == [[None]]
    assert estimates(1.0, [FULL], [], 0, 1600, 1.0) == []
    [[made]] = estimates(0.0, [FULL], [[layout(4096)]], 0, 1600, 1.0)
    assert made is not None
    assert made.recompute_s > 0, "0 would be unknown to the daemon"


def test_a_load_is_given_up_after_twice_the_computing_time() -> None:
    assert patience_s(None, 1.0) == 1.0
    assert patience_s(0.2, 1.0) == pytest.approx(0.4)
    assert patience_s(5.0, 1.0) == 1.0
    assert patience_s(0.001, 1.0) == 0.1
