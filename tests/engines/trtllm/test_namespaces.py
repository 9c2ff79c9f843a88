"""What shares blocks and what does not: salts, tenants, weights, options, requests that are not served."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import ConfigError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.stores import SETTINGS
from tests.engines.trtllm.conftest import Make, answers, prompt, write_model

PROMPT = prompt(100, 43)
Options = Callable[..., None]


def test_salts_share_nothing(engine: Make) -> None:
    first, second = engine(), engine()
    red: dict[str, Any] = {"cache_salt": "red", "cache_salt_id": 7}
    expected = answers(first.run(PROMPT, **red))
    first.settle()
    saves = [save for step in first.steps for save in step.saves]
    assert saves
    assert all(save.tokens is None for save in saves), "tokens do not identify the blocks to routers"
    for other in (
        {},
        {"cache_salt": "blue", "cache_salt_id": 8},
        {"cache_salt_id": 70},
        {"cache_salt": "re"},
    ):
        [request] = second.run(PROMPT, **other)
        second.forget_pages()
        assert (request.matched, [request.answer]) == (0, expected)
    [request] = engine().run(PROMPT, **red)
    assert (request.matched, [request.answer]) == (40, expected)


def test_a_salt_that_the_question_did_not_have_is_not_stored(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM tells a salt twice: with the question, and with the step."""
    first, second = engine(), engine()
    monkeypatch.setattr("kvstore_trtllm.scheduler._SALTS", ("cache_salt_id",))
    first.run(PROMPT, cache_salt="red")
    first.settle()
    [request] = second.run(PROMPT)
    assert request.matched == 0


def test_requests_that_cannot_tell_their_salt_are_misses(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    monkeypatch.setattr("kvstore_trtllm.scheduler._SALTS", ("salt_of_another_release",))
    first.run(PROMPT)
    first.settle()
    assert first.scheduler.failures["get_num_new_matched_tokens"] == 1
    monkeypatch.undo()
    [request] = second.run(PROMPT)
    assert request.matched == 0


@pytest.mark.parametrize(
    "what",
    [
        {"lora_task_id": 1}, {"multimodal_hashes": [[1] * 8]}, {"multimodal_positions": [3]},
        {"multimodal_embedding": object()}, {"prompt_embedding_table": object()},
        {"mrope_rotary_cos_sin": object()}, {"mrope_position_deltas": 1}, {"position_ids": [1]},
    ],
    ids=lambda what: next(iter(what)),
)  # fmt: skip
def test_requests_whose_kv_depends_on_more_than_tokens(engine: Make, what: dict[str, Any]) -> None:
    first, second = engine(), engine()
    first.run(PROMPT, **what)
    first.settle()
    [request] = second.run(PROMPT)
    assert request.matched == 0, "nothing was stored"
    second.settle()
    [request] = engine().run(PROMPT, **what)
    assert request.matched == 0, "nothing is loaded"


def test_tenants_share_nothing(engine: Make, options: Options) -> None:
    tokens = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue"))}
    tenants = {
        name: {"tokens": [{"hash": f"sha256:{hash_of(token).hex()}"}], "dram": {"limit": "32MiB"}}
        for name, token in tokens.items()
    }
    with LocalDaemon({**SETTINGS, "tenants": tenants}) as daemon:
        made = {}
        for name, token in {**tokens, "stranger": new_token(b"x" * 32)}.items():
            options(url=daemon.url, token=token)
            made[name] = engine(kept=False)
        expected = answers(made["red"].run(PROMPT))
        made["red"].settle()
        for name, matched in (("blue", 0), ("stranger", 0), ("red", 40)):
            [request] = made[name].run(PROMPT)
            made[name].settle()
            assert (request.matched, [request.answer]) == (matched, expected), name


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seq_len": 4096}, {"dtype": "float16"}, {"moe_config": "backend='TRTLLM'"},
        {"env_overrides": {"TRTLLM_ENABLE_PDL": "1"}}, {"kv_cache_config__tokens_per_block": 8},
        {"torch_compile_config": "on"}, {"allreduce_strategy": "NCCL"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_engines_with_other_options_share_nothing(engine: Make, changes: dict[str, Any]) -> None:
    first, second = engine(), engine(changes=changes)
    first.run(PROMPT)
    first.settle()
    [request] = second.run(PROMPT)
    assert request.matched == 0


@pytest.mark.parametrize("given", [{"weights_revision": "other"}, {"model": "other"}])
def test_other_weights_share_nothing(engine: Make, options: Options, given: dict[str, str]) -> None:
    first = engine()
    first.run(PROMPT)
    first.settle()
    options(**given)
    [request] = engine(seed=1).run(PROMPT)
    assert request.matched == 0


# -- weights that are named by their files


def test_copies_of_a_model_share_blocks_and_other_weights_do_not(
    engine: Make, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.weights.naming.process_started_ns", lambda: sys.maxsize)
    options(weights_revision=None, model=None)
    content = tmp_path.name.encode()
    one = write_model(tmp_path / "one", content)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    other = write_model(tmp_path / "other", content + b"!")
    first = engine(one)
    assert eventually(first.scheduler._naming.known).startswith("blake3:")
    first.run(PROMPT)
    first.settle()
    for folder, matched in ((copy, 40), (other, 0)):
        second = engine(folder)
        assert eventually(second.scheduler._naming.known)
        [request] = second.run(PROMPT)
        assert request.matched == matched


def test_until_the_weights_have_a_name_nothing_is_loaded_or_stored(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    with monkeypatch.context() as patch:
        patch.setattr(first.scheduler._naming, "known", lambda: "")
        expected = answers(first.run(PROMPT))
        first.settle()
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (0, expected)


def test_files_that_are_newer_than_the_process_are_refused(
    engine: Make, options: Options, model: Path
) -> None:
    options(weights_revision=None)
    with pytest.raises(ConfigError, match=r"was changed after the engine started: .*set weights_revision"):
        engine(model)


def test_weights_that_cannot_be_read_end_no_request(
    engine: Make, options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(*_: Any, **__: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("kvstore.weights.naming.process_started_ns", lambda: sys.maxsize)
    monkeypatch.setattr("kvstore.weights.naming.files_digest", unreadable)
    options(weights_revision=None)
    executor = engine()
    assert executor.run(PROMPT)[0].matched == 0
    assert "nothing is loaded or stored: no such device" in caplog.text


def test_the_namespace_is_readable(engine: Make) -> None:
    """`kvstore ns list` shows what tells engines apart."""
    executor = engine()
    executor.run(PROMPT)
    layout = executor.scheduler._namespaces[0].layout
    assert layout.block_tokens == 4
    assert layout.dtype == "bfloat16"
    assert layout.shard == "tp 0/1"
    assert layout.kv_layout.startswith("trtllm 1.4.0rc4; ")
    assert "2 layers, 2 heads of 8; CPU" in layout.kv_layout
