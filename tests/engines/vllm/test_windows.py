"""Sliding windows beside full attention, with vLLM's hybrid memory manager on: two groups of layers.

The answers are those of an engine without the store, whatever is lost in whichever group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.client.connection import REPORT_S
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemon.hits import figures, since
from tests.daemons import eventually
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.stored import blocks_of, replace_payloads
from tests.engines.vllm.test_load import mixed

DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}
GROUPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPES["interleaved windows"].save(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    """The reference: the same model without the connector."""
    with Engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon(DRAM_ONLY) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def windowed(folder: Path, own: LocalDaemon) -> Iterator[Engine]:
    with Engine(folder, **connector(own)) as engine:
        assert engine("groups") == GROUPS
        yield engine


def test_mixed_requests_at_once(alone: Engine, windowed: Engine) -> None:
    prompts = mixed()
    expected = said(alone.fresh(prompts, max_tokens=40))
    for _ in range(2):
        answers = windowed.fresh(prompts, max_tokens=40)
        assert said(answers) == expected
    assert cached(answers) == [full_blocks(len(each)) for each in prompts]
    assert windowed("failures") == {}


def test_chunks_longer_than_the_window(alone: Engine, windowed: Engine) -> None:
    """vLLM frees blocks outside the window before the step after a chunk."""
    chunks = {"max_num_batched_tokens": 192, "max_num_seqs": 4}
    prompts = [prompt(900 + i, n) for i, n in enumerate((1000, 193, 515, 640))]
    with alone.instead(**chunks), windowed.instead(**chunks):
        expected = said(alone.fresh(prompts))
        for _ in range(2):
            answers = windowed.fresh(prompts)
            assert said(answers) == expected
        assert cached(answers) == [full_blocks(len(each)) for each in prompts]
        assert windowed("failures") == {}


def test_a_conversation_goes_on_where_the_answer_ended(alone: Engine, windowed: Engine) -> None:
    asked = prompt(910, 333)
    for turn, tokens in enumerate((70, 5, 129)):
        [answer] = windowed.fresh([asked], max_tokens=tokens)
        assert said([answer]) == said(alone.fresh([asked], max_tokens=tokens))
        whole = len(asked) + tokens
        asked = asked + answer["tokens"] + prompt(911 + turn, 50)
        # The last token of an answer is not computed by its own request.
        [found] = cached(windowed.fresh([asked], max_tokens=1))
        assert found == full_blocks(whole)
    assert windowed("failures") == {}


def test_preempted_requests(alone: Engine, windowed: Engine) -> None:
    little = {"num_gpu_blocks_override": 70, "max_model_len": 1024, "max_num_seqs": 8}
    prompts = [prompt(920 + i, 250) for i in range(8)]
    with alone.instead(**little), windowed.instead(**little):
        expected = said(alone.fresh(prompts, max_tokens=96))
        for _ in range(2):
            assert said(windowed.fresh(prompts, max_tokens=96)) == expected
        assert windowed("preemptions") > 0
        assert windowed("failures") == {}


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_aborted_requests_leave_no_page_behind(windowed: Engine, steps: int) -> None:
    prompts = [prompt(930 + i, 400) for i in range(4)]
    windowed.generate(prompts, max_tokens=40, abort_after=steps)
    # Only when no page is kept can the engine's own cache be emptied.
    eventually(lambda: windowed("reset"))
    windowed.generate(prompts, max_tokens=40, abort_after=steps)
    eventually(lambda: windowed("reset"))
    assert windowed("failures") == {}


def test_the_answers_come_from_the_stored_bytes(alone: Engine, windowed: Engine, own: LocalDaemon) -> None:
    asked = prompt(940, 500)
    expected = said(alone.fresh([asked]))
    windowed.fresh([asked])
    for zero in (False, True):
        replace_payloads(windowed, own.url, asked, zero)
        answers = windowed.fresh([asked])
        assert cached(answers) == [full_blocks(500)]
        assert (said(answers) == expected) is not zero


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_block_that_is_lost_shortens_the_prefix(
    alone: Engine, windowed: Engine, own: LocalDaemon, group: int
) -> None:
    asked = prompt(950 + group, 500)
    expected = said(alone.fresh([asked]))
    windowed.fresh([asked])
    with Client(own.url, deadline_s=10.0) as client:
        keys, ns = blocks_of(windowed, client, asked, group)
        assert len(keys) == (15 if ns.layout.kv_layout.find("Full") >= 0 else 2)
        ns.invalidate(keys[-1:])
    answers = windowed.fresh([asked])
    assert said(answers) == expected
    assert cached(answers)[0] < full_blocks(500)
    answers = windowed.fresh([asked])
    assert (said(answers), cached(answers)) == (expected, [full_blocks(500)])


def test_a_miss_of_one_group_is_no_hit_of_the_others(windowed: Engine, own: LocalDaemon) -> None:
    """The daemon counts what all groups have of a prompt, once."""
    asked = prompt(970, 500)

    def counted(client: Client) -> tuple[int, int, int]:
        time.sleep(1.5 * REPORT_S)
        before = figures(client)
        [found] = cached(windowed.fresh([asked], max_tokens=1))
        time.sleep(1.5 * REPORT_S)
        counts = since(before, figures(client))
        return counts["requested"], counts.get("found", 0), found // BLOCK_TOKENS

    with Client(own.url, deadline_s=10.0, strict=True) as client:
        assert counted(client) == (15, 0, 0)
        assert counted(client) == (15, 15, 15)
        groups = [blocks_of(windowed, client, asked, group) for group in range(GROUPS)]
        [(keys, ns)] = [(keys, ns) for keys, ns in groups if len(keys) == 2]
        assert ns.invalidate(keys[-1:]) == 1
        requested, found, loaded = counted(client)
        assert (requested, found) == (15, loaded)
        assert found < 15


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_block_that_is_altered_starts_the_request_again(
    alone: Engine, folder: Path, windowed: Engine, group: int
) -> None:
    asked = prompt(960 + group, 500)
    expected = said(alone.fresh([asked]))
    with LocalDaemon(DRAM_ONLY) as daemon, windowed.instead(**connector(daemon)):
        windowed.fresh([asked])
        with Client(daemon.url, deadline_s=10.0) as client:
            keys, ns = blocks_of(windowed, client, asked, group)
            payloads = np.empty((len(keys), ns.layout.block_bytes), np.uint8)
            assert ns.get(keys, payloads) == len(keys)
            ns.invalidate(keys)
            with ns.reserve(keys) as reservation:
                views = reservation.blocks
                for view, payload in zip(views, payloads, strict=True):
                    view[:] = payload.data
                reservation.commit()
            views[1][1000] ^= 1
            answers = windowed.fresh([asked])
        assert (said(answers), cached(answers)) == (expected, [0])
        assert windowed("counts")["lost"] > 0
        # What was computed again is stored again, by this request or by the next.
        windowed.fresh([asked])
        answers = windowed.fresh([asked])
        assert (said(answers), cached(answers)) == (expected, [full_blocks(500)])
        assert windowed("failures") == {}


def test_a_daemon_that_goes_away_and_comes_back(alone: Engine, windowed: Engine) -> None:
    asked = [prompt(980 + i, 300) for i in range(4)]
    expected = said(alone.fresh(asked, max_tokens=40))
    with LocalDaemon(DRAM_ONLY) as daemon, windowed.instead(**connector(daemon, deadline_s=1.0)):
        windowed.fresh(asked, max_tokens=40)
        daemon.kill()
        assert said(windowed.fresh(asked, max_tokens=40)) == expected
        daemon.start()
        eventually(lambda: windowed("connected"))
        for _ in range(2):
            answers = windowed.fresh(asked, max_tokens=40)
            assert said(answers) == expected
        assert cached(answers) == [full_blocks(300)] * 4
