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
from tests.engines.vllm.stored import blocks_of, damage, replace_payloads
from tests.engines.vllm.test_load import mixed

STATES = ["linear attention", "short convolutions", "short convolutions and experts"]
DRAM_ONLY = {"dram": {"limit": "256MiB", "huge_pages": False}, "scrub": {"rate": 0}}
FIRST = prompt(700, 1500)
SECOND = FIRST[:900] + prompt(701, 500)
THIRD = FIRST[:900] + prompt(702, 500)


@pytest.fixture(scope="module", params=STATES)
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
    """Of three states of a prompt one in between is lost, which nothing needs, then also the last one."""
    asked = prompt(720, 1900)
    parting = [[asked[:at] + prompt(721 + i, 200) for i in range(2)] for at in (900, 1400)]
    assert alone("reset")
    part, whole = ([alone.generate([each]) for each in (*some, asked)][-1] for some in parting)
    for each in (*parting[0], asked, *parting[1]):
        stateful.fresh([each])
    assert 0 < cached(part)[0] <= 900
    assert cached(whole)[0] >= 1400
    with Client(own.url, deadline_s=10.0) as client:
        groups = [blocks_of(stateful, client, asked, group) for group in range(stateful("groups"))]
        states = [(keys, ns) for keys, ns in groups if "Mamba" in ns.layout.kv_layout]
        for lost, expected in ((-2, whole), (-1, part)):
            for keys, ns in states:
                assert len(keys) == 3
                ns.invalidate([keys[lost]])
            answer = stateful.fresh([asked])
            assert (said(answer), cached(answer)) == (said(expected), cached(expected))
    answer = stateful.fresh([asked])
    assert (said(answer), cached(answer)) == (said(whole), cached(whole))
    assert stateful("failures") == {}


def test_a_damaged_state_is_not_used(alone: Engine, stateful: Engine, own: LocalDaemon) -> None:
    asked = [prompt(725, 1300)]
    assert alone("reset")
    cold, hit = (alone.generate(asked) for _ in range(2))
    assert said(stateful.fresh(asked)) == said(cold)
    with Client(own.url, deadline_s=10.0) as client:
        groups = [blocks_of(stateful, client, asked[0], group) for group in range(stateful("groups"))]
        [keys, states] = next(each for each in groups if "Mamba" in each[1].layout.kv_layout)
        before = client.status()["counters"].get("quarantined_blocks", 0)
        damage(client, states, keys[-1])
        # The request is computed from its start.
        assert said(stateful.fresh(asked)) == said(cold)
        assert eventually(lambda: client.status()["counters"].get("quarantined_blocks") == before + 1)
    # Its state is stored again at the latest by the next request.
    again, answer = (stateful.fresh(asked) for _ in range(2))
    assert said(again) == said(hit if cached(again)[0] else cold)
    assert (said(answer), cached(answer)) == (said(hit), cached(hit))
    assert stateful("failures") == {}


@pytest.mark.parametrize("shape", STATES[:1], indirect=True)
def test_preempted_requests_store_usable_states(alone: Engine, stateful: Engine) -> None:
    """Their own answers are not compared: preempted requests are computed in pieces that no reference has.

    Not with short convolutions: vLLM itself answers otherwise behind a prefix that it computed beside others.
    """
    prompts = [prompt(740 + i, 700) for i in range(4)]
    blocks = 3 * -(-900 // stateful("kv_cache_config")["alignment_tokens"])
    with stateful.instead(num_gpu_blocks_override=blocks, max_model_len=1024):
        stateful.generate(prompts, max_tokens=200)
        assert stateful("preemptions") > 0
        found = 0
        for asked in prompts:
            alone("reset")
            cold, hit = (alone.generate([asked]) for _ in range(2))
            answer = stateful.fresh([asked])
            # A request that was preempted has stored no state.
            assert (said(answer), cached(answer)) in ((said(each), cached(each)) for each in (cold, hit))
            found += cached(answer)[0]
        assert found > 0
        assert stateful("failures") == {}


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
