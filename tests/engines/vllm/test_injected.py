"""An exception in every method of the connector, and the daemon killed or stopped at every hook.

The engine lives, its tokens are right, and afterwards the store is used as before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import PATIENCE, Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.shapes import SHAPES

UNGUARDED = {
    # Its list is all that is known of lost pages.
    "worker.bad_blocks",
    # Their parts are guarded, or each is the answer to a failed one.
    "scheduler.step",
    "scheduler.admit_failed",
    "worker.fail_unstarted",
    # Threads: what they call is guarded.
    "worker._load",
    "worker._save",
    "worker._hint",
    # Without them pages are never free again.
    "references.save",
    "references.drop",
}
HOOKS = {
    "scheduler.matched",
    "lookup.find",
    "scheduler.admit",
    "scheduler.step",
    "scheduler.finish",
    "scheduler.hear",
    "worker.begin",
    "worker.load",
    "worker._fill_pages",
    "pages.load",
    "worker.save",
    "worker._put_of",
    "worker._fill",
    "worker._put_ended",
    "pages.save",
    "worker.ended",
    "worker.moved",
}
NEEDED = {
    "scheduler.hear",
    "scheduler.moving",
    "references.number",
    "references.ended",
    "worker.begin",
    "worker.ended",
    "worker.moved",
    "worker._waiting",
}
"""These fail a few times only: without them no load ends, or no page that is saved is free."""
OPTIONS = [{"kvstore": {"ttl_s": 600, "pin_s": 60, "next_use_s": 5}}, None]
DEADLINE_S = 0.5
LONGEST_STEP_S = PATIENCE["lookup_deadline_s"] + DEADLINE_S + 1.0
"""A step with a lookup and a load, and what it computes on a busy machine."""


class Pair(NamedTuple):
    """An engine with a daemon of its own, and the same without the store."""

    engine: Engine
    plain: Engine
    daemon: LocalDaemon


@pytest.fixture(scope="module", params=["async", "sync", "windows"])
def pair(
    request: pytest.FixtureRequest, model: Path, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    # No NVMe: what a device takes longer to load than a tiny model computes would not be loaded.
    settings = {"dram": {"limit": "64MiB", "huge_pages": False}}
    load = "sync" if request.param == "sync" else "async"
    with LocalDaemon(settings) as daemon:
        if request.param != "windows":
            with Engine(model, **connector(daemon, load=load)) as engine:
                yield Pair(engine, plain, daemon)
            return
        folder = SHAPES["interleaved windows"].save(tmp_path_factory.mktemp("windows"))
        with Engine(folder) as reference, Engine(folder, **connector(daemon, load=load)) as engine:
            yield Pair(engine, reference, daemon)


def hits(pair: Pair, asked: list[list[int]], expected: list[tuple[Any, Any]]) -> bool:
    """Whether the prompts are found again, within some tries: a busy machine may be too slow to load one."""
    for _ in range(5):
        answers = pair.engine.fresh(asked, params=OPTIONS)
        assert said(answers) == expected
        if cached(answers) == [full_blocks(len(each)) for each in asked]:
            return True
    return False


def test_an_exception_in_every_method(pair: Pair) -> None:
    engine, places, wrong, reached = pair.engine, pair.engine("places"), {}, set()
    assert set(places) >= UNGUARDED | NEEDED | HOOKS
    for number, place in enumerate(places):
        if place in UNGUARDED:
            continue
        asked = [prompt(2000, 130), prompt(2001 + number, 130)]
        expected = said(pair.plain.fresh(asked))
        engine.fresh(asked[:1], params=OPTIONS[:1])
        engine("sabotage", place=place, times=3 if place in NEEDED else sys.maxsize)
        try:
            if said(engine.fresh(asked, params=OPTIONS)) != expected:
                wrong[place] = "other tokens"
            if engine("repair", place=place):
                reached.add(place)
            if not hits(pair, asked, expected):
                wrong[place] = "nothing is found afterwards"
        except (AssertionError, RuntimeError) as error:
            pytest.fail(f"{place}: {error}")
    assert wrong == {}
    assert reached >= HOOKS - UNGUARDED


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_daemon_ends_or_hangs_in_every_hook(pair: Pair, how: signal.Signals) -> None:
    engine, daemon, slow = pair.engine, pair.daemon, {}
    for number, place in enumerate(sorted(HOOKS)):
        asked = [prompt(2000, 130), prompt(2200 + 50 * how + number, 130)]
        expected = said(pair.plain.fresh(asked))
        engine.fresh(asked[:1], params=OPTIONS[:1])
        assert engine("reset")
        engine("longest_step_s")
        engine("deadline", deadline_s=DEADLINE_S)
        engine("sabotage", place=place, times=1, signals=[daemon.pid, how])
        try:
            assert said(engine.generate(asked, params=OPTIONS)) == expected, place
            step_s = engine("longest_step_s")
        finally:
            if how == signal.SIGSTOP:
                os.kill(daemon.pid, signal.SIGCONT)
            else:
                daemon.kill()
                daemon.start()
            assert engine("repair", place=place) == 1, f"{place} is not called"
            engine("deadline", deadline_s=PATIENCE["deadline_s"])
        if step_s > LONGEST_STEP_S:
            slow[place] = step_s
        eventually(lambda: engine("connected"))
        assert hits(pair, asked, expected), f"nothing is found after {place}"
    assert slow == {}
