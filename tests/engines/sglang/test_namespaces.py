"""Weights, dtypes, page sizes, layouts and tenants share nothing; some engines are refused at start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.conftest import SETTINGS
from tests.engines.sglang.engine import Ended, Engine, full_pages, hicache, prompt, same
from tests.engines.sglang.models import make_model
from tests.tenants import TenantDaemon

TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue"))}
ASKED = [prompt(400, 300)]
WHOLE = full_pages(300)


@pytest.fixture(scope="module")
def stored(model: Path, daemon: LocalDaemon) -> LocalDaemon:
    """A daemon with a prompt of an engine."""
    with Engine(model, **hicache(daemon)) as engine:
        engine.store(ASKED)
    return daemon


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


def test_a_copy_of_the_model_finds_its_blocks(model: Path, stored: LocalDaemon, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    with Engine(copy, **hicache(stored)) as engine:
        assert engine.fresh(ASKED)[0].stored == WHOLE


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"dtype": "float16"}},
        {"engine": {"page_size": 64}},
        {"layout": "layer_first"},
        {"engine": {"context_length": 2048}},
        {"engine": {"json_model_override_args": '{"rope_theta": 5000.0}'}},
        {"weights_revision": "of the user"},
        {"model": "of the user"},
    ],
    ids=str,
)
def test_other_engines_share_nothing(model: Path, stored: LocalDaemon, changes: dict[str, Any]) -> None:
    with Engine(model, **hicache(stored, **changes)) as engine:
        computed = engine.fresh(ASKED)
        assert computed[0].stored == 0
        again = engine.fresh(ASKED)
        assert again[0].stored == full_pages(300, 64 if "64" in str(changes) else 16)
        # A half-precision hit is rounded more.
        assert again[0].tokens[0] == computed[0].tokens[0]


def test_other_weights_share_nothing(other: Path, stored: LocalDaemon) -> None:
    with Engine(other) as plain:
        expected = plain.fresh(ASKED)
    with Engine(other, **hicache(stored)) as engine:
        answers = engine.store(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, 0)
        assert engine.fresh(ASKED)[0].stored == WHOLE


def test_weights_that_are_updated_share_nothing(model: Path, other: Path, stored: LocalDaemon) -> None:
    with Engine(other) as plain:
        expected = plain.fresh(ASKED)
    with Engine(model, **hicache(stored)) as engine:
        assert engine.fresh(ASKED)[0].stored == WHOLE
        engine.flush()  # SGLang refuses an update while it stores
        assert engine("update_weights_from_disk", model_path=str(other))
        for _ in range(2):
            answers = engine.fresh(ASKED)
            assert (same(answers, expected), answers[0].stored) == (True, 0)
        assert "nothing is loaded or stored from now on: SGLang updates weights" in engine.log
    # What the changed engine has computed is not stored under the name of the old weights.
    with Engine(model, **hicache(stored)) as engine, Engine(model) as plain:
        assert same(engine.fresh(ASKED), plain.fresh(ASKED))


@pytest.fixture(scope="module")
def shared() -> Iterator[TenantDaemon]:
    tokens = [
        f'[[tenants.{name}.tokens]]\nhash = "sha256:{hash_of(token).hex()}"' for name, token in TOKENS.items()
    ]
    with TenantDaemon(SETTINGS, "\n".join([*tokens, ""])) as daemon:
        yield daemon


def test_tenants_share_nothing(plain: Engine, model: Path, shared: TenantDaemon) -> None:
    expected = plain.fresh(ASKED)
    with Engine(model, **hicache(shared, token=TOKENS["red"])) as red:
        red.store(ASKED)
        assert red.fresh(ASKED)[0].stored == WHOLE
    # The token may be in the environment, where no list of processes shows it.
    blues = hicache(shared)
    with Engine(model, environment={"KVSTORE_TOKEN": TOKENS["blue"]}, **blues) as blue:
        answers = blue.fresh(ASKED)
        assert (same(answers, expected), answers[0].stored) == (True, 0)
        assert blue.fresh(ASKED)[0].stored == WHOLE


def test_a_wrong_token_costs_only_hits(plain: Engine, model: Path, shared: TenantDaemon) -> None:
    with Engine(model, **hicache(shared, token=new_token(b"x" * 32))) as engine:
        for _ in range(2):
            answers = engine.fresh(ASKED)
            assert (same(answers, plain.fresh(ASKED)), answers[0].cached) == (True, 0)
        assert "refuses" in engine.log


@pytest.mark.parametrize(
    ("family", "config", "options", "message"),
    [
        ("Llama", {}, {"deadlines": 1}, "unknown key 'deadlines' (did you mean deadline_s?)"),
        ("Llama", {}, {"deadline_s": "soon"}, "deadline_s is 'soon' (a float)"),
        ("Llama", {}, {"interface_v1": None}, "interface_v1 is not set"),
        ("Llama", {}, {"engine": {"load_format": "dummy"}}, "with --load-format dummy nothing tells"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            {},
            "the model Qwen2ForCausalLM has sliding windows",
        ),
        ("StableLm", {}, {}, "no test covers the model StableLmForCausalLM"),
    ],
)
def test_refused_at_start(
    daemon: LocalDaemon,
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    made = make_model(tmp_path / "model", family, **config)
    with pytest.raises(Ended, match=re.escape(message)), Engine(made, **hicache(daemon, **options)):
        pass
