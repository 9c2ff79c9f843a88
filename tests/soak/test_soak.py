"""The soak in small, and that it sees what it looks for."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, names, payloads
from tests.soak import vault
from tests.soak.engines import CHAIN, Engine
from tests.soak.outcome import Life, Outcome, Plan
from tests.soak.run import _Watch, run
from tests.soak.samples import SLACK, growths


def life_of(per_s: float, noise: float = 0.3, seconds: int = 600, jumps: float = 0.0) -> Life:
    """A life whose memory grows, with the noise of an allocator, and jumps in its warm-up."""
    dice = np.random.default_rng(1)
    times = [float(s) for s in range(seconds)]
    level = 100 + per_s * np.arange(seconds) + noise * dice.standard_normal(seconds)
    level[100:] += jumps
    others = dict.fromkeys((*SLACK, "presence_tables"), 5.0)
    return Life(times, [{**others, "anonymous_mib": value} for value in level.tolist()])


def test_growth_is_found_below_noise_and_behind_a_warm_up() -> None:
    for per_s, leaks in ((0.0, []), (0.05, ["anonymous_mib"])):
        life = life_of(per_s, noise=5.0, jumps=40.0)
        assert [each.figure for each in growths(life.times_s, life.samples) if each.is_leak] == leaks


def test_a_slow_leak_is_found_within_an_hour() -> None:
    plan = Plan(3600, 1, 3, 20.0)
    assert [plan.life_s(number) for number in range(3)] == [1800, 900, 900]
    for mib_per_hour, leaks in ((0.0, []), (20.0, ["anonymous_mib"])):
        life = life_of(mib_per_hour / 3600, noise=1.0, seconds=1800, jumps=20.0)
        assert [each.figure for each in growths(life.times_s, life.samples) if each.is_leak] == leaks


@pytest.mark.parametrize("mib_per_hour", [0.0, 20.0])
def test_a_slope_is_within_its_bounds(mib_per_hour: float) -> None:
    life = life_of(mib_per_hour / 3600, noise=1.0, seconds=1800)
    [growth] = [each for each in growths(life.times_s, life.samples) if each.figure == "anonymous_mib"]
    assert growth.least < mib_per_hour < growth.most < growth.least + 3


@pytest.mark.parametrize(("lives", "seconds"), [(1, [600]), (2, [300, 300]), (4, [300, 100, 100, 100])])
def test_lives_share_the_time(lives: int, seconds: list[float]) -> None:
    assert [Plan(600, 1, lives, 20.0).life_s(number) for number in range(lives)] == seconds


def test_gets_that_become_slower_are_found() -> None:
    life = life_of(0.0)
    life.gets = [(float(s), 2.0) for s in range(600) for _ in range(3)]
    assert life.slower() == 1.0
    life.gets = [(at, 2.0 if at < 450 else 9.0) for at, _ in life.gets]
    outcome = Outcome(Plan(600, 1, 1, 1), [life])
    outcome.counts["hits"] = 1
    outcome.judge()
    assert outcome.failures == ["life 1: the p99 of gets became 4.5 times as long"]


def test_a_table_that_outlives_its_namespace_is_found() -> None:
    life = life_of(0.0)
    life.samples[300]["presence_tables"] += 1
    outcome = Outcome(Plan(600, 1, 1, 1), [life])
    outcome.counts["hits"] = 1
    outcome.judge()
    assert outcome.failures == ["life 1: more presence tables than namespaces"]


def test_an_interrupted_soak_tells_what_it_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(_Watch, "end_life", end)
    outcome = run(Plan(6.0, 7, 2, 20.0), None, io.StringIO())
    assert outcome.failures == ["it was interrupted"]
    assert outcome.counts["hits"] > 0


def test_a_soak_in_small(tmp_path: Path) -> None:
    outcome = run(Plan(24.0, 7, 2, 20.0), tmp_path, io.StringIO())
    assert outcome.failures == []
    for done in ("hits", "stored", "hold", "states"):
        assert outcome.counts[done] > 0, outcome.text()
    assert outcome.done.total() > 0
    assert (tmp_path / "soak.svg").stat().st_size > 1000
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) >= 10


def test_other_bytes_are_seen() -> None:
    engine = Engine("unix:///nowhere", "", "amber", 1)
    keys = names(2, "x")
    out = payloads(keys, 64, engine._salt).copy()
    engine._compare(keys, out)
    assert not engine.report.wrong
    out[1, 5] ^= 1
    engine._compare(keys, out)
    assert len(engine.report.wrong) == 1


def test_a_lost_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "_WITHIN_S", 0.5)
    with (
        LocalDaemon(SMALL) as daemon,
        Client(daemon.url, vault.token_of(vault.TENANT), deadline_s=10) as client,
    ):
        kept = vault.Vault(daemon.url)
        kept.fill()
        assert kept.lost() == 0
        assert client.namespace(CHAIN).invalidate(vault.KEYS[60:]) == 4
        assert kept.lost() == 4
