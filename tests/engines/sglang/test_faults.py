"""Absent, killed and stopped daemons, altered bytes, exceptions: all are misses, and the engine lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.sglang.conftest import SETTINGS
from tests.engines.sglang.engine import Answer, Engine, full_pages, hicache, prompt, same
from tests.engines.sglang.stored import keys_of, layout_of, watched
from tests.processes import stop

PLACES = [
    "decoded", "layout_of", "open", "load", "store", "parent", "pages.ids", "pages.save", "pages.load",
    "client.put", "namespace.lookup", "namespace.acquire",
]  # fmt: skip
"""`backend.PLACES`, whose module imports SGLang."""
DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def served(model: Path, daemon: LocalDaemon, folder: Path) -> Iterator[Engine]:
    with Engine(model, **watched(daemon, folder, deadline_s=DEADLINE_S)) as engine:
        yield engine


def found_again(engine: Engine, asked: list[list[int]], expected: list[Answer]) -> bool:
    """Whether prompts are found again, once the client has connected to the daemon again."""
    wanted = [full_pages(len(each)) for each in asked]

    def found() -> bool:
        answers = engine.fresh(asked)
        assert same(answers, expected)
        return [answer.stored for answer in answers] == wanted

    return eventually(found)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_every_function_is_a_miss(
    plain: Engine, served: Engine, daemon: LocalDaemon, folder: Path, place: str
) -> None:
    known, new = prompt(200, 130), prompt(201 + PLACES.index(place), 130)
    expected = plain.fresh([known, new])
    served.store([known])
    (folder / "raised").unlink(missing_ok=True)
    (folder / "place").write_text(place)
    try:
        if place == "layout_of":
            # The layout is made once.
            with Engine(plain.model, **watched(daemon, folder, deadline_s=DEADLINE_S)) as other:
                assert same(other.fresh([known, new]), expected)
        else:
            assert same(served.fresh([known, new]), expected)
        assert eventually((folder / "raised").exists)
    finally:
        (folder / "place").unlink()
    assert found_again(served, [known, new], expected)
    assert not (folder / "escaped").exists()


def test_a_daemon_killed_and_restarted_while_serving(
    plain: Engine, model: Path, served: Engine, daemon: LocalDaemon
) -> None:
    asked = [prompt(220 + i, 150 + 40 * i) for i in range(3)]
    expected = plain.fresh(asked)
    served.store(asked)
    for after_s in (0.0, 0.1):
        served.flush()
        served.send_prompts(asked)
        time.sleep(after_s)
        daemon.kill()
        try:
            assert same(served.answers(), expected)
            assert same(served.fresh(asked), expected)
        finally:
            daemon.start()
    assert found_again(served, asked, expected)


def test_a_stopped_daemon_delays_a_request_by_its_deadlines_at_most(
    plain: Engine, served: Engine, daemon: LocalDaemon
) -> None:
    asked = [prompt(230, 200)]
    expected = plain.fresh(asked)
    served.store(asked)
    served.flush()
    stop(daemon.pid)
    try:
        began_s = time.monotonic()
        assert same(served.generate(asked), expected)
        # One for the question, one for the load.
        assert time.monotonic() - began_s < 2 * DEADLINE_S + 3
        assert same(served.fresh(asked), expected)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert found_again(served, asked, expected)


def test_altered_bytes_end_the_prefix(
    plain: Engine, served: Engine, daemon: LocalDaemon, folder: Path
) -> None:
    asked = prompt(240, 300)
    expected = plain.fresh([asked])
    served.store([asked])
    keys, layout = keys_of(asked, 16), layout_of(folder)
    with Client(daemon.url, deadline_s=10.0) as client:
        namespace = client.namespace(layout)
        payloads = np.empty((len(keys), layout.block_bytes), np.uint8)
        assert namespace.get(keys, payloads) == len(keys)
        namespace.invalidate(keys)
        with namespace.reserve(keys) as room:
            views = room.blocks
            for view, payload in zip(views, payloads, strict=True):
                view[:] = payload.data
            room.commit()
        views[4][1000] ^= 1
        answers = served.fresh([asked])
    assert same(answers, expected)
    assert answers[0].stored == 4 * 16
    assert found_again(served, [asked], expected)


def test_a_daemon_that_has_lost_the_prefix_stores_what_follows(
    plain: Engine, served: Engine, daemon: LocalDaemon, folder: Path
) -> None:
    """The engine still has the prefix, and will ask for what follows alone."""
    asked = prompt(250, 160)
    longer = asked + prompt(251, 160)
    expected = plain.fresh([longer])
    served.flush()
    served.generate([asked])
    with Client(daemon.url, deadline_s=10.0) as client:
        namespace = client.namespace(layout_of(folder))
        assert eventually(lambda: namespace.lookup(keys_of(asked, 16)) == 10)
        assert namespace.invalidate(keys_of(asked, 16)) == 10
        assert same(served.store([longer]), expected)
        assert namespace.contains(keys_of(longer, 16)).tolist() == [False] * 10 + [True] * 10


def test_a_daemon_started_later_is_used(plain: Engine, model: Path) -> None:
    asked = [prompt(260, 200)]
    expected = plain.fresh(asked)
    with LocalDaemon(SETTINGS) as late:
        late.stop()
        with Engine(model, **hicache(late)) as engine:
            for _ in range(2):
                answers = engine.fresh(asked)
                assert (same(answers, expected), answers[0].cached) == (True, 0)
            late.start()
            assert found_again(engine, asked, expected)


def test_a_full_store_serves_a_part(plain: Engine, model: Path) -> None:
    asked = [prompt(270 + i, 1200) for i in range(4)]
    expected = plain.fresh(asked)
    with (
        LocalDaemon({"dram": {"limit": "8MiB", "huge_pages": False}}) as small,
        Engine(model, **hicache(small)) as engine,
    ):
        for _ in range(2):
            assert same(engine.fresh(asked), expected)


def test_a_killed_engine_leaves_nothing_behind(plain: Engine, model: Path, daemon: LocalDaemon) -> None:
    asked = [prompt(280 + i, 1000) for i in range(4)]
    expected = plain.fresh(asked)
    for after_s in (0.1, 0.4):
        with Engine(model, **hicache(daemon, model="killed")) as engine:
            engine.send_prompts(asked)
            time.sleep(after_s)
    with Client(daemon.url, deadline_s=10.0) as client:
        assert eventually(lambda: not any(client.status()[name] for name in ("leases", "reservations")))
    with Engine(model, **hicache(daemon, model="killed")) as engine:
        assert same(engine.fresh(asked), expected)
