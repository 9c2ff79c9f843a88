"""States of llama.cpp: cut and built ones are what it writes itself, and forged bytes are refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import Llama

from kvstore.errors import MisuseError
from kvstore_llamacpp import context
from kvstore_llamacpp.state import SEQUENCE, NewState, State, StateError
from tests.engines.gguf_models import BLOCK, tokens
from tests.engines.llamacpp.models import KINDS, loaded

PROMPT = tokens(200)
LENGTH = 6 * BLOCK + 5
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of_sequence(llm: Llama) -> Any:
    """The bytes of the state of sequence 0."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    raw = np.empty(size, np.uint8)
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, pointer(raw), size, 0) == size
    return raw


def whole(llm: Llama) -> Any:
    """The bytes of the state of a context."""
    size = llama_cpp.llama_state_get_size(llm.ctx)
    raw = np.empty(size, np.uint8)
    assert llama_cpp.llama_state_get_data(llm.ctx, pointer(raw), size) == size
    return raw


def pointer(raw: Any) -> Any:
    return raw.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def evaluated(llm: Llama, prompt: list[int]) -> Llama:
    context.clear(llm)
    llm.eval(prompt)
    return llm


def built(state: State, blocks: int, head: bytes) -> Any:
    made = NewState(state.form, blocks * BLOCK, head)
    made.fill(BLOCK, 0, state.blocks(BLOCK, 0, blocks))
    return made.raw


@pytest.fixture(params=[(name, kind) for name in ("llama", "gemma3") for kind in KINDS], ids=" ".join)
def llm(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Llama]:
    name, kind = request.param
    made = loaded(models[name], n_batch=64, **KINDS[kind])
    yield made
    made.close()


def test_every_prefix_is_as_llama_cpp_writes_it(llm: Llama) -> None:
    """Each batch has 64 tokens at most, as prompts have in both runs."""
    state = State(whole(evaluated(llm, PROMPT[:LENGTH])))
    assert state.n_tokens == LENGTH
    for blocks in range(1, LENGTH // BLOCK + 1):
        evaluated(llm, PROMPT[: blocks * BLOCK])
        own = State(whole(llm))
        # The last batch has fewer tokens than in the longer run, and kernels may round it in another way.
        first = blocks * BLOCK // 64 * 4
        assert np.array_equal(own.blocks(BLOCK, 0, first), state.blocks(BLOCK, 0, first))
        assert np.array_equal(built(own, blocks, own.head), whole(llm))
        if len(own.form.caches) == 1:
            assert np.array_equal(built(own, blocks, of_sequence(llm)[:8].tobytes()), of_sequence(llm))


def test_a_state_that_was_built_is_read_back(llm: Llama) -> None:
    state = context.read(evaluated(llm, PROMPT[:LENGTH]))
    blocks = state.blocks(BLOCK, 0, 5)
    context.replace(llm, built(state, 5, SEQUENCE), PROMPT[: 5 * BLOCK])
    again = context.read(llm)
    assert (again.n_tokens, again.form) == (5 * BLOCK, state.form)
    assert np.array_equal(again.blocks(BLOCK, 0, 5), blocks)
    assert llm.n_tokens == 5 * BLOCK
    assert llm._input_ids.tolist() == PROMPT[: 5 * BLOCK]


def test_cells_may_be_in_any_order(llm: Llama) -> None:
    """The sequence whose cells lie before those of another is put behind it."""
    state = context.read(evaluated(llm, PROMPT[:LENGTH]))
    made = NewState(state.form, 2 * BLOCK)
    made.fill(BLOCK, 1, state.blocks(BLOCK, 0, 1))
    made.fill(BLOCK, 0, state.blocks(BLOCK, 1, 1))
    raw = made.raw.copy()
    order = np.roll(np.arange(2 * BLOCK, dtype=np.int32), BLOCK)
    for at in cells_of(raw, state):
        raw[at : at + 2 * BLOCK * 12].view(np.int32)[::3] = order
    assert np.array_equal(State(raw).blocks(BLOCK, 0, 2), state.blocks(BLOCK, 0, 2))


def cells_of(raw: Any, state: State) -> list[int]:
    """Where the cells of each cache begin."""
    n = int(raw[12:16].view(np.uint32)[0])
    starts, at = [], 8
    for cache in state.form.caches:
        starts.append(at + 8)
        at += 8 + n * 12 + 8 + sum(len(tensor.header) + n * tensor.token_bytes for tensor in cache.tensors)
    return starts


# -- forged bytes


@pytest.fixture(scope="module", params=["f16", "q8_0 flash"])
def raw(request: pytest.FixtureRequest, models: dict[str, Path]) -> Any:
    """The bytes of a small state with two caches."""
    made = loaded(models["gemma3"], **KINDS[request.param])
    made.eval(PROMPT[:17])
    read = whole(made)
    made.close()
    return read


def check(forged: Any) -> None:
    """Forged bytes are refused, or are a state all of whose bytes are among them."""
    try:
        state = State(forged)
    except StateError:
        return
    assert 0 <= state.n_tokens <= 17
    n = state.n_tokens
    if n:
        assert state.blocks(n, 0, 1).shape == (1, n * state.form.token_bytes)


@QUICK
@given(st.data())
def test_a_truncated_state_is_refused(raw: Any, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(StateError):
        State(raw[:length])


def test_a_longer_state_is_refused(raw: Any) -> None:
    with pytest.raises(StateError):
        State(np.concatenate([raw, raw[:1]]))


@QUICK
@given(st.data())
def test_a_state_with_changed_bytes_is_refused_or_whole(raw: Any, data: st.DataObject) -> None:
    forged = raw.copy()
    # Most bytes are rows, whatever they are: half of the changes are made where lengths may be.
    places = st.one_of(st.integers(0, len(raw) - 1), st.sampled_from(lengths_of(raw)))
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        forged[at] = byte
    check(forged)


@QUICK
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(raw: Any, more: bytes) -> None:
    head = State(raw).head
    check(np.frombuffer(head + more, np.uint8))
    check(np.frombuffer(more, np.uint8))


def lengths_of(raw: Any) -> list[int]:
    """Places of bytes that are no rows: the difference of a state and one with other rows."""
    state = State(raw)
    made = [NewState(state.form, 16, state.head) for _ in range(2)]
    for byte, each in enumerate(made):
        each.fill(16, 0, np.full((1, 16 * state.form.token_bytes), byte, np.uint8))
    return np.flatnonzero(made[0].raw == made[1].raw).tolist()


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [(0, 2, "streams"), (4, 0, "no tokens"), (4, 1 << 31, "ends in its cells"), (12, 2, "sequence 0 alone")],
    ids=["streams", "no cells", "many cells", "two sequences"],
)
def test_a_refusal_names_its_cause(raw: Any, at: int, value: int, says: str) -> None:
    forged = raw.copy()
    start = len(State(raw).head) + at
    forged[start : start + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
    with pytest.raises(StateError, match=says):
        State(forged)


def test_a_type_that_is_not_served_is_refused_by_number(raw: Any) -> None:
    forged = raw.copy()
    start = len(State(raw).head) + 8 + 17 * 12 + 8
    forged[start] = 12
    with pytest.raises(StateError, match="type 12, served are f32"):
        State(forged)


def test_positions_that_repeat_are_refused(raw: Any) -> None:
    forged = raw.copy()
    start = len(State(raw).head) + 8
    forged[start + 12 : start + 16] = 0
    with pytest.raises(StateError, match="same position"):
        State(forged)


def test_a_state_without_its_first_tokens_has_no_prefix(raw: Any) -> None:
    forged = raw.copy()
    start = len(State(raw).head) + 8
    forged[start : start + 17 * 12].view(np.int32)[::3] += 4
    assert State(forged).n_tokens == 0


def test_blocks_that_a_state_does_not_have_are_misuse(raw: Any) -> None:
    state = State(raw)
    for asked in ((8, 0, 3), (8, -1, 1), (0, 0, 1)):
        with pytest.raises(MisuseError):
            state.blocks(*asked)


def test_a_state_that_llama_cpp_refuses_empties_the_context(
    plain: Callable[..., Llama], capfd: pytest.CaptureFixture[str]
) -> None:
    llm, other = evaluated(plain("llama"), PROMPT[:64]), evaluated(plain("llama", type_k=0), PROMPT[:64])
    raw = built(context.read(other), 4, SEQUENCE)
    with pytest.raises(StateError, match="has read 0 of"):
        context.replace(llm, raw, PROMPT[:64])
    assert llm.n_tokens == 0
    capfd.readouterr()
