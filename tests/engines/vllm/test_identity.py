"""Tokens and logprobs are those of an engine without the connector, bit by bit; the KV is the store's."""

from __future__ import annotations

import numpy as np

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, cached, connector, full_blocks, prompt, said


def test_stored_blocks_are_loaded_bit_identical(plain: Engine, engine: Engine) -> None:
    asked = [prompt(1, 300)]
    expected = said(plain.fresh(asked))
    first = engine.fresh(asked)
    again = engine.fresh(asked)
    assert said(first) == expected
    assert said(again) == expected
    assert cached(again) == [full_blocks(300)] == [288]
    assert engine("failures") == {}


def test_a_prompt_of_whole_blocks_leaves_one_to_compute(plain: Engine, engine: Engine) -> None:
    asked = [prompt(2, 4 * BLOCK_TOKENS)]
    engine.fresh(asked)
    again = engine.fresh(asked)
    assert said(again) == said(plain.fresh(asked))
    assert cached(again) == [3 * BLOCK_TOKENS]


def test_answers_are_stored_too(plain: Engine, engine: Engine) -> None:
    first = prompt(3, 100)
    [answer] = engine.fresh([first], max_tokens=64)
    second = [first + answer["tokens"] + prompt(4, 50)]
    again = engine.fresh(second)
    # The last token of an answer is never computed: 163 tokens have KV, in 5 whole blocks.
    assert cached(again) == [160]
    plain.fresh([first], max_tokens=64)
    assert said(again) == said(plain.generate(second))


def test_prompts_share_their_common_prefix(plain: Engine, engine: Engine) -> None:
    system = prompt(5, 200)
    asked = [system + prompt(seed, 60) for seed in (6, 7)]
    engine.fresh(asked[:1])
    assert cached(engine.fresh(asked[1:])) == [full_blocks(200)]
    assert said(engine.fresh(asked)) == said(plain.fresh(asked))


def test_a_hit_of_the_engines_own_cache_is_extended_from_the_store(plain: Engine, engine: Engine) -> None:
    long = prompt(8, 400)
    expected = said(plain.fresh([long]))
    engine.fresh([long])
    engine.fresh([long[:150]])
    again = engine.generate([long])
    assert cached(again) == [full_blocks(400)]
    assert said(again) == expected


def test_requests_with_different_salts_share_nothing(engine: Engine) -> None:
    asked = [prompt(9, 200)]
    engine.fresh(asked, salt="red")
    assert cached(engine.fresh(asked)) == [0]
    assert cached(engine.fresh(asked, salt="blue")) == [0]
    assert cached(engine.fresh(asked, salt="red")) == [full_blocks(200)]


def test_aborted_requests_leave_nothing_behind(plain: Engine, engine: Engine) -> None:
    asked = [prompt(seed, 300) for seed in range(10, 14)]
    for steps in (1, 2, 4):
        assert engine.fresh(asked, max_tokens=32, abort_after=steps) == []
    again = engine.fresh(asked)  # which waits until all engine blocks are free
    assert said(again) == said(plain.fresh(asked))
    assert cached(again) == [full_blocks(300)] * 4
    for steps in (1, 2):
        assert engine("reset")
        assert engine.generate(asked, abort_after=steps) == []
    assert said(engine.fresh(asked)) == said(again)


def test_the_engine_computes_with_the_stored_kv(daemon: LocalDaemon, engine: Engine) -> None:
    """The control of all others: with other bytes under the same keys, other tokens come."""
    asked = [prompt(15, 300)]
    [expected] = engine.fresh(asked)
    keys = [bytes.fromhex(key) for key in engine("keys", prompt=asked[0])]
    with Client(daemon.url, deadline_s=10.0) as client:
        ns = client.namespace(Layout(**engine("layout")))
        assert ns.invalidate(keys) == len(keys)
        zeros = np.zeros((len(keys), ns.layout.block_bytes), np.uint8)
        assert ns.put(keys, zeros).stored == len(keys)
        [other] = engine.fresh(asked)
        assert other["cached"] == full_blocks(300)
        assert other["tokens"] != expected["tokens"]
        ns.invalidate(keys)
    assert engine.fresh(asked)[0]["tokens"] == expected["tokens"]


def test_a_stored_block_may_have_several_pages(plain: Engine, engine: Engine, daemon: LocalDaemon) -> None:
    """300 tokens are 9 blocks of the engine and 3 stored ones; hits begin and end within a stored block."""
    with engine.instead(**connector(daemon, load=engine.mode, block_tokens=3 * BLOCK_TOKENS)):
        asked = [prompt(16, 300)]
        expected = said(plain.fresh(asked))
        assert said(engine.fresh(asked)) == expected
        again = engine.fresh(asked)
        assert (said(again), cached(again)) == (expected, [288])
        # Of 288 tokens 256 may be cached, two thirds of the last stored block; of the first one the engine
        # has 64 tokens of its own.
        engine.fresh([asked[0][:70]])
        shorter = engine.generate([asked[0][:288]])
        assert cached(shorter) == [full_blocks(288)] == [256]
        assert said(shorter) == said(plain.fresh([asked[0][:288]]))
