"""Weights are named in the background. Without their name the store is not used."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Client, Layout, WeightsNaming
from kvstore.errors import ConfigError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.weights import naming
from kvstore_vllm.connector import KVStoreConnector
from kvstore_vllm.messages import Handshake
from kvstore_vllm.metrics import NAMING, NOT_STORED, UNNAMED
from kvstore_vllm.weights import Weights
from tests.daemons import names
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.models import make_model
from tests.engines.vllm.test_halves import BLOCK_BYTES, BLOCK_TOKENS, FakeRequest, half, step

# -- the name


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that this engine can have read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    started_ns = (folder / "model.safetensors").stat().st_ctime_ns + 1
    monkeypatch.setattr(naming, "process_started_ns", lambda: started_ns)
    return folder


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are not read before this is set."""
    event, digest = threading.Event(), naming.files_digest

    def late(*arguments: Any) -> Any:
        assert event.wait(30)
        return digest(*arguments)

    monkeypatch.setattr(naming, "files_digest", late)
    yield event
    event.set()


def test_known_names_are_there_at_once(held: threading.Event) -> None:
    for known in ([Weights("commit:0123")], [Weights("a"), Weights("a")]):
        made = WeightsNaming(known)
        assert made.wait(0)
        assert made.revision() == known[0].name
    assert WeightsNaming([Weights("a"), Weights("b")]).revision() == "a, draft b"


def test_the_start_waits_for_a_name_only_a_short_time(files: Path, held: threading.Event) -> None:
    made = WeightsNaming([Weights(path=files)])
    began_s = time.monotonic()
    assert not made.wait_at_start()
    assert 0.1 < time.monotonic() - began_s < 5
    threading.Timer(0.05, held.set).start()
    assert made.wait_at_start() or made.wait(30)


def test_the_name_is_that_of_the_content(files: Path, held: threading.Event) -> None:
    made = WeightsNaming([Weights(path=files)])
    assert not made.wait(0.05)
    held.set()
    assert made.wait(30)
    assert made.revision() == Weights(path=files).revision()


def test_what_is_seen_without_reading_ends_the_start(files: Path, held: threading.Event) -> None:
    time.sleep(0.02)  # a tick of the file system's clock
    (files / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(ConfigError, match=r"model.safetensors in .* was changed after the engine started"):
        WeightsNaming([Weights(path=files)])
    (files / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no files of a model.*set weights_revision"):
        WeightsNaming([Weights("a"), Weights(path=files / "empty")])


def test_files_that_change_before_they_are_read_have_no_name(files: Path, held: threading.Event) -> None:
    made = WeightsNaming([Weights(path=files)])
    time.sleep(0.02)
    (files / "model.safetensors").write_bytes(b"others!")
    held.set()
    assert made.wait(30)
    with pytest.raises(ConfigError, match=r"model.safetensors in .* was changed after the engine started"):
        made.revision()


# -- the halves

LAYOUTS = [Layout(model="m", block_bytes=BLOCK_BYTES, shard=f"{i}/2") for i in range(2)]


class Scheduling:
    """The state of a connector beside the scheduler, and what its half is told."""

    def __init__(self) -> None:
        self._off = ""
        self._met = self._awaits_names = False
        self.layouts: Any = None
        self.unnamed: bool | None = None

    def _half(self) -> Any:
        return SimpleNamespace(
            meet=lambda layouts: setattr(self, "layouts", layouts),
            turn_off=lambda unnamed: setattr(self, "unnamed", unnamed),
        )

    def hear(self, *told: Handshake) -> tuple[bool, bool]:
        """Whether the connector asks no more, and whether it keeps the engine awake."""
        KVStoreConnector._meet(self, list(told))  # type: ignore[arg-type]
        return self._met, self._awaits_names


def test_the_store_is_used_when_all_workers_have_a_name() -> None:
    late, named = Handshake([]), [Handshake([layout]) for layout in LAYOUTS]
    connector = Scheduling()
    assert connector.hear(late, late) == (False, True)
    assert connector.hear(named[0], late) == (False, True)
    assert connector.layouts is None
    assert connector.hear(*named) == (True, False)
    assert connector.layouts == [[LAYOUTS[0]], [LAYOUTS[1]]]
    assert connector.unnamed is None


def test_one_worker_without_a_name_turns_the_store_off() -> None:
    connector = Scheduling()
    bad = Handshake([], "a file is broken (mend it)", unnamed=True)
    assert connector.hear(Handshake([LAYOUTS[0]]), bad) == (True, False)
    assert (connector.layouts, connector.unnamed) == (None, True)


def test_lookups_without_a_name_are_misses_by_name(client: Client) -> None:
    made = half(client, LAYOUTS[0], named=False)
    for number, why in enumerate((NAMING, UNNAMED)):
        request = FakeRequest(f"r{number}", names(3))
        # Not even promised blocks are loaded: no worker could.
        request.kv_transfer_params = {"do_remote_prefill": True, "remote_num_tokens": 3 * BLOCK_TOKENS}
        assert made.matched(request, 0) == 0
        made.admit(request, request, 0)
        orders = step(made, request)
        assert (orders.loads, orders.saves) == ([], [])
        assert made.counts()[f"missed_tokens:{why}"] == 3 * BLOCK_TOKENS
        made.turn_off(unnamed=True)


# -- the engine


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "64MiB", "huge_pages": False}}) as daemon:
        yield daemon


def test_an_engine_serves_until_its_weights_are_named(own: LocalDaemon, tmp_path: Path) -> None:
    asked, hit = [prompt(700, 300)], full_blocks(300)
    with Engine(make_model(tmp_path / "model")) as engine:
        expected = said(engine.fresh(asked))
        engine("hold_digest")
        engine.restart(**connector(own))
        for number in (1, 2):
            answers = engine.fresh(asked, idle=False)
            assert (said(answers), cached(answers)) == (expected, [0])
            assert engine("missed") == {NAMING: number * hit}
        engine("let_digest_go_on")
        engine("idle")  # it stays awake until then
        # Nothing was stored before, and everything is from now on.
        for found in (0, hit):
            answers = engine.fresh(asked)
            assert (said(answers), cached(answers)) == (expected, [found])
        assert engine("missed") == {NAMING: 2 * hit, NOT_STORED: hit}
        assert engine("layout")["revision"].startswith("blake3:")
        assert engine("failures") == {}

        # A name that this node remembers is known at the start.
        engine.restart(**connector(own))
        answers = engine.fresh(asked)
        assert (said(answers), cached(answers)) == (expected, [hit])


def test_an_engine_whose_weights_change_before_they_are_named_serves_without_the_store(
    own: LocalDaemon, tmp_path: Path
) -> None:
    asked = [prompt(701, 300)]
    folder = make_model(tmp_path / "model")
    with Engine(folder) as engine:
        expected = said(engine.fresh(asked))
        engine("hold_digest")
        engine.restart(**connector(own))
        make_model(folder, seed=1)
        engine("let_digest_go_on")
        engine("idle")
        for _ in range(2):
            answers = engine.fresh(asked)
            assert (said(answers), cached(answers)) == (expected, [0])
        assert engine("missed")[UNNAMED] == 2 * full_blocks(300)
        assert "was changed after the engine started" in engine("off")
        assert engine("failures") == {}
