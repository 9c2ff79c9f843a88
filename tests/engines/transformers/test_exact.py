"""What a hit gives, compared bit for bit with the same model without a store.

A run without a store computes a prompt at once, a hit computes only its end, and kernels may round a row
differently in a shorter matrix. With torch 2.13 on a CPU with AVX-512, one thread and these models, a hit
that restores whole groups of 16 columns and leaves 16 or more has the bits of the run without a store
- with eager attention for all prompts of 48 to 117 tokens,
- with sdpa for those whose length is not 1, 2 or 3 more than a multiple of 16: its kernel takes queries in
  blocks of 32, and rounds the last 1 to 3 rows of a block differently.
Prompts of 200 tokens and more meet other kernels at some splits. There, and for keys and values that decoding
made, the measure is the same model that splits the prompt at the same column with a DynamicCache of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore import Client, chain_keys
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import Figures, PrefixCache, prefix
from tests.engines.transformers.models import (
    BLOCK,
    KINDS,
    batch,
    generated,
    llama,
    own_step,
    same_bits,
    tokens,
)

Make = Callable[..., PrefixCache]


def after(model: Any, *prompts: list[int], columns: int, past: DynamicCache, **options: Any) -> Any:
    """What the model generates when it goes on behind the first columns of a cache."""
    past.crop(columns - past.get_seq_length())
    return generated(model, *prompts, past_key_values=past, **options)


@pytest.mark.parametrize(("dtype", "attention", "kv_heads"), KINDS)
def test_no_prefix_the_whole_and_a_part(cached: Make, dtype: Any, attention: str, kv_heads: int) -> None:
    model = llama(dtype, attention, kv_heads)
    cache = cached(model)
    first = tokens(104)

    assert same_bits(generated(cache, first), generated(model, first))
    assert cache.last == Figures(prompt_tokens=104, stored_blocks=6)

    # 96 tokens are stored; the last group of the 104 is computed, and what the group before it lacks.
    assert same_bits(generated(cache, first), generated(model, first))
    assert cache.last == Figures(prompt_tokens=104, restored_tokens=80, present_blocks=6)

    longer = first + tokens(8, seed=1)
    assert same_bits(generated(cache, longer), generated(model, longer))
    assert cache.last == Figures(prompt_tokens=112, restored_tokens=96, stored_blocks=1, present_blocks=6)

    forked = first[: 3 * BLOCK] + tokens(52, seed=2)
    assert same_bits(generated(cache, forked), generated(model, forked))
    assert cache.last == Figures(prompt_tokens=100, restored_tokens=48, stored_blocks=3, present_blocks=3)

    other = tokens(104, seed=3)
    assert same_bits(generated(cache, other), generated(model, other))
    assert cache.last == Figures(prompt_tokens=104, stored_blocks=6)


@pytest.mark.parametrize(("dtype", "attention", "kv_heads"), KINDS)
@pytest.mark.parametrize("length", [97, 98, 99, 200, 257])
def test_other_lengths_equal_the_same_split(
    cached: Make, dtype: Any, attention: str, kv_heads: int, length: int
) -> None:
    """These lengths are where the bits of a run that computes the whole prompt at once may be others."""
    model = llama(dtype, attention, kv_heads)
    cache = cached(model)
    prompt = tokens(length)
    first = generated(cache, prompt)
    hit = generated(cache, prompt)
    columns = cache.last.restored_tokens
    assert columns == (length - BLOCK) // BLOCK * BLOCK
    assert same_bits(hit, after(model, prompt, columns=columns, past=first.past_key_values))


@pytest.mark.parametrize(("dtype", "attention", "kv_heads"), KINDS)
def test_the_next_turn_finds_the_answer_too(cached: Make, dtype: Any, attention: str, kv_heads: int) -> None:
    """Decoding computes rows one by one, so the measure is the chat that kept its cache between turns."""
    model = llama(dtype, attention, kv_heads)
    cache = cached(model)
    turn = generated(cache, tokens(40), max_new_tokens=60)
    # The last token was never an input, so it has no keys and values: 99 tokens, 6 blocks.
    assert cache.last.stored_blocks == 6
    prompt = turn.sequences[0].tolist() + tokens(20, seed=1)
    answer = generated(cache, prompt)
    assert cache.last.restored_tokens == 96
    assert same_bits(answer, after(model, prompt, columns=96, past=turn.past_key_values))


@pytest.mark.parametrize(("dtype", "attention", "kv_heads"), KINDS)
def test_rows_of_a_batch_have_their_own_padding_and_hits(
    cached: Make, dtype: Any, attention: str, kv_heads: int
) -> None:
    model = llama(dtype, attention, kv_heads)
    cache = cached(model)
    prompts = [tokens(104, seed=1), tokens(95, seed=2), tokens(84, seed=3)]
    generated(cache, prompts[0])
    generated(cache, prompts[1][:72], max_new_tokens=1)
    generated(cache, prompts[2])

    assert same_bits(generated(cache, *prompts), generated(model, *prompts))
    # Row 1 has 9 columns of padding and 64 stored tokens: 64 columns in whole groups.
    assert cache.last.prompt_tokens == 104 + 95 + 84
    assert cache.last.restored_tokens == 64 + 55 + 44
    assert (cache.last.present_blocks, cache.last.stored_blocks) == (6 + 4 + 5, 2)

    with_new = [prompts[0], prompts[1], tokens(84, seed=4)]
    assert same_bits(generated(cache, *with_new), generated(model, *with_new))
    # The new row starts at column 20: one group in front of it is padding there, and stored elsewhere.
    assert cache.last.restored_tokens == 16 + 7 + 0
    assert cache.last.stored_blocks == 5

    for prompt in (prompts[1], with_new[2]):
        assert same_bits(generated(cache, prompt), generated(model, prompt))
        assert cache.last.restored_tokens == (len(prompt) - BLOCK) // BLOCK * BLOCK


def test_padded_rows_are_stored_at_their_own_positions(cached: Make) -> None:
    model = llama()
    cache = cached(model)
    short, long = tokens(80, seed=1), tokens(93, seed=2)
    generated(cache, short, long)
    assert cache.last.stored_blocks == 5 + 6
    assert same_bits(generated(cache, short), generated(model, short))
    assert cache.last.restored_tokens == 64


def _in_another_process(url: str, salt: bytes) -> tuple[int, list[int], list[Any]]:
    """Tokens restored there, the sequence, and the logits as arrays."""
    torch.set_num_threads(1)
    with Client(url, deadline_s=10.0) as client:
        cache = PrefixCache(llama(), client, BLOCK, salt=salt)
        output = generated(cache, tokens(104))
        return (
            cache.last.restored_tokens,
            output.sequences[0].tolist(),
            [logits.numpy() for logits in output.logits],
        )


def test_another_process_restores_the_stored_blocks(cached: Make, daemon: LocalDaemon, salt: bytes) -> None:
    model = llama()
    generated(cached(model), tokens(104))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        restored, sequence, logits = pool.apply(_in_another_process, (daemon.url, salt))
    alone = generated(model, tokens(104))
    assert restored == 80
    assert sequence == alone.sequences[0].tolist()
    assert all(
        torch.equal(torch.from_numpy(there), here) for there, here in zip(logits, alone.logits, strict=True)
    )


def test_blocks_that_take_many_pieces(cached: Make, monkeypatch: pytest.MonkeyPatch, salt: bytes) -> None:
    monkeypatch.setattr(prefix, "_PIECE_BYTES", 1)
    model = llama()
    cache = cached(model)
    real, puts = cache._ns.put, []

    def put(keys: Any, blocks: Any, parent: Any, *more: Any) -> Any:
        puts.append((parent, *keys))
        return real(keys, blocks, parent, *more)

    monkeypatch.setattr(cache._ns, "put", put)
    generated(cache, tokens(104))
    assert cache.last.stored_blocks == 6
    keys = chain_keys(tokens(104), BLOCK, salt)
    assert puts == list(itertools.pairwise([None, *keys]))
    assert same_bits(generated(cache, tokens(104)), generated(model, tokens(104)))
    assert cache.last.restored_tokens == 80


def test_blocks_that_are_larger_than_a_group_are_restored_in_part(cached: Make) -> None:
    model = llama()
    cache = cached(model, block_tokens=64)
    generated(cache, tokens(104))
    assert cache.last.stored_blocks == 1
    shorter = tokens(104)[:68]
    assert same_bits(generated(cache, shorter), generated(model, shorter))
    assert cache.last.restored_tokens == 48


def test_options_of_generate_pass_through(cached: Make) -> None:
    model = llama()
    cache = cached(model)
    ids = batch(tokens(104))["input_ids"]
    generated(cache, tokens(104))
    for options in ({"do_sample": True, "temperature": 2.0}, {"prefill_chunk_size": 5}, {"num_beams": 1}):
        torch.manual_seed(5)
        expected = model.generate(ids, max_new_tokens=20, **options)
        torch.manual_seed(5)
        assert torch.equal(cache.generate(ids, max_new_tokens=20, **options), expected), options
        assert cache.last.restored_tokens == 80


def test_a_custom_decoding_loop(cached: Make) -> None:
    model = llama()
    cache = cached(model)
    prompts = tokens(60, seed=1), tokens(52, seed=2)
    inputs = batch(*prompts)
    _, first = own_step(cache, model, inputs)
    assert cache.last == Figures(prompt_tokens=112, stored_blocks=3 + 3)
    assert torch.equal(own_step(cache, model, inputs)[1], first)
    assert cache.last == Figures(prompt_tokens=112, restored_tokens=32 + 24, present_blocks=6)
