"""Models of many shapes: hits change no token and no logprob, or the connector refuses the model by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, farthest, full_blocks, prompt, said
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.stored import answers_from_the_store, blocks_of

FIRST = prompt(800, 497)
PROMPTS = {
    "first": FIRST,
    "second": FIRST[:300] + prompt(801, 197),
    "third": FIRST[:300] + prompt(802, 197),
}


def arguments(name: str, folder: Path, block_tokens: int) -> dict[str, Any]:
    shape = SHAPES[name]
    return {
        "model": str(shape.save(folder)),
        "max_model_len": 1024,
        "block_size": block_tokens,
        **shape.engine,
    }


@pytest.mark.parametrize(
    ("name", "block_tokens", "second", "third"),
    [
        ("llama", 32, 300, 300),
        ("grouped queries", 128, 300, 300),
        ("experts", 32, 300, 300),
        ("partial rope", 32, 300, 300),
        # Only the blocks of a window before a prompt's end are stored. Where every layer has a window,
        # nothing shows where prompts part. Where some have full attention, the second prompt shows it.
        ("window smaller than the prompt", 32, 0, 0),
        ("window smaller than the prompt", 128, 0, 0),
        ("window larger than the prompt", 128, 300, 300),
        ("interleaved windows", 32, 0, 300),
        ("interleaved windows", 128, 0, 300),
        ("sinks", 32, 0, 300),
        ("sinks", 128, 0, 300),
        ("long rope", 32, 300, 300),
        ("long rope with a window", 32, 0, 0),
        # A prefix that ends with a chunk of attention needs no block of it.
        ("chunks", 32, 257, 300),
        ("chunks", 64, 300, 300),
        ("shared KV", 32, 0, 300),
        ("two block sizes and shared KV", 64, 0, 300),
    ],
)
def test_hits_change_nothing(
    processes: list[Engine],
    own: LocalDaemon,
    tmp_path: Path,
    name: str,
    block_tokens: int,
    second: int,
    third: int,
) -> None:
    """Two engines with the store against one without. vLLM gives them as many KV blocks as that one has."""
    options = arguments(name, tmp_path, block_tokens)
    one, other = processes
    other.restart(**options)
    reference = {tokens: said(other.fresh([asked])) for tokens, asked in PROMPTS.items()}
    num_blocks = other("num_blocks")
    for engine in processes:
        engine.restart(**options | connector(own, weights_revision=tmp_path.name))
        assert engine("num_blocks") == num_blocks

    def asks(engine: Engine, prompt: str, found: int) -> None:
        answer = engine.fresh([PROMPTS[prompt]])
        assert (said(answer), cached(answer)) == (reference[prompt], [full_blocks(found, block_tokens)])
        assert engine("failures") == {}

    asks(one, "first", 1)
    asks(one, "first", 497)
    asks(other, "first", 497)
    asks(one, "second", second or 1)
    asks(other, "second", 497)
    asks(other, "third", third or 1)
    asks(one, "third", 497)
    assert answers_from_the_store(one, own, FIRST)


def test_blocks_of_two_sizes(processes: list[Engine], own: LocalDaemon, tmp_path: Path) -> None:
    """The reference is an engine whose own cache holds the same prefix: here vLLM computes other bits behind
    a prefix than without one. A block that is lost in any group changes the answer no more than that.
    """
    options = arguments("two block sizes", tmp_path, 32)
    one, other = processes
    other.restart(**options)
    specs = [spec for _, spec in other("kv_cache_config")["groups"]]
    assert ["block_size=64" in each for each in specs] == [True, False]
    order = ["first", "first", "second", "third"]
    expected = [other.generate([PROMPTS[each]]) for each in order]
    assert [cached(each) for each in expected] == [[0], [full_blocks(497, 64)], [0], [full_blocks(300, 64)]]
    for engine in processes:
        engine.restart(**options | connector(own, weights_revision=tmp_path.name))
    for which, engine, own_cache in zip(order, (one, other, one, other), expected, strict=True):
        answer = engine.fresh([PROMPTS[which]])
        assert (said(answer), cached(answer)) == (said(own_cache), cached(own_cache))
    assert answers_from_the_store(one, own, FIRST)
    with Client(own.url, deadline_s=10.0) as client:
        for group in range(one("groups")):
            asked = prompt(810 + group, 497)
            answers = [one.fresh([asked]) for _ in range(2)]
            assert cached(answers[1]) == [full_blocks(497, 64)]
            keys, namespace = blocks_of(one, client, asked, group)
            # The last small block is behind the end of the last large one.
            lost = keys[-2:]
            assert namespace.invalidate(lost) == len(lost) > 0
            answer = one.fresh([asked])
            assert cached(answer)[0] < full_blocks(497, 64)
            assert min(farthest(said(answer), said(each)) for each in answers) < 1e-4
    assert one("failures") == other("failures") == {}


@pytest.mark.parametrize(
    ("name", "block_tokens", "why"),
    [
        ("bidirectional", 128, "has a pooler.*leave out the connector"),
        ("Mamba-2", 32, "num_prefill_checkpoint_blocks 1.*no Mamba-2 layers: leave out the connector"),
    ],
)
def test_models_without_a_proof_of_exact_restore_are_refused(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path, name: str, block_tokens: int, why: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError.*{why}"):
        processes[0].restart(**arguments(name, tmp_path, block_tokens) | connector(own))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        # vLLM's CPU kernels write values of 4 bytes into these pages, over pages of other blocks.
        ("llama", {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype is bfloat16, and the model's"),
        ("llama", {"kv_cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype is int8_per_token_head, and"),
        # vLLM saves states within blocks. Under the key of the block before, another prompt would load them.
        # Their size depends on the CPU's kernels.
        ("linear attention", {"prefix_match_unit": 32}, r"multiples of 32 tokens, within blocks of \d+"),
    ],
)
def test_options_that_would_restore_other_kv_are_refused(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path, name: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError.*{why}"):
        processes[0].restart(**arguments(name, tmp_path, 32) | options | connector(own))


def test_rope_factors_of_the_longest_prompt_change_the_namespace(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path
) -> None:
    """vLLM takes the short factors where `max_model_len` allows no long prompt, else the long ones."""
    options = arguments("long rope", tmp_path, 32) | connector(own, weights_revision="of this test")
    asked = [FIRST[:200]]
    short, long = processes
    short.restart(**options | {"max_model_len": 256})
    short.fresh(asked)
    assert cached(short.fresh(asked)) == [full_blocks(200)]
    long.restart(**options)
    long("plug", connected=False)
    reference = said(long.fresh(asked))
    long("plug", connected=True)
    first = long.fresh(asked)
    assert (said(first), cached(first)) == (reference, [0])
    assert said(first) != said(short.fresh(asked))


def test_an_engine_with_prefix_caching_off_is_served_only_with_a_reason(
    processes: list[Engine], own: LocalDaemon, tmp_path: Path
) -> None:
    options = arguments("llama", tmp_path, 32) | {"enable_prefix_caching": False}
    [engine, _] = processes
    for reason, found in (("", 0), ("only its memory is short", full_blocks(497))):
        named = connector(own, without_prefix_caching=reason, weights_revision=tmp_path.name)
        engine.restart(**options | named)
        engine("plug", connected=False)
        reference = said(engine.generate([FIRST]))
        engine("plug", connected=True)
        engine.generate([FIRST])
        again = engine.generate([FIRST])
        assert (said(again), cached(again)) == (reference, [found])
        assert bool(engine("counts")["saved"]) is bool(reason)
        assert engine("failures") == {}
