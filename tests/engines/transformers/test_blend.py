"""Chunks of documents in any order: what is exact is compared with a prefill, what is lossy has a control.

The models have large weights, so that attention decides what is said. `deaf` ones do not attend at all:
blending loses nothing there, so whatever differs is an error of the shift, the order or the mask.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvstore import Client, Namespace
from kvstore.client.presence_tables import HEARD_S
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import Blend, ChunkCache, Figures, PrefixCache
from kvstore_transformers.blend import chunk_store, recompute
from kvstore_transformers.blend.chunk_store import chunk_keys
from kvstore_transformers.blend.recompute import lossy_cache
from kvstore_transformers.blend.rotation import Rotation
from kvstore_transformers.blocks import Columns
from tests.daemon.hits import figures, since
from tests.daemons import eventually
from tests.engines.transformers.models import BLOCK, batch, generated, llama, tokens
from tests.engines.transformers.shapes import LLAMA3, MOE, SMALL, of, rope
from tests.processes import stop

YARN = rope("yarn", original_max_position_embeddings=64)

BLENDED: dict[str, Callable[[], Any]] = {
    "full attention": of("LlamaForCausalLM"),
    "GQA": of("LlamaForCausalLM", num_key_value_heads=2),
    "MQA": of("LlamaForCausalLM", num_key_value_heads=1),
    "eager attention": of("LlamaForCausalLM", attn_implementation="eager"),
    "linear rope": of("LlamaForCausalLM", **rope("linear")),
    "yarn": of("LlamaForCausalLM", **YARN),
    "llama3 rope": of("LlamaForCausalLM", **rope("llama3", **LLAMA3)),
    "biases": of("Qwen2ForCausalLM"),
    "normed queries and keys": of("Qwen3ForCausalLM"),
    "window switched off": of("MistralForCausalLM", sliding_window=None),
    "heads larger than their share": of("GemmaForCausalLM", {**SMALL, "head_dim": 32}),
    "partial rope, eager": of("GPTNeoXForCausalLM", attn_implementation="eager"),
    "partial rope": of("GPTNeoXForCausalLM"),
    "MoE": of("MixtralForCausalLM", **MOE, sliding_window=None),
    "MoE of Qwen3": of("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}

PREFIX = tokens(37, seed=1)
CHUNKS = [tokens(50, seed=2), tokens(32, seed=3), tokens(9, seed=4)]
QUESTION = tokens(11, seed=5)
BLOCKS = 4 + 2 + 1
"""Of CHUNKS: the first and the last have a block that is filled in part."""
PROMPT = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *CHUNKS[2], *QUESTION]

Make = Callable[..., ChunkCache]


@pytest.fixture
def chunked(client: Client, salt: bytes) -> Make:
    """Makes a ChunkCache for a model."""

    def make(model: Any, **options: Any) -> ChunkCache:
        return ChunkCache(model, client, **{"block_tokens": BLOCK, "salt": salt, **options})

    return make


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a daemon that is these tests' alone: chunks are found again by their models, without a salt."""
    with LocalDaemon({"dram": {"limit": "256MiB", "huge_pages": False}}) as served:
        yield served.url


def prompt_of(*texts: list[int]) -> list[int]:
    return [token for text in texts for token in text]


def first_logits(model: Any, blend: Blend) -> Any:
    """The logits of the first token of an answer."""
    options = {"max_new_tokens": 1, "do_sample": False}
    output = model.generate(**blend.inputs, **options, return_dict_in_generate=True, output_logits=True)
    return output.logits[0]


def prefilled(model: Any, prompt: list[int]) -> Any:
    """The same, computed at once without a store."""
    return generated(model, prompt, max_new_tokens=1).logits[0]


def away(one: Any, other: Any) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    return float((one - other).abs().max() / other.abs().max())


EXACT = 1e-4
"""The largest difference by rounding."""
WRONG = 0.02
"""The smallest difference by missing or wrong keys, with these weights."""


def deaf(model: Any) -> Any:
    """The model without the output of its attention."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "attention.dense.weight", "o_proj.bias", "attention.dense.bias")):
            torch.nn.init.zeros_(weight)
    return model


def held(past: DynamicCache) -> list[Any]:
    """Keys and values of all layers."""
    return [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]


# -- what is exact


@pytest.mark.parametrize("name", BLENDED)
def test_everything_recomputed_is_a_prefill(url: str, name: str) -> None:
    model = BLENDED[name]()
    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        assert cache.store(CHUNKS) == Figures(prompt_tokens=91, stored_blocks=BLOCKS)
        blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=1.0)
        assert (blend.loaded_tokens, blend.recomputed_tokens) == (0, 0)
        assert blend.tokens == blend.past_key_values.get_seq_length() == len(PROMPT) - 1
        assert blend.input_ids.tolist() == [PROMPT]
        assert away(first_logits(model, blend), prefilled(model, PROMPT)) < EXACT
        assert not cache.failures


@pytest.mark.parametrize("name", BLENDED)
def test_all_loaded_tokens_chosen_is_a_prefill_too(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is loaded, moved, found to deviate, and replaced: the path of shares below 1."""
    model = BLENDED[name]()
    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)
        blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0.999)
        assert (blend.loaded_tokens, blend.recomputed_tokens) == (91, 91)
        assert away(first_logits(model, blend), prefilled(model, PROMPT)) < EXACT


@pytest.mark.parametrize("name", BLENDED)
def test_moved_keys_are_those_of_a_prefill(url: str, name: str) -> None:
    """Without attention nothing is lost: every key and value is what the model computes at its place."""
    model = deaf(BLENDED[name]())
    expected = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPT[:-1]]), past_key_values=expected)
    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)
        blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0)
        assert blend.loaded_tokens == 91
        for ours, theirs in zip(held(blend.past_key_values), held(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_one_chunk_without_a_prefix_loses_nothing(chunked: Make) -> None:
    model = BLENDED["GQA"]()
    cache = chunked(model)
    cache.store(CHUNKS[:1])
    for share in (0, 0.15):
        blend = cache.blend(CHUNKS[:1], QUESTION, recompute=share)
        assert blend.loaded_tokens == 50
        assert away(first_logits(model, blend), prefilled(model, prompt_of(CHUNKS[0], QUESTION))) < EXACT


def test_chunks_that_are_not_stored_are_computed_in_their_place(chunked: Make) -> None:
    """The first is stored, and at position zero; the others see it and each other."""
    model = BLENDED["full attention"]()
    cache = chunked(model)
    cache.store(CHUNKS[:1])
    blend = cache.blend(CHUNKS, QUESTION)
    assert blend.loaded_tokens == 50
    assert away(first_logits(model, blend), prefilled(model, prompt_of(*CHUNKS, QUESTION))) < EXACT


def test_long_prompts_run_in_pieces(chunked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BLENDED["GQA"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    whole = first_logits(model, cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0.5))
    monkeypatch.setattr(recompute, "_PIECE_TOKENS", 7)
    monkeypatch.setattr(chunk_store, "_PIECE_BYTES", 1)
    cache.store([tokens(50, seed=9)])
    blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0.5)
    assert blend.loaded_tokens == 91
    assert away(first_logits(model, blend), whole) < EXACT


def test_16_bits(chunked: Make) -> None:
    model = of("LlamaForCausalLM", **YARN)().to(torch.bfloat16)
    cache = chunked(model)
    cache.store(CHUNKS)
    blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0.999)
    assert blend.recomputed_tokens == 91
    assert away(first_logits(model, blend).float(), prefilled(model, PROMPT).float()) < 0.1
    assert {tensor.dtype for tensor in held(blend.past_key_values)} == {torch.bfloat16}


def test_a_far_shift_of_keys_is_exact() -> None:
    """At these positions an angle has an error of several thousandths in float32."""
    for more in ({}, rope("linear"), YARN, rope("llama3", **LLAMA3)):
        model = of("LlamaForCausalLM", **more, max_position_embeddings=1 << 17)()
        at = torch.arange(16)

        def keys(positions: Any, model: Any = model) -> Any:
            past = DynamicCache(config=model.config)
            with torch.no_grad():
                model(torch.tensor([tokens(16)]), position_ids=positions[None], past_key_values=past)
            return past.layers[0].keys

        rotation, near, far = Rotation(model), keys(at), keys(at + 100_000)
        torch.testing.assert_close(rotation.move(near, at, at + 100_000), far, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rotation.move(far, at + 100_000, at), near, rtol=1e-5, atol=1e-5)
        assert torch.equal(rotation.move(near, at, at), near)


# -- what is lossy


@pytest.mark.parametrize(
    "name", ["GQA", "normed queries and keys", "heads larger than their share", "partial rope"]
)
def test_a_larger_share_is_closer_to_a_prefill(url: str, name: str) -> None:
    model = BLENDED[name]()
    expected = prefilled(model, PROMPT).softmax(-1)
    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)

        def lost(share: float) -> float:
            blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=share)
            assert blend.loaded_tokens == 91
            assert blend.recomputed_tokens == -int(-share * 91 // 1)
            return float(torch.nn.functional.kl_div(
                first_logits(model, blend).log_softmax(-1), expected, reduction="sum"
            ))  # fmt: skip

        reuse, half, whole = lost(0), lost(0.5), lost(0.999)
    assert whole < 1e-6 < half < reuse


def test_the_most_deviating_tokens_are_recomputed(chunked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the second chunk are damaged where nothing verifies them: those tokens are chosen."""
    model = BLENDED["full attention"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    real, chosen = recompute.compute, []
    monkeypatch.setattr(
        "kvstore_transformers.blend.chunks.compute",
        lambda *given: chosen.append(given[3].tolist()) or real(*given),
    )
    load = ChunkCache._load

    def damaged(self: ChunkCache, columns: Columns, start: int, chunks: Any) -> Any:
        loaded = load(self, columns, start, chunks)
        for tensor in columns._tensors:
            tensor[:, :, 60:64] += 100
        return loaded

    monkeypatch.setattr(ChunkCache, "_load", damaged)
    blend = cache.blend(CHUNKS, QUESTION, recompute=4 / 91)
    assert blend.recomputed_tokens == 4
    assert chosen == [[60, 61, 62, 63, *range(91, 101)]]


@pytest.mark.parametrize("name", BLENDED)
def test_zeros_in_place_of_stored_bytes_change_the_answer(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BLENDED[name]()
    real = Namespace.get

    def get(self: Namespace, keys: Any, out: Any, **options: Any) -> int:
        found = real(self, keys, out, **options)
        if self.layout.independent:
            out[:] = 0
        return found

    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)
        with_bytes = first_logits(model, cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0))
        monkeypatch.setattr(Namespace, "get", get)
        blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0)
        assert blend.loaded_tokens == 91
        assert away(first_logits(model, blend), with_bytes) > WRONG


@pytest.mark.parametrize("name", ["full attention", "partial rope", "yarn"])
def test_keys_that_are_not_moved_change_the_answer(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BLENDED[name]()
    with Client(url, deadline_s=10) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)
        moved = first_logits(model, cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0))
        monkeypatch.setattr(Rotation, "move", lambda self, keys, sources, targets: keys)
        still = first_logits(model, cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0))
    assert away(still, moved) > WRONG


# -- what is shared, and what is not


def test_chunks_are_found_in_any_order_and_with_others(chunked: Make) -> None:
    model = BLENDED["GQA"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    assert cache.store(CHUNKS[::-1]) == Figures(prompt_tokens=91, present_blocks=BLOCKS)
    for chunks, loaded in ((CHUNKS[::-1], 91), ([CHUNKS[1], tokens(20, seed=8), CHUNKS[1]], 64)):
        assert cache.blend(chunks, QUESTION).loaded_tokens == loaded
    # Its first three blocks are those of the first chunk, the rest is of another text.
    assert cache.blend([CHUNKS[0][:48] + tokens(9, seed=8)], QUESTION).loaded_tokens == 48
    assert cache.blend([CHUNKS[0][:40]], QUESTION).loaded_tokens == 32


def test_keys_are_digests_of_a_chunk_up_to_the_end_of_each_block() -> None:
    keys = {
        text: chunk_keys(list(text), 4, salt)
        for text in ((1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 1, 2), (5, 6, 7, 8, 1, 2))
        for salt in (b"",)
    }
    assert [len(each) for each in keys.values()] == [1, 1, 1, 2, 2]
    assert keys[1, 2, 3, 4, 1, 2][0] == keys[1, 2, 3, 4][0]
    assert len({key for each in keys.values() for key in each}) == 6
    assert chunk_keys([1, 2], 4, b"x") != keys[1, 2]


def test_exact_readers_do_not_see_chunks_nor_chunks_exact_blocks(
    chunked: Make, client: Client, salt: bytes
) -> None:
    model = BLENDED["full attention"]()
    cache, exact = chunked(model), PrefixCache(model, client, BLOCK, salt=salt)
    cache.store([CHUNKS[0]])
    assert cache._store._ns.layout.kv_layout.startswith("lossy")
    generated(exact, CHUNKS[0])
    assert (exact.last.restored_tokens, exact.last.present_blocks, exact.last.stored_blocks) == (0, 0, 3)
    generated(exact, tokens(64, seed=7))
    assert cache.blend([tokens(64, seed=7)], QUESTION).loaded_tokens == 0
    # What a prefix stores is exact, so a PrefixCache finds it, and the other way round.
    assert cache.blend(CHUNKS, QUESTION, tokens(64, seed=7)).restored_tokens == 48
    cache.blend(CHUNKS, QUESTION, tokens(64, seed=6))
    generated(exact, tokens(64, seed=6))
    assert exact.last.restored_tokens == 48
    # The chunk that follows a prefix is not a part of what is stored of it.
    generated(exact, tokens(64, seed=6) + CHUNKS[0])
    assert exact.last.restored_tokens == 64


def test_models_and_settings_share_no_chunks(chunked: Make) -> None:
    chunked(llama()).store(CHUNKS)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    others = {
        "weights": chunked(llama(seed=1)),
        "dtype": chunked(llama(torch.bfloat16)),
        "block_tokens": chunked(llama(), block_tokens=32),
        "salt": chunked(llama(), salt=b"other"),
        "revision": chunked(llama(), revision="2"),
        "attention": chunked(llama(attention="sdpa")),
        "rope": chunked(llama(rope_parameters=yarn)),
    }
    for what, cache in others.items():
        assert cache.blend(CHUNKS, QUESTION).loaded_tokens == 0, what
        assert cache.store(CHUNKS).stored_blocks > 0, what
    assert chunked(llama()).blend(CHUNKS, QUESTION).loaded_tokens == 91


def _elsewhere(url: str, salt: bytes) -> tuple[int, Any]:
    torch.set_num_threads(1)
    model = BLENDED["GQA"]()
    with Client(url, deadline_s=10.0) as client:
        blend = ChunkCache(model, client, BLOCK, salt=salt).blend(CHUNKS[::-1], QUESTION, PREFIX)
        return blend.loaded_tokens, first_logits(model, blend).numpy()


def test_another_process_blends_the_stored_chunks(chunked: Make, daemon: LocalDaemon, salt: bytes) -> None:
    model = BLENDED["GQA"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loaded, logits = pool.apply(_elsewhere, (daemon.url, salt))
    assert loaded == 91
    here = first_logits(model, cache.blend(CHUNKS[::-1], QUESTION, PREFIX))
    assert torch.equal(torch.from_numpy(logits), here)


def test_each_chunk_counts_as_a_prompt_for_the_hit_ratio(chunked: Make, client: Client) -> None:
    cache = chunked(BLENDED["GQA"]())
    cache.store(CHUNKS[:2])
    before = figures(client)
    cache.blend(CHUNKS, QUESTION)
    wanted = {"requested": BLOCKS, "found": 6, "delivered": 6, "missed": 1}
    assert eventually(lambda: since(before, figures(client)) == wanted), since(before, figures(client))


# -- generate


def test_generate_continues_from_a_blend(chunked: Make) -> None:
    model = BLENDED["full attention"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    blend = cache.blend(CHUNKS, QUESTION, PREFIX, recompute=0.999)
    answer = model.generate(**blend.inputs, max_new_tokens=8, do_sample=False)
    assert answer.tolist() == generated(model, PROMPT).sequences.tolist()
    assert blend.past_key_values.get_seq_length() == len(PROMPT) + 7


def test_tensors_and_single_tokens_are_texts_too(chunked: Make) -> None:
    model = BLENDED["full attention"]()
    cache = chunked(model)
    one = batch(CHUNKS[0])["input_ids"]
    assert cache.store([one, one[0]]) == Figures(prompt_tokens=100, stored_blocks=4, present_blocks=4)
    blend = cache.blend([one], [5], recompute=0)
    assert blend.tokens == blend.loaded_tokens == 50
    assert away(first_logits(model, blend), prefilled(model, [*CHUNKS[0], 5])) < EXACT
    cache.store([[7]])
    assert cache.blend([[7], [7]], [5]).loaded_tokens == 2


def test_a_model_of_one_layer_has_nothing_to_recompute(chunked: Make) -> None:
    model = of("LlamaForCausalLM", num_hidden_layers=1)()
    cache = chunked(model)
    cache.store(CHUNKS)
    blend = cache.blend(CHUNKS, QUESTION, PREFIX)
    assert (blend.loaded_tokens, blend.recomputed_tokens) == (91, 0)
    assert away(first_logits(model, blend), prefilled(model, PROMPT)) < EXACT


# -- a store that fails


def test_without_a_daemon_everything_is_computed() -> None:
    model = BLENDED["GQA"]()
    with Client("unix:///nowhere") as client:
        cache = ChunkCache(model, client, BLOCK)
        stored = cache.store(CHUNKS)
        assert (stored.stored_blocks, stored.denied_blocks) == (0, BLOCKS)
        assert stored.why
        blend = cache.blend(CHUNKS, QUESTION, PREFIX)
        assert (blend.loaded_tokens, blend.restored_tokens) == (0, 0)
        assert away(first_logits(model, blend), prefilled(model, PROMPT)) < EXACT
        assert not cache.failures


def test_a_strict_client_without_a_daemon_fails_no_call() -> None:
    model = BLENDED["GQA"]()
    with Client("unix:///nowhere", strict=True) as client:
        cache = ChunkCache(model, client, BLOCK)
        assert cache.store(CHUNKS).denied_blocks == BLOCKS
        blend = cache.blend(CHUNKS, QUESTION)
        assert away(first_logits(model, blend), prefilled(model, prompt_of(*CHUNKS, QUESTION))) < EXACT
        assert cache.failures == {"store": 1, "load": 3}


def test_no_chunk_is_computed_after_a_denial(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client("unix:///nowhere") as client:
        cache = ChunkCache(BLENDED["GQA"](), client, BLOCK)
        real, runs = cache._run, []
        monkeypatch.setattr(cache, "_run", lambda *given: runs.append(given) or real(*given))
        cache.store(CHUNKS)
        assert len(runs) == 1


def test_killed_and_started_again(own_daemon: LocalDaemon) -> None:
    model = BLENDED["GQA"]()
    with Client(own_daemon.url) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS)
        assert cache.blend(CHUNKS, QUESTION).loaded_tokens == 91
        own_daemon.kill()
        blend = cache.blend(CHUNKS, QUESTION)
        assert away(first_logits(model, blend), prefilled(model, prompt_of(*CHUNKS, QUESTION))) < EXACT
        own_daemon.start()
        eventually(lambda: cache.store(CHUNKS).stored_blocks == BLOCKS)
        assert cache.blend(CHUNKS, QUESTION).loaded_tokens == 91


def test_a_stopped_daemon_delays_a_blend_up_to_its_deadline(own_daemon: LocalDaemon) -> None:
    model = BLENDED["GQA"]()
    with Client(own_daemon.url, deadline_s=1.0) as client:
        cache = ChunkCache(model, client, BLOCK)
        cache.store(CHUNKS[:1])
        stop(own_daemon.pid)
        try:
            time.sleep(HEARD_S)  # until then its presence tables are believed
            started_s = time.monotonic()
            blend = cache.blend([tokens(50, seed=seed) for seed in range(20, 26)], QUESTION)
            took_s = time.monotonic() - started_s
        finally:
            own_daemon.kill()
        assert blend.loaded_tokens == 0
        assert 0.9 < took_s < 2.5


@pytest.mark.parametrize("altered", [0, 3])
def test_a_damaged_block_is_computed_and_stored_again(chunked: Make, salt: bytes, altered: int) -> None:
    """The first chunk's blocks are put under another salt by hand, so that their mapping can be written."""
    model = BLENDED["GQA"]()
    source, cache = chunked(model), chunked(model, salt=salt + b"x")
    source.store(CHUNKS)
    cache.store(CHUNKS[1:])
    ns, keys = source._store._ns, chunk_keys(CHUNKS[0], BLOCK, salt)
    blocks = np.empty((4, ns.layout.block_bytes), np.uint8)
    assert ns.get(keys, blocks) == 4
    with ns.reserve(chunk_keys(CHUNKS[0], BLOCK, salt + b"x")) as room:
        views = room.blocks
        for view, block in zip(views, blocks, strict=True):
            view[:] = block.tobytes()
        room.commit()
        views[altered][1234] ^= 1
    whole = first_logits(model, source.blend(CHUNKS, QUESTION, recompute=0))
    blend = cache.blend(CHUNKS, QUESTION, recompute=0)
    assert blend.loaded_tokens == 41 + altered * BLOCK
    # The chunk is the first of the prompt: what is computed is what was stored.
    assert away(first_logits(model, blend), whole) < EXACT
    assert cache.store(CHUNKS).stored_blocks == 1
    assert cache.blend(CHUNKS, QUESTION).loaded_tokens == 91


def test_a_failed_load_is_a_miss(chunked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BLENDED["GQA"]()
    cache = chunked(model)
    cache.store(CHUNKS)
    real, calls = Columns.fill, []

    def half_then_fail(self: Columns, *given: Any) -> None:
        calls.append(real(self, *given))
        if len(calls) == 1:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Columns, "fill", half_then_fail)
    blend = cache.blend(CHUNKS[:2], QUESTION, recompute=0.999)
    assert blend.loaded_tokens == 32
    assert cache.failures == {"load": 1}
    assert away(first_logits(model, blend), prefilled(model, prompt_of(*CHUNKS[:2], QUESTION))) < EXACT


def test_a_run_that_fails_leaves_the_cache_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BLENDED["GQA"]()
    with Client("unix:///nowhere") as client:
        shape = ChunkCache(model, client, BLOCK)._shape
    past = lossy_cache(Columns(shape, 1, 8), model.config)
    monkeypatch.setattr(model, "forward", lambda **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recompute.compute(model, past, torch.tensor(tokens(8)), torch.arange(8))
    assert [layer.place for layer in past.layers] == [None] * 4
