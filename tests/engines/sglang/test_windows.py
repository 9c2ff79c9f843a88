"""Windows whose layers have a host pool of their own: SGLang loads the pages at the end of a prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.sglang.engine import Engine, full_pages, prompt, same
from tests.engines.sglang.package import HiCacheFile, PoolHitPolicy, PoolTransfer, storage
from tests.engines.sglang.shapes import SHAPES
from tests.engines.sglang.stored import keys_of, layout_of, watched, zero

PLACES = ["load", "store", "pages.load", "pages.save", "client.lookup", "restorable"]
ONE_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
ASKED = prompt(600, 300)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPES["laguna, windows"].save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def computing(windowed: Path) -> Iterator[Engine]:
    """The reference: an engine without HiCache."""
    with Engine(windowed) as engine:
        yield engine


def in_windows(daemon: LocalDaemon, folder: Path, tokens: list[int], page_tokens: int = 16) -> list[bytes]:
    """The keys of the pages of a prompt whose windows are stored."""
    keys = keys_of(tokens, page_tokens)
    with Client(daemon.url, deadline_s=10.0) as client:
        stored = client.namespace(layout_of(folder, pool="swa")).contains(keys)
    return [key for key, found in zip(keys, stored, strict=True) if found]


@pytest.mark.parametrize(
    ("layout", "page_tokens"), [("layer_first", 1), ("page_first_direct", 16), ("page_first_direct", 64)]
)
def test_a_second_process_loads_both_pools(
    computing: Engine, windowed: Path, daemon: LocalDaemon, tmp_path: Path, layout: str, page_tokens: int
) -> None:
    # The whole prompt; with more behind it; with a head that lacks its window; shorter than a window.
    prompts = [ASKED, ASKED + prompt(601, 200), ASKED[:200] + prompt(602, 50), ASKED[:40]]
    expected = computing.fresh(prompts)
    how = watched(daemon, tmp_path, layout=layout, engine={"page_size": page_tokens})
    with Engine(windowed, **how) as first:
        assert same(first.store([ASKED]), expected[:1])
    windows = in_windows(daemon, tmp_path, ASKED, page_tokens)
    assert 48 <= len(windows) * page_tokens < 48 + 2 * page_tokens
    with Engine(windowed, **how) as second:
        answers = second.fresh(prompts)
        assert same(answers, expected)
        whole = full_pages(300, page_tokens)
        assert [answer.stored for answer in answers[:3]] == [whole, 300 // page_tokens * page_tokens, 0]
        # What was computed is stored, with its windows.
        answers = second.fresh(prompts)
        assert same(answers, expected)
        wanted = [full_pages(len(each), page_tokens) for each in prompts]
        assert [answer.stored for answer in answers] == wanted
        # The bytes of the windows are used, alone.
        zero(daemon, layout_of(tmp_path, pool="swa"), windows)
        [changed] = second.fresh([ASKED])
        assert (changed.stored, changed.says(expected[0])) == (whole, False)


def test_in_one_pool_every_page_can_end_a_prefix(
    computing: Engine, windowed: Path, daemon: LocalDaemon, tmp_path: Path
) -> None:
    part = ASKED[:200] + prompt(602, 50)
    expected = computing.fresh([part])
    how = watched(daemon, tmp_path, engine={"disable_hybrid_swa_memory": True})
    with Engine(windowed, **how) as engine:
        engine.store([ASKED])
        [answer] = engine.fresh([part])
        assert (answer.says(expected[0]), answer.stored) == (True, full_pages(200))
        assert not (tmp_path / "layout-0-swa").exists()


def test_a_prefix_without_its_window_is_not_loaded(
    computing: Engine, windowed: Path, daemon: LocalDaemon, tmp_path: Path
) -> None:
    longer = ASKED + prompt(611, 200)
    expected = computing.fresh([longer])
    with Engine(windowed, **watched(daemon, tmp_path, weights_revision="missing")) as engine:
        engine.store([ASKED])
        engine.store([longer])
        with Client(daemon.url, deadline_s=10.0) as client:
            namespace = client.namespace(layout_of(tmp_path, pool="swa"))
            last = keys_of(longer, 16)[full_pages(500) // 16 - 2]
            assert namespace.invalidate([last]) == 1
        # The earlier prompt ended where its own window is stored.
        [answer] = engine.fresh([longer])
        assert (answer.says(expected[0]), answer.stored) == (True, 288)
        [answer] = engine.fresh([longer])
        assert (answer.says(expected[0]), answer.stored) == (True, full_pages(500))


def test_altered_windows_are_computed(
    computing: Engine, windowed: Path, daemon: LocalDaemon, tmp_path: Path
) -> None:
    [expected] = computing.fresh([ASKED])
    with Engine(windowed, **watched(daemon, tmp_path, weights_revision="altered")) as engine:
        engine.store([ASKED])
        keys, layout = in_windows(daemon, tmp_path, ASKED), layout_of(tmp_path, pool="swa")
        with Client(daemon.url, deadline_s=10.0) as client:
            namespace = client.namespace(layout)
            assert namespace.invalidate(keys) == len(keys)
            with namespace.reserve(keys) as room:
                views = room.blocks
                for view in views:
                    view[:] = np.ones(layout.block_bytes, np.uint8).data
                room.commit()
            views[1][1000] ^= 1
            [answer] = engine.fresh([ASKED])
        assert (answer.says(expected), answer.stored) == (True, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def served(windowed: Path, daemon: LocalDaemon, folder: Path) -> Iterator[Engine]:
    with Engine(windowed, **watched(daemon, folder, weights_revision="faults")) as engine:
        yield engine


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_is_a_miss(computing: Engine, served: Engine, folder: Path, place: str) -> None:
    known, new = prompt(620, 130), prompt(621 + PLACES.index(place), 130)
    expected = computing.fresh([known, new])
    served.store([known])
    (folder / "raised").unlink(missing_ok=True)
    (folder / "place").write_text(place)
    try:
        assert same(served.fresh([known, new]), expected)
        assert eventually((folder / "raised").exists)
    finally:
        (folder / "place").unlink()
    assert same(served.fresh([known, new]), expected)
    assert not (folder / "escaped").exists()


def test_ranks_agree_on_a_prefix(
    computing: Engine, windowed: Path, daemon: LocalDaemon, tmp_path: Path
) -> None:
    longer = ASKED + prompt(631, 200)
    how = watched(daemon, tmp_path, engine={"tp_size": 2}, weights_revision="ranks")
    how["environment"].update(ONE_CORE_EACH)
    with Engine(windowed, **how) as engine:
        engine.store([ASKED])
        expected = engine.store([longer])
        assert expected[0].tokens == computing.fresh([longer])[0].tokens
        [answer] = engine.fresh([longer])
        assert (answer.says(expected[0]), answer.stored) == (True, full_pages(500))
        with Client(daemon.url, deadline_s=10.0) as client:
            namespace = client.namespace(layout_of(tmp_path, rank=1, pool="swa"))
            assert namespace.invalidate(keys_of(longer, 16)[full_pages(500) // 16 - 1 :]) > 0
        [answer] = engine.fresh([longer])
        assert (answer.says(expected[0]), answer.stored) == (True, 288)


@pytest.mark.parametrize("policy", [PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES])
def test_prefixes_are_found_as_by_the_backend_for_files(policy: PoolHitPolicy) -> None:
    """SGLang's own backend is the reference."""
    random.seed(0)
    keys = [f"{n}" for n in range(12)]
    for _ in range(300):
        full = random.randint(0, 12)
        stored = {name: np.array([random.random() < 0.7 for _ in keys]) for name in ("swa", "mamba")}
        transfers = [
            PoolTransfer(name=name, keys=["?"] * random.randint(0, 4), hit_policy=policy) for name in stored
        ]
        names = {f"{key}.bin" for key in keys[:full]}
        names |= {
            f"{key}.{name}.bin"
            for name in stored
            for key, found in zip(keys, stored[name], strict=True)
            if found
        }
        files = object.__new__(HiCacheFile)
        files.config_suffix = files.tp_config_suffix = ""
        files._collect_existing_component_keys = lambda *_, names=names: names
        expected = files.batch_exists_v2(keys, transfers)
        found = storage._restorable(full, [(each, stored[each.name]) for each in transfers])
        assert found.kv_hit_pages == expected.kv_hit_pages
        assert found.restorable_prefix_pages == expected.restorable_prefix_pages
        # A pool behind one that has nothing is not looked at there.
        for name, pages in expected.extra_pool_hit_pages.items():
            assert found.extra_pool_hit_pages[name] == pages


def test_an_unknown_policy_is_a_miss() -> None:
    transfer = SimpleNamespace(name="swa", keys=["a"], hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    with pytest.raises(ValueError, match="the pool swa has the policy block_groups"):
        storage._restorable(1, [(transfer, np.ones(1, np.bool_))])  # type: ignore[list-item]
