"""States beside attention: which are stored, and that hits have the bits of a run without the store.

The measure is the same model that splits the prompt at the same column with a DynamicCache of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvstore import Client, chain_keys
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import Figures, PrefixCache, states
from kvstore_transformers.prefix import Snapshots
from tests.engines.transformers.models import BLOCK, batch, generated, own_step, same_bits, tokens, two_rows
from tests.engines.transformers.shapes import STATES

Make = Callable[..., PrefixCache]
SOME = [
    "gated delta rule of Qwen3-Next",
    "convolutions and windows of LFM3",
    "Mamba-2 of Bamba",
    "Mamba-2 and attention in one layer",
    "four convolutions and a window in one layer",
]
PROMPT = tokens(104)


def split(model: Any, prompt: list[int], *columns: int, **options: Any) -> Any:
    """What the model generates without a store if parts of the prompt end at these columns."""
    past, ids = DynamicCache(config=model.config), torch.tensor([prompt])
    with torch.no_grad():
        for start, stop in itertools.pairwise((0, *columns)):
            positions = torch.arange(start, stop)[None]
            model(ids[:, start:stop], past_key_values=past, position_ids=positions, use_cache=True)
    return generated(model, prompt, past_key_values=past, **options)


def stored_states(cache: PrefixCache, row: list[int], salt: bytes) -> list[int]:
    """The numbers of tokens of a row behind which a state is stored."""
    keys = [cache._shape.states.keys(key)[0] for key in chain_keys(row, BLOCK, salt)]
    assert cache._states is not None
    return [BLOCK * (at + 1) for at in np.flatnonzero(cache._states._ns.contains(keys))]


@pytest.mark.parametrize("name", SOME)
def test_no_prefix_and_the_whole_have_the_bits_of_the_same_split(cached: Make, name: str) -> None:
    model = STATES[name]()
    cache = cached(model)
    alone = split(model, PROMPT, 80)
    assert same_bits(generated(cache, PROMPT), alone)
    assert cache.last == Figures(prompt_tokens=104, stored_blocks=5 + 1)
    assert same_bits(generated(cache, PROMPT), alone)
    # Nothing new was computed up to a boundary.
    assert cache.last == Figures(prompt_tokens=104, restored_tokens=80)

    longer = PROMPT + tokens(26, seed=1)
    assert same_bits(generated(cache, longer), split(model, longer, 80, 112))
    assert cache.last == Figures(prompt_tokens=130, restored_tokens=80, stored_blocks=2 + 1, present_blocks=5)

    forked = PROMPT[:48] + tokens(52, seed=2)
    assert same_bits(generated(cache, forked), split(model, forked, 48, 80))
    assert cache.last == Figures(prompt_tokens=100, stored_blocks=2 + 2, present_blocks=3)


@pytest.mark.parametrize("name", SOME)
def test_the_next_turn_continues_from_a_state_in_the_answer(cached: Make, salt: bytes, name: str) -> None:
    model = STATES[name]()
    cache = cached(model)
    turn = generated(cache, PROMPT[:40], max_new_tokens=60)
    said = turn.sequences[0].tolist()
    # One state of the prompt and one of the answer: a later state makes earlier ones nearly worthless.
    assert stored_states(cache, said, salt) == [16, 96]
    assert cache.last == Figures(prompt_tokens=40, stored_blocks=6 + 2)

    prompt = said + tokens(20, seed=1)
    past = DynamicCache(config=model.config)
    answered = split(model, PROMPT[:40], 16, max_new_tokens=57)
    past = answered.past_key_values
    assert past.get_seq_length() == 96
    kept = generated(model, prompt, past_key_values=past)
    assert same_bits(generated(cache, prompt), kept)
    assert cache.last.restored_tokens == 96


def test_rows_of_a_batch_are_resumed_at_states_of_their_own(cached: Make, salt: bytes) -> None:
    model = STATES["gated delta rule of Qwen3-Next"]()
    cache = cached(model)
    prompts = [tokens(104, seed=1), tokens(95, seed=2), tokens(104, seed=3), tokens(20, seed=4)]
    generated(cache, prompts[0])
    generated(cache, prompts[1])
    alone = generated(model, *prompts)
    for restored in (80 + 64, 80 + 64 + 80):
        ours = generated(cache, *prompts)
        assert torch.equal(ours.sequences, alone.sequences)
        torch.testing.assert_close(ours.logits[0], alone.logits[0], rtol=1e-3, atol=1e-3)
        assert cache.last.restored_tokens == restored
    for prompt, states_of in zip(prompts, ([80], [64], [80], []), strict=True):
        # The state in the answer is at another place for each row.
        found = stored_states(cache, prompt, salt)
        assert found[:1] == states_of or found[0] > len(prompt)
    for prompt in prompts[:3]:
        assert torch.equal(generated(cache, prompt).sequences, generated(model, prompt).sequences)
        assert cache.last.restored_tokens == (len(prompt) - BLOCK) // BLOCK * BLOCK


def test_no_state_after_the_end_of_a_row_is_stored(cached: Make, salt: bytes) -> None:
    cache = cached(STATES["short convolutions of LFM2"]())
    ended, whole = two_rows(cache, ends_at=52)
    # 53 tokens with the EOS, and 99 that were inputs.
    assert stored_states(cache, ended, salt) == [16, 48]
    assert stored_states(cache, whole, salt) == [16, 96]


def test_states_of_many_pieces(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE_BYTES", 5000)
    model = STATES["gated delta rule of Qwen3-Next"]()
    cache = cached(model)
    pieces = cache._shape.states.pieces
    assert pieces > 2
    first = generated(cache, PROMPT)
    assert cache.last.stored_blocks == 5 + pieces
    assert same_bits(generated(cache, PROMPT), first)
    assert cache.last.restored_tokens == 80


def test_a_state_without_its_blocks_is_not_used(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cached(STATES["short convolutions of LFM2"]())
    first = generated(cache, PROMPT)
    real = cache._ns.get
    monkeypatch.setattr(cache._ns, "get", lambda keys, out, **_: min(2, real(keys, out)))
    assert same_bits(generated(cache, PROMPT), first)
    assert cache.last.restored_tokens == 0


def test_blocks_without_their_last_state_are_used_up_to_another(cached: Make, salt: bytes) -> None:
    cache = cached(STATES["short convolutions of LFM2"]())
    generated(cache, PROMPT[:60])
    first = generated(cache, PROMPT)
    # The first prompt's last state, the end of what both have in common, and the second prompt's last state.
    assert stored_states(cache, PROMPT, salt) == [32, 48, 80]
    assert cache._states is not None
    [key] = cache._shape.states.keys(chain_keys(PROMPT, BLOCK, salt)[4])
    cache._states._ns.invalidate([key])
    assert stored_states(cache, PROMPT, salt) == [32, 48]
    assert same_bits(generated(cache, PROMPT), first)
    assert (cache.last.restored_tokens, cache.last.stored_blocks) == (48, 1)


def test_a_killed_daemon(own_daemon: LocalDaemon) -> None:
    model = STATES["gated delta rule of Qwen3-Next"]()
    alone = split(model, PROMPT, 80)
    with Client(own_daemon.url) as client:
        cache = PrefixCache(model, client, BLOCK)
        assert same_bits(generated(cache, PROMPT), alone)
        own_daemon.kill()
        assert same_bits(generated(cache, PROMPT), alone)
        assert cache.last == Figures(104, denied_blocks=5 + 1, why=cache.last.why)
        assert not cache.failures


@pytest.mark.parametrize(
    ("method", "failures"), [("take", {"restore": 1, "store": 1}), ("take_latest", {"store": 1})]
)
def test_a_state_that_cannot_be_copied_is_a_miss(
    cached: Make, monkeypatch: pytest.MonkeyPatch, method: str, failures: dict[str, int]
) -> None:
    model = STATES["gated delta rule of Qwen3-Next"]()
    cache = cached(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Snapshots, method, fail)
    ours, alone = (generated(who, PROMPT, max_new_tokens=12) for who in (cache, model))
    assert torch.equal(ours.sequences, alone.sequences)
    assert cache.failures == failures


def test_a_custom_decoding_loop(cached: Make) -> None:
    model = STATES["Mamba-2 and attention in one layer"]()
    cache = cached(model)
    inputs = batch(tokens(60, seed=1), tokens(52, seed=2))
    # The second row has 8 columns of padding: it ends its second block there.
    start, first = own_step(cache, model, inputs)
    assert start == 8 + 32
    assert cache.last == Figures(prompt_tokens=112, stored_blocks=2 * (2 + 1))
    start, again = own_step(cache, model, inputs)
    assert start == 8 + 32
    assert torch.equal(again, first)
    assert cache.last == Figures(prompt_tokens=112, restored_tokens=64)
    with pytest.raises(MisuseError, match="past is not the cache of the latest restore"):
        cache.store(generated(model, PROMPT).past_key_values, torch.tensor([PROMPT]))
