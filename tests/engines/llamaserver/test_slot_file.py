"""Slot files: built ones are read back, forged bytes are refused. Slots and rates are decided as told."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_llamacpp import slot_file
from kvstore_llamacpp.proxy.rates import Rates
from kvstore_llamacpp.proxy.slots import FullError, SlotPool
from kvstore_llamacpp.state import CacheForm, NewState, StateError, StateForm, Tensor

QUICK = settings(max_examples=100, deadline=None)
TENSOR = Tensor(struct.pack("<iQ", 1, 8), 1, 8)
FORM = StateForm((CacheForm(struct.pack("<II", 0, 1), (TENSOR, TENSOR)),))
TOKENS = [5, 6, 7, 8]
HEAD = 12 + 12 + 4 * len(TOKENS) + 4


def built(tokens: list[int] = TOKENS, form: StateForm = FORM, slot: int = 0) -> Any:
    made = NewState(form, len(tokens), slot_file.head_of(tokens))
    blocks = np.arange(len(tokens) * form.token_bytes, dtype=np.uint8).reshape(len(tokens), -1)
    made.fill(1, 0, blocks)
    cells = made.raw[len(made.raw) - len(blocks.tobytes()) - 2 * 12 - 8 - 12 * len(tokens) :]
    cells[: 12 * len(tokens)].view("<i4")[2::3] = slot
    return made.raw


@pytest.mark.parametrize("slot", [0, 3])
def test_a_file_is_read_back(slot: int) -> None:
    tokens, state = slot_file.read(built(slot=slot), slot)
    assert tokens.tolist() == TOKENS
    assert state.form == FORM
    assert state.blocks(1, 0, 4).reshape(-1).tolist() == list(range(4 * FORM.token_bytes))


def test_a_file_of_another_slot_is_refused() -> None:
    with pytest.raises(StateError, match="not of sequence 1 alone"):
        slot_file.read(built(slot=2), 1)


def changed(at: int, value: int) -> Any:
    raw = built()
    raw[at : at + 4] = np.frombuffer(struct.pack("<i", value), np.uint8)
    return raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (changed(0, 1), "begins with 0x00000001"),
        (changed(4, 4), "has version 4 with tokens of version 1, served are 3 and 1"),
        (changed(16, 2), "has version 3 with tokens of version 2"),
        (changed(12, 9), "tokens of version 0"),
        (changed(8, 1 << 30), "4 tokens in 1073741824 words"),
        (changed(20, 3), "3 tokens in 8 words"),
        (changed(24, -1), "tokens of images"),
        (changed(HEAD - 4, 1), "tokens of images"),
        (changed(HEAD, 2), "2 streams"),
        (changed(HEAD + 4, 0), "no tokens"),
        (built()[:20], "has 20 bytes"),
        (built()[:-1], "ends in its rows"),
        (np.concatenate([built(), built()[:1]]), "ends in its streams"),
        (built(form=StateForm((*FORM.caches, *FORM.caches))), "two caches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_its_cause(raw: Any, says: str) -> None:
    with pytest.raises(StateError, match=says):
        slot_file.read(raw, 0)


def test_a_file_with_more_tokens_than_cells_is_refused() -> None:
    caches = built()[HEAD:]
    raw = np.concatenate([np.frombuffer(slot_file.head_of([*TOKENS, 9]), np.uint8), caches])
    with pytest.raises(StateError, match="5 tokens, and the state of the first 4"):
        slot_file.read(raw, 0)


@QUICK
@given(st.data())
def test_changed_bytes_are_refused_or_whole(data: st.DataObject) -> None:
    raw = built()
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        tokens, state = slot_file.read(raw, 0)
    except StateError:
        return
    assert len(tokens) == state.n_tokens == 4


# -- slots


def test_a_prompt_gets_the_slot_with_the_longest_prefix() -> None:
    async def run() -> None:
        pool = SlotPool(3, 0)
        pool.slots[1].tokens = np.array([1, 2, 3, 4], np.int32)
        pool.slots[2].tokens = np.array([1, 2, 9], np.int32)
        numbers = [(await pool.take(prompt)).number for prompt in ([1, 2, 9, 9], [1, 2, 3], [7])]
        assert numbers == [2, 1, 0]
        with pytest.raises(FullError):
            await pool.take([7])

    asyncio.run(run())


def test_a_prompt_with_a_short_common_prefix_gets_the_slot_that_is_idle_longest() -> None:
    async def run() -> None:
        pool = SlotPool(2, 0)
        pool.slots[0].tokens, pool.slots[0].used_s = np.arange(20, dtype=np.int32), 5.0
        assert (await pool.take([0, *range(50, 69)])).number == 1

    asyncio.run(run())


def test_waiting_prompts_get_slots_in_their_order_and_cancelled_ones_none() -> None:
    async def run() -> None:
        pool = SlotPool(1, 3)
        slot = await pool.take([1])
        first, second, third = (asyncio.ensure_future(pool.take([n])) for n in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        assert pool.waiting == 2
        pool.give_back(slot)
        assert await first is slot
        assert slot.busy
        # A slot that a cancelled prompt was given goes to the next one.
        fourth = asyncio.ensure_future(pool.take([4]))
        await asyncio.sleep(0)
        pool.give_back(slot)
        third.cancel()
        assert await fourth is slot
        pool.give_back(slot)
        assert not slot.busy
        assert pool.waiting == 0

    asyncio.run(run())


def test_an_idle_slot_is_the_one_that_was_used_first() -> None:
    pool = SlotPool(3, 0)
    assert pool.take_idle() is None
    for number, used_s in ((0, 5.0), (1, 2.0), (2, 9.0)):
        pool.slots[number].tokens, pool.slots[number].used_s = np.array([1], np.int32), used_s
    found = [pool.take_idle() for _ in range(4)]
    assert [slot and slot.number for slot in found] == [1, 0, 2, None]


# -- rates


def test_a_load_is_worth_it_if_it_is_faster() -> None:
    rates = Rates()
    assert rates.is_worth(1 << 30, 1)
    rates.note_evaluated(1000, 1.0)
    rates.note_evaluated(2, 10.0)  # too few to tell
    assert rates.is_worth(1 << 30, 1)
    rates.note_loaded(1 << 20, 1.0)
    assert rates.is_worth(1 << 20, 1001)
    assert not rates.is_worth(1 << 20, 999)


def test_a_load_that_is_not_worth_it_is_tried_at_times() -> None:
    rates = Rates()
    rates.note_evaluated(1000, 1.0)
    rates.note_loaded(1, 1.0)
    assert [rates.is_worth(1 << 20, 1) for _ in range(32)].count(True) == 2
    assert all(rates_always().is_worth(1 << 40, 1) for _ in range(20))


def rates_always() -> Rates:
    rates = Rates(always=True)
    rates.note_evaluated(1000, 1.0)
    rates.note_loaded(1, 1.0)
    return rates
