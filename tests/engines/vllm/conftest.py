from __future__ import annotations

import functools
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, connector, prompt, said
from tests.engines.vllm.models import make_model

SETTINGS = {"dram": {"limit": "128MiB", "huge_pages": False}, "nvme": {"limit": "256MiB"}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """The reference: an engine without the connector."""
    with Engine(model) as engine:
        yield engine


@functools.cache
def _own_cache_changes_bits(plain: Engine) -> bool:
    """Whether vLLM, by itself, answers otherwise where its own cache has half of a prompt."""
    for asked in (prompt(410 + i, 200 + 30 * i) for i in range(16)):
        cold = said(plain.fresh([asked], max_tokens=64))
        plain("reset")
        plain.generate([asked[: len(asked) // 2]], max_tokens=1)
        if said(plain.generate([asked], max_tokens=64)) != cold:
            return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    """Where any prefix cache changes vLLM's bits (on CPUs without AVX-512), there is nothing to compare with.

    Only comparisons of answers are left out for that, when they fail; whatever else is asserted counts.
    """
    try:
        return (yield)
    except AssertionError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        # A test with a reference of another model asks the usual one: the CPU is the same.
        if "said(" in (last.line or "") and _own_cache_changes_bits(item._request.getfixturevalue("plain")):
            pytest.skip(f"vLLM's own prefix cache changes its bits on this CPU: {last.line}")
        raise


@pytest.fixture(scope="session")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SETTINGS) as served:
        yield served


@pytest.fixture(scope="session", params=["async", "sync"])
def engine(request: pytest.FixtureRequest, model: Path, daemon: LocalDaemon) -> Iterator[Engine]:
    """An engine with the connector, for each way to load."""
    with Engine(model, **connector(daemon, load=request.param, weights_revision=request.param)) as made:
        made.mode = request.param
        yield made


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    """A daemon of one file of tests."""
    with LocalDaemon({"dram": {"limit": "256MiB", "huge_pages": False}}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[list[Engine]]:
    """Two processes, whose engines the tests replace: starting a process takes longer than an engine.

    The tests name the weights, because their files are newer than these processes.
    """
    with Engine(model) as one, Engine(model) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a small daemon, for tests that need no engine."""
    with (
        LocalDaemon({"dram": {"limit": "16MiB", "huge_pages": False}}) as served,
        Client(served.url, deadline_s=10.0) as made,
    ):
        yield made
