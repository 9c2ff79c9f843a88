"""Which prompts, models, settings and tenants share blocks, and which do not."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp import KVStoreCache
from tests.engines.gguf_models import BLOCK, tokens, write_model
from tests.engines.llamacpp.models import Q8_0, answer, loaded, same, split_answer
from tests.engines.stores import SETTINGS

Make = Callable[..., Llama]
PROMPT = tokens(5 * BLOCK + 3)


def test_a_shared_prompt_is_stored_once(plain: Make, own_daemon: LocalDaemon) -> None:
    system, conversations = tokens(10 * BLOCK), range(10)
    with Client(own_daemon.url, deadline_s=10.0) as client:
        llm = plain()
        cache = KVStoreCache(llm, client, BLOCK, revision="test")
        llm.set_cache(cache)
        for number in conversations:
            # 32 tokens of its own, and 16 of the 17 that are sampled.
            answer(llm, system + tokens(2 * BLOCK, seed=number + 1), 17)
            assert cache.last.stored_blocks == (3 if number else 13)
            assert cache.last.present_blocks == (10 if number else 0)
        status = client.status()
    assert (status["namespaces"], status["blocks"]) == (1, 10 + 10 * 3)
    assert status["tenants"][0]["tiers"][0]["used_bytes"] == 40 * cache._ns.layout.block_bytes
    assert not cache.failures


def test_turns_of_a_conversation_store_what_is_new(cached: Make) -> None:
    llm, prompt = cached(), PROMPT
    for turn in range(4):
        answer(llm, prompt, 20)
        assert llm.cache.last.present_blocks == (0 if turn == 0 else llm.cache.last.held_tokens // BLOCK)
        prompt = llm._input_ids.tolist() + tokens(30, seed=turn)
    other = cached()
    answer(other, prompt)
    assert other.cache.last.restored_tokens == (len(prompt) - 30) // BLOCK * BLOCK


OTHERS: dict[str, dict[str, Any]] = {
    "type of keys": {"type_k": Q8_0},
    "flash attention": {"flash_attn": True},
    "rope base": {"rope_freq_base": 20000.0},
    "rope scale": {"rope_freq_scale": 0.5},
    "rope scaling": {"rope_scaling_type": 2, "yarn_orig_ctx": 256},
    "yarn": {"yarn_ext_factor": 0.5},
    "context of the training": {"n_ctx": 2100},
    "kernels": {"n_gpu_layers": 1},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_settings_share_nothing(cached: Make, plain: Make, other: str) -> None:
    answer(cached(), PROMPT)
    for _ in range(2):
        llm = cached(**OTHERS[other])
        same_answer = same(answer(llm, PROMPT), split_answer(plain(**OTHERS[other]), PROMPT, restored(llm)))
        assert same_answer
    assert restored(llm) == 80
    assert PROMPT in cached().cache


def restored(llm: Llama) -> int:
    return int(llm.cache.last.restored_tokens)


def test_long_contexts_share_nothing_with_short_ones_where_frequencies_change(cached: Make) -> None:
    """The file of phi3 has frequencies for contexts of up to 384 tokens, and for longer ones."""
    for n_ctx, expected in ((256, 0), (512, 0), (320, 80), (1024, 80)):
        llm = cached("phi3", n_ctx=n_ctx)
        answer(llm, PROMPT)
        assert restored(llm) == expected


@pytest.mark.parametrize("setting", [{"n_ctx": 256}, {"n_batch": 64}, {"n_threads": 2}, {"use_mmap": False}])
def test_these_settings_share(cached: Make, setting: dict[str, Any]) -> None:
    answer(cached(), PROMPT)
    llm = cached(**setting)
    answer(llm, PROMPT)
    assert restored(llm) == 80


def test_salts_block_sizes_and_revisions_share_nothing(plain: Make, client: Client, salt: bytes) -> None:
    def after(**options: Any) -> int:
        llm = plain()
        llm.set_cache(KVStoreCache(llm, client, **{"block_tokens": BLOCK, "salt": salt, **options}))
        answer(llm, PROMPT)
        return restored(llm)

    assert after(revision="a") == 0
    assert after(revision="a") == 80
    assert after(revision="b") == 0
    assert after(revision="a", salt=salt + b"x") == 0
    assert after(revision="a", block_tokens=32) == 0
    assert after(revision="a", block_tokens=32) == 64


def test_tokens_of_blocks_are_told_unless_a_salt_hides_them(
    plain: Make, client: Client, salt: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, expected in ((salt, None), (b"", PROMPT[: 5 * BLOCK])):
        llm = plain()
        cache = KVStoreCache(llm, client, BLOCK, revision=salt.hex(), salt=given)
        real, told = cache._ns.put, []
        monkeypatch.setattr(cache._ns, "put", lambda *a, put=real, to=told: to.append(a[4]) or put(*a))
        llm.set_cache(cache)
        answer(llm, PROMPT, 1)
        assert (cache.last.stored_blocks, told) == (5, [expected])


@pytest.mark.parametrize("variable", ["LLAMA_ATTN_ROT_DISABLE", "LLAMA_CPP_LIB_PATH"])
def test_variables_that_change_kv_are_another_namespace(
    cached: Make, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Quantised KV is rotated, or another llama.cpp is loaded."""
    answer(cached(type_k=Q8_0), PROMPT)
    monkeypatch.setenv(variable, "1")
    llm = cached(type_k=Q8_0)
    answer(llm, PROMPT)
    assert restored(llm) == 0


def _restored(url: str, model: str) -> tuple[int, str]:
    """Tokens that a process restores whose weights are named by the file's content, and its answer."""
    with Client(url, deadline_s=10.0) as client:
        llm = loaded(Path(model))
        llm.set_cache(KVStoreCache(llm, client, BLOCK))
        text, _ = answer(llm, PROMPT)
        return restored(llm), text


def test_a_file_that_was_replaced_is_another_model(daemon: LocalDaemon, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    path = tmp_path / "model.gguf"
    seen = []
    for seed in (1, 1, 2, 2, 1):
        path.unlink(missing_ok=True)
        write_model(path, seed=seed)
        with spawn.Pool(1) as pool:
            seen.append(pool.apply(_restored, (daemon.url, str(path))))
    assert [n for n, _ in seen] == [0, 80, 0, 80, 80]
    one, again, two, _, last = (text for _, text in seen)
    assert (one == again == last, one == two) == (True, False)


TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue"))}


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalDaemon]:
    tenants = {
        name: {"tokens": [{"hash": f"sha256:{hash_of(token).hex()}"}], "dram": {"limit": "64MiB"}}
        for name, token in TOKENS.items()
    }
    with LocalDaemon({**SETTINGS, "tenants": tenants}) as served:
        yield served


def test_tenants_share_nothing(plain: Make, shared: LocalDaemon) -> None:
    expected = {n: split_answer(plain(), PROMPT, n) for n in (0, 80)}
    for name in ("red", "blue"):
        for n in (0, 80):
            with Client(shared.url, token=TOKENS[name], deadline_s=10.0) as client:
                llm = plain()
                llm.set_cache(KVStoreCache(llm, client, BLOCK, revision="test"))
                assert same(answer(llm, PROMPT), expected[n])
                assert restored(llm) == n


def test_a_wrong_token_costs_only_hits(plain: Make, shared: LocalDaemon) -> None:
    with Client(shared.url, token=new_token(b"x" * 32), deadline_s=10.0) as client:
        llm = plain()
        llm.set_cache(KVStoreCache(llm, client, BLOCK, revision="test"))
        assert same(answer(llm, PROMPT), split_answer(plain(), PROMPT, 0))
        assert (restored(llm), llm.cache.last.denied_blocks) == (0, 5)
        assert llm.cache.last.why
