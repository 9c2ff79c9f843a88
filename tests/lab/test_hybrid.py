"""Replays of hybrid models: where a prompt can be resumed, and what a node serves of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.errors import MisuseError
from kvstore.lab import sweep
from kvstore.lab.capacity import Capacity
from kvstore.lab.hybrid import MODELS, Hybrid, HybridNode, best_hits, parse_model, resumable
from kvstore.lab.simulated_node import keys_of
from kvstore.lab.sweep import Task
from kvstore.types import Tier
from tests.lab.small import workload

BLOCK = 64 << 10
STATES, WINDOWS = Hybrid(2), Hybrid(2, window_tokens=3)
"""With blocks of one token: one block before a position, and two."""


def node(model: Hybrid, slots: int = 1000, policy: str = "lru") -> HybridNode:
    return HybridNode((Capacity(Tier.DRAM, slots=slots),), BLOCK, model, 1, {"policy": policy})


def served(made: HybridNode, *prompts: list[int]) -> list[int]:
    """The blocks served of each prompt, by the names of its blocks: equal names are equal blocks."""
    out = []
    for blocks in prompts:
        keys = keys_of(np.array(blocks))
        out.append(made.prompt(Keys(keys.tobytes(), keys.itemsize), 0.0))
    return out


@pytest.mark.parametrize(
    ("stored", "reach", "end"),
    [
        ("", 1, 0),
        ("0000", 1, 0),
        ("0100", 1, 2),
        ("1001", 2, 1),
        ("0110", 2, 3),
        ("0110", 3, 0),
        ("1100", 3, 2),
        ("0111101", 3, 5),
    ],
)
def test_a_prompt_is_resumed_behind_its_last_whole_window(stored: str, reach: int, end: int) -> None:
    assert resumable(np.array([each == "1" for each in stored], np.bool_), reach) == end


def test_states_are_stored_at_the_end_of_a_prompt_and_where_prompts_part() -> None:
    shared = list(range(10))
    first, second, third = (shared + [100 * n + i for i in range(5)] for n in (1, 2, 3))
    assert served(node(STATES), first, second, third, first, [*second, 900]) == [0, 0, 10, 15, 15]
    assert served(node(WINDOWS), first, second, third, first[:12]) == [0, 0, 10, 10]


def test_every_block_of_a_position_is_needed() -> None:
    prompt = list(range(6))
    for model, lost in ((STATES, 5), (WINDOWS, 5), (WINDOWS, 4)):
        made = node(model)
        assert served(made, prompt, prompt) == [0, 6]
        key = keys_of(np.array([lost]))
        made.placement.handle(ev.Invalidate(9, 3, Keys(key.tobytes(), 8)), 0.0)
        assert served(made, prompt, prompt) == [0, 6], "it is computed and stored again"
        made.placement.handle(ev.Invalidate(9, 1, Keys(key.tobytes(), 8)), 0.0)
        assert served(made, prompt) == [0], "full attention is needed too"


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("model", [STATES, WINDOWS], ids=["states", "windows"])
def test_a_node_with_room_for_everything_serves_the_best(model: Hybrid, policy: str) -> None:
    dice = np.random.default_rng(5)
    prompts = [dice.integers(0, 2, dice.integers(1, 12)).tolist() for _ in range(60)]
    load = workload(prompts)
    task = Task(policy, "", (Capacity(Tier.DRAM, slots=5000),), BLOCK, {}, model)
    point = sweep.replay(load, task)
    best = best_hits(load, model)
    assert 0 < best < load.accesses
    assert point.hits_by_tier == {"dram": best}
    few = sweep.replay(load, Task(policy, "", (Capacity(Tier.DRAM, slots=12),), BLOCK, {}, model))
    assert few.hits_by_tier["dram"] < best


def test_states_and_windows_take_slots_of_the_node() -> None:
    prompt = list(range(6))
    assert served(node(STATES, slots=8), prompt, prompt) == [0, 6]
    assert served(node(STATES, slots=7), prompt, prompt) == [0, 0], "its two states have no room"


def test_models_have_names_or_groups() -> None:
    assert parse_model("qwen3-next") == MODELS["qwen3-next"] == parse_model("3xstate")
    assert parse_model("5x1024") == MODELS["gemma-3"]
    assert [parse_model("5x1024").reach(tokens) for tokens in (16, 512, 1023, 4096)] == [64, 2, 1, 1]
    assert Hybrid(1).reach(16) == 1
    for text in ("", "llama", "0x5", "3x0", "3xstates", "x"):
        with pytest.raises(MisuseError, match="no hybrid model"):
            parse_model(text)
