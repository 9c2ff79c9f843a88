"""Requests that get their prompt in parts, with an answer to each: vLLM's streaming input.

vLLM drops the last token of an answer. With async scheduling it has computed its KV by then, if a stop token
ended the answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import (
    BLOCK_TOKENS,
    Engine,
    cached,
    connector,
    farthest,
    full_blocks,
    prompt,
    said,
)
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.stored import answers_from_the_store, settled

ANSWER = 6


def session(engine: Engine, parts: list[list[int]], stops: list[int], name: str) -> list[int]:
    """The tokens of a session: of its prompt, and of its answers without those that vLLM drops."""
    answers = engine("session", name=name, chunks=parts, stops=stops, most=ANSWER + 4)
    return [token for part, answer in zip(parts, answers, strict=True) for token in part + answer[:-1]]


def stops_of(engine: Engine, parts: list[list[int]]) -> list[int]:
    """Tokens that end the answers to these parts."""
    stops: list[int] = []
    for number in range(len(parts)):
        name = f"stop {parts[0][:3]} {number}"
        answers = engine("session", name=name, chunks=parts[: number + 1], stops=stops, most=ANSWER)
        stops.append(answers[number][-1])
    return stops


@pytest.mark.parametrize("shape", ["llama", "interleaved windows", "chunks"])
def test_what_a_session_has_stored_is_right(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path, shape: str
) -> None:
    """Sessions whose first answers end around the end of a block. Then one request for all their tokens."""
    alone, stored = processes
    options = {"model": str(SHAPES[shape].save(tmp_path)), **SHAPES[shape].engine}
    alone.restart(**options)
    stored.restart(**options, **connector(own, weights_revision=tmp_path.name))
    assert stored("overlaps")
    found = 0
    for number in range(-2, 3):
        first = prompt(900 + number, 4 * BLOCK_TOKENS + number - ANSWER)
        parts = [first, prompt(910 + number, 9), prompt(920 + number, 2 * BLOCK_TOKENS)]
        stops = stops_of(alone, parts)
        tokens = session(alone, parts, stops, f"{number}")
        assert session(stored, parts, stops, f"{number}") == tokens
        settled(own)
        asked = [tokens + prompt(930 + number, 40)]
        answer = stored.fresh(asked)
        assert farthest(said(answer), said(alone.fresh(asked))) < 1e-4
        found += cached(answer)[0] >= full_blocks(len(first), 2 * BLOCK_TOKENS)
    assert found > 2
    assert answers_from_the_store(stored, own, asked[0])
    assert stored("failures") == {}


def test_a_session_with_states_stores_nothing_and_loads(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path
) -> None:
    """A state that has seen a dropped token is that of no prompt."""
    shape = SHAPES["short convolutions"]
    alone, stored = processes
    alone.restart(model=str(shape.save(tmp_path)), enable_prefix_caching=True, **shape.engine)
    engine = {"model": str(tmp_path), "enable_prefix_caching": True, **shape.engine}
    stored.restart(**engine, **connector(own, weights_revision=tmp_path.name))
    assert stored("overlaps")
    parts = [prompt(940, 2 * BLOCK_TOKENS - ANSWER), prompt(941, 9), prompt(942, 60)]
    stops = stops_of(alone, parts)
    tokens = session(stored, parts, stops, "stores")
    assert tokens == session(alone, parts, stops, "alone")
    assert stored("counts")["saved"] == 0
    asked = [tokens + prompt(943, 40)]
    assert alone("reset")
    answer = stored.fresh(asked)
    assert (said(answer), cached(answer)) == (said(alone.generate(asked)), [0])
    # The first part of another session is a prompt like any other.
    settled(own)
    assert stored("reset")
    assert "loaded" not in stored("counts")
    session(stored, [asked[0][:-20], *parts[1:]], stops, "loads")
    assert stored("counts")["loaded"] > 0
    assert stored("failures") == {}
