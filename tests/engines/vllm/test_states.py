"""Recurrent layers (linear attention, short convolutions) beside full attention: their states are stored.

vLLM itself answers otherwise in the last bits where a prompt is computed in other pieces. So the reference
is an engine without the store whose own cache holds what the store holds: the same prefixes, the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import Engine, cached, connector, prompt, said
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.stored import blocks_of, replace_payloads
from tests.engines.vllm.test_load import mixed

DRAM_ONLY = {"dram": {"limit": "256MiB", "huge_pages": False}, "scrub": {"rate": 0}}
FIRST = prompt(700, 1500)
SECOND = FIRST[:900] + prompt(701, 500)
THIRD = FIRST[:900] + prompt(702, 500)


@pytest.fixture(scope="module", params=["linear attention", "short convolutions"])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    shape = SHAPES[request.param]
    options = {"enable_prefix_caching": True, **shape.engine}
    return shape.save(tmp_path_factory.mktemp("states")), options


@pytest.fixture(scope="module")
def alone(shape: tuple[Path, Any]) -> Iterator[Engine]:
    """The reference: the same model without the connector."""
    folder, options = shape
    with Engine(folder, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon(DRAM_ONLY) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def stateful(shape: tuple[Path, Any], own: LocalDaemon) -> Iterator[Engine]:
    folder, options = shape
    with Engine(folder, **options, **connector(own)) as engine:
        yield engine


def test_prefixes_are_those_of_the_engines_own_cache(alone: Engine, stateful: Engine) -> None:
    assert stateful("num_blocks") == alone("num_blocks")
    assert alone("reset")
    found = []
    for asked in (FIRST, FIRST, SECOND, SECOND, THIRD, THIRD):
        expected = alone.generate([asked], max_tokens=40)
        answer = stateful.fresh([asked], max_tokens=40)
        assert (said(answer), cached(answer)) == (said(expected), cached(expected))
        found += cached(answer)
    first, again, second, _, third, _ = found
    # The second prompt shows where prompts part, so the third resumes there.
    assert (first, second) == (0, 0)
    assert 0 < third <= 900 < again < 1500
    assert stateful("failures") == {}


def test_a_conversation_goes_on_near_the_end_of_its_answer(alone: Engine, stateful: Engine) -> None:
    asked = prompt(710, 1000)
    assert alone("reset")
    for turn in range(2):
        [expected] = alone.generate([asked], max_tokens=150)
        [answer] = stateful.fresh([asked], max_tokens=150)
        assert (said([answer]), cached([answer])) == (said([expected]), cached([expected]))
        asked = asked + answer["tokens"] + prompt(711 + turn, 600)
    assert stateful("failures") == {}


def test_a_lost_state_shortens_the_prefix(alone: Engine, stateful: Engine, own: LocalDaemon) -> None:
    """The state at the end of the prompt is evicted, the one before it, where prompts part, is not."""
    asked = FIRST[:900] + prompt(720, 500)
    for _ in range(2):
        stateful.fresh([asked])
    [whole] = cached(stateful.fresh([asked]))
    with Client(own.url, deadline_s=10.0) as client:
        for group in range(stateful("groups")):
            keys, ns = blocks_of(stateful, client, asked, group)
            if "Mamba" in ns.layout.kv_layout:
                assert len(keys) >= 2
                ns.invalidate(keys[-1:])
    [part] = cached(stateful.fresh([asked]))
    assert 0 < part < whole
    [again] = cached(stateful.fresh([asked]))
    assert again == whole


def test_the_answers_come_from_the_stored_states(alone: Engine, stateful: Engine, own: LocalDaemon) -> None:
    asked = prompt(730, 1300)
    alone("reset")
    alone.generate([asked])
    expected = said(alone.generate([asked]))
    stateful.fresh([asked])
    for zero in (False, True):
        replace_payloads(stateful, own.url, asked, zero)
        answers = stateful.fresh([asked])
        assert cached(answers)[0] > 0
        assert (said(answers) == expected) is not zero


def test_chunks_and_aborts(stateful: Engine) -> None:
    """Many requests at once are computed in pieces that no reference has: this looks at hits and failures."""
    chunks = {"max_num_batched_tokens": 1088, "max_num_seqs": 4}
    prompts = [each for each in mixed() if len(each) > 400]
    with stateful.instead(**chunks):
        for _ in range(2):
            stateful.generate(prompts, max_tokens=20, abort_after=3)
            eventually(lambda: stateful("reset"))
            answers = stateful.fresh(prompts, max_tokens=20)
        assert len(answers) == len(prompts)
        assert sum(cached(answers)) > 0
        assert stateful("failures") == {}
