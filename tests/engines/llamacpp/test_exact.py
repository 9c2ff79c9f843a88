"""What a hit gives, compared bit for bit with a Llama without a store.

A run without a store computes a prompt in batches from its start, a hit from the end of its prefix, and
kernels may round a row differently in a batch of another size. So the measure is the same model that has
evaluated the prefix, then the rest, in a context of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp import Figures, KVStoreCache, blocks
from tests.engines.gguf_models import BLOCK, MODELS, WINDOW, tokens
from tests.engines.llamacpp.models import KINDS, answer, loaded, same, split_answer

Make = Callable[..., Llama]
PROMPT = tokens(8 * BLOCK + 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_boundary(cached: Make, plain: Make, name: str, kind: str) -> None:
    """Windows end within the prefix, and before it."""
    assert len(PROMPT) > 2 * WINDOW
    reference = plain(name, **KINDS[kind])
    first = cached(name, **KINDS[kind])
    answer(first, PROMPT)
    assert first.cache.last.denied_blocks == 0
    for n in (1, 3, 8):
        llm = cached(name, **KINDS[kind])
        prompt = PROMPT[: n * BLOCK] + tokens(BLOCK, seed=n)
        given = answer(llm, prompt)
        assert llm.cache.last.restored_tokens == n * BLOCK, llm.cache.last
        assert same(given, split_answer(reference, prompt, n * BLOCK, PROMPT))


def test_no_prefix_the_whole_and_a_part(cached: Make, plain: Make) -> None:
    reference, llm = plain(), cached()
    assert same(answer(llm, PROMPT), split_answer(reference, PROMPT, 0))
    # 12 tokens were sampled, and the last of them was no input: 131 + 11 tokens.
    assert llm.cache.last == Figures(prompt_tokens=131, stored_blocks=8)
    assert llm.cache.cache_size == 8 * llm.cache._ns.layout.block_bytes
    assert PROMPT in llm.cache
    assert tokens(40, seed=5) not in llm.cache

    # The context holds all but the last token, which is evaluated again.
    assert same(answer(llm, PROMPT), split_answer(reference, PROMPT, 130))
    assert llm.cache.last == Figures(prompt_tokens=131, held_tokens=131, present_blocks=8)

    other = cached()
    assert same(answer(other, PROMPT), split_answer(reference, PROMPT, 128))
    assert other.cache.last == Figures(prompt_tokens=131, restored_tokens=128, present_blocks=8)


def test_a_prompt_that_is_stored_whole_has_its_last_token_evaluated_again(cached: Make, plain: Make) -> None:
    prompt = PROMPT[: 4 * BLOCK]
    answer(cached(), PROMPT)
    llm = cached()
    assert same(answer(llm, prompt), split_answer(plain(), prompt, 4 * BLOCK - 1, PROMPT))
    assert llm.cache.last.restored_tokens == 4 * BLOCK


def test_a_stored_prefix_replaces_a_shorter_one_in_the_context(cached: Make, plain: Make) -> None:
    answer(cached(), PROMPT)
    llm = cached()
    answer(llm, PROMPT[:20] + tokens(30, seed=2))
    assert same(answer(llm, PROMPT), split_answer(plain(), PROMPT, 128))
    assert llm.cache.last.restored_tokens == 128


def test_a_prompt_shorter_than_a_block(cached: Make, plain: Make) -> None:
    llm, prompt = cached(), tokens(5)
    assert same(answer(llm, prompt, 4), split_answer(plain(), prompt, 0, n=4))
    assert llm.cache.last == Figures(prompt_tokens=5)
    assert not llm.cache.failures


def test_what_the_context_holds_is_not_fetched(
    cached: Make, plain: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = cached()
    answer(llm, PROMPT)
    monkeypatch.setattr(llm.cache._ns, "get", lambda *_, **__: pytest.fail("fetched"))
    assert same(answer(llm, PROMPT), split_answer(plain(), PROMPT, 130))
    assert not llm.cache.failures


def test_the_next_turn_finds_the_answer_too(cached: Make, plain: Make) -> None:
    """The measure is the chat that kept its context between turns."""
    llm = cached()
    first = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
    said = llm._input_ids.tolist()
    assert len(said) == 131 + 39
    reference = plain()
    assert reference.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"] == first
    prompt = said[: 10 * BLOCK] + tokens(10, seed=1)
    other = cached()
    assert same(answer(other, prompt), answer(reference, prompt))
    assert other.cache.last.restored_tokens == 10 * BLOCK


def test_sampling_and_streams(cached: Make, plain: Make) -> None:
    answer(cached(), PROMPT)
    reference, llm = plain(), cached()
    options = {"max_tokens": 20, "temperature": 1.5, "top_k": 50, "seed": 3}
    reference.create_completion(PROMPT, **options)
    assert list(llm.create_completion(PROMPT, stream=True, **options))
    assert llm._input_ids.tolist() == reference._input_ids.tolist()
    assert llm.cache.last.restored_tokens == 128


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_process_restores_the_stored_blocks(
    daemon: LocalDaemon, models: dict[str, Path], plain: Make, name: str
) -> None:
    """Both name the weights by the content of the file, which is older than they are."""
    context = multiprocessing.get_context("spawn")
    seen = []
    for _ in range(2):
        with context.Pool(1) as pool:
            seen.append(pool.apply(_restored_and_answer, (daemon.url, models[name])))
    assert [restored for restored, _, _ in seen] == [0, 128]
    assert same(seen[1][1:], split_answer(plain(name), PROMPT, 128))


def _restored_and_answer(url: str, model: Path) -> tuple[int, str, list[Any]]:
    with Client(url, deadline_s=10.0) as client:
        llm = loaded(model)
        llm.set_cache(KVStoreCache(llm, client, BLOCK))
        text, logits = answer(llm, PROMPT)
        return llm.cache.last.restored_tokens, text, logits


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_zeroed_blocks_give_another_answer(
    cached: Make, plain: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the comparison of these tests sees wrong KV."""
    answer(cached(name), PROMPT)
    llm = cached(name)
    real = llm.cache._ns.get

    def zeroed(keys: Any, out: Any, **options: Any) -> int:
        n = real(keys, out, **options)
        out[:] = 0
        return int(n)

    monkeypatch.setattr(llm.cache._ns, "get", zeroed)
    assert not same(answer(llm, PROMPT), split_answer(plain(name), PROMPT, 128))
    assert llm.cache.last.restored_tokens == 128


def test_blocks_that_take_many_pieces(cached: Make, plain: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_PIECE_BYTES", 1)
    answer(cached(), PROMPT)
    llm = cached()
    assert same(answer(llm, PROMPT), split_answer(plain(), PROMPT, 128))
    assert llm.cache.last == Figures(prompt_tokens=131, restored_tokens=128, present_blocks=8)


def test_a_block_evicted_after_its_lookup_ends_the_prefix(
    cached: Make, plain: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(cached(), PROMPT)
    llm = cached()
    real = llm.cache._ns.get
    monkeypatch.setattr(llm.cache._ns, "get", lambda keys, out, **more: min(3, real(keys, out, **more)))
    assert same(answer(llm, PROMPT), split_answer(plain(), PROMPT, 3 * BLOCK))
    assert llm.cache.last.restored_tokens == 3 * BLOCK


def test_a_prompt_longer_than_the_context_is_refused_by_llama(cached: Make) -> None:
    longer = tokens(300)
    answer(cached(), longer)
    for n_ctx, places in ((256, 256), (100, 96)):
        llm = cached(n_ctx=n_ctx)
        with pytest.raises(ValueError, match="exceed context window"):
            answer(llm, longer)
        # A caller that asks the cache itself gets what fits.
        assert llm.cache[longer].n_tokens == places
        assert llm._input_ids.tolist() == longer[:places]
        assert not llm.cache.failures


def test_a_cache_of_another_llama_loads_nothing(cached: Make) -> None:
    owner, other = cached(), cached()
    answer(owner, PROMPT)
    owner.reset()
    state = owner.cache[PROMPT]
    assert isinstance(state.input_ids, np.ndarray)
    with pytest.raises(MisuseError, match="make a KVStoreCache for each Llama"):
        other.load_state(state)
    assert other.n_tokens == 0


def test_a_state_of_another_llama_is_not_stored(cached: Make) -> None:
    owner, other = cached(), cached()
    owner.eval(tokens(len(PROMPT), seed=1))
    other.eval(PROMPT)
    owner.cache[PROMPT] = other.save_state()
    assert owner.cache.failures == {"store": 1}
    assert PROMPT not in owner.cache
