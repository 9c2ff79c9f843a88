"""Prefill in one engine, decode in another, on one node or two: the decode engine waits for blocks.

The reference is an engine without the store whose own cache holds the prompt: the same pieces, the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
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

DEADLINE_S = 20.0
DRAM = {"dram": {"limit": "128MiB", "huge_pages": False}, "scrub": {"rate": 0}}
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy for vLLM's NixlConnector sends to the prefill engine."""
TO_DECODE = {"do_remote_prefill": True, "do_remote_decode": False}
"""What a proxy sends that starts both engines at once."""
PROMPT_TOKENS = 1300
COUNTED = "loaded", "lost", "bad parameters"


@dataclass
class Pair:
    """A prefill and a decode engine, with a daemon each or one for both; and an engine without the store."""

    alone: Engine
    prefill: Engine
    decode: Engine
    daemons: list[LocalDaemon]
    shape: str
    options: dict[str, Any]
    flags: list[dict[str, Any]]

    def expected(self, asked: list[int], before: int | None = None) -> tuple[list[Any], int]:
        """The answer, and how many tokens of the prompt come from a cache that has the first `before`."""
        assert self.alone("reset")
        self.alone.generate([asked[:before]], max_tokens=1)
        answers = self.alone.generate([asked])
        [tokens] = cached(answers)
        return said(answers), tokens

    def counts(self) -> dict[str, int]:
        """What the decode engine's connector has counted."""
        counts: dict[str, int] = self.decode("counts")
        return counts

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """What it has counted of loads and parameters since, without zeros."""
        now = {name: self.counts().get(name, 0) - before.get(name, 0) for name in COUNTED}
        return {name: count for name, count in now.items() if count}


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[list[Engine]]:
    """Three processes, whose engines are replaced: starting a process takes longer than an engine."""
    with Engine(model) as one, Engine(model) as two, Engine(model) as three:
        yield [one, two, three]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", 1),
        ("llama", 2),
        ("interleaved windows", 1),
        ("interleaved windows", 2),
        ("short convolutions", 1),
    ],
    ids=lambda each: f"{each[0]} on {each[1]}",
)
def pair(
    request: pytest.FixtureRequest, processes: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, nodes = request.param
    shape, folder = SHAPES[name], tmp_path_factory.mktemp("pair")
    options = {"model": str(shape.save(folder / "model")), "enable_prefix_caching": True, **shape.engine}
    network = {"network": {"url": f"file://{folder / 'shared'}", "timeout": "500ms"}} if nodes == 2 else {}
    with ExitStack() as stack:
        daemons = [stack.enter_context(LocalDaemon({**DRAM, **network})) for _ in range(nodes)]
        flags = []
        for role, daemon in (("kv_producer", daemons[0]), ("kv_consumer", daemons[-1])):
            flag = connector(daemon, weights_revision=folder.name, deadline_s=DEADLINE_S)
            flags.append({"kv_transfer_config": {**flag["kv_transfer_config"], "kv_role": role}})
        for engine, flag in zip(processes, [{}, *flags], strict=True):
            engine.restart(**options, **flag)
        yield Pair(*processes, daemons, name, options, flags)
        for engine in processes:
            assert engine("failures") == {}


def test_the_decode_engine_loads_what_the_prefill_engine_promises(pair: Pair) -> None:
    """The proxy asks one after the other, and passes on what the first one answers."""
    asked = prompt(1000, PROMPT_TOKENS)
    expected, tokens = pair.expected(asked)
    [answer] = pair.prefill.fresh([asked], max_tokens=1, params=[TO_PREFILL])
    assert answer["params"] == {
        **TO_PREFILL,
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_num_tokens": PROMPT_TOKENS,
        "remote_prefill_cached_tokens": 0,
        "remote_request_id": answer["params"]["remote_request_id"],
    }
    before = pair.counts()
    params = answer["params"] | {"remote_block_ids": [[1, 2]], "unknown": "ignored"}
    answers = pair.decode.fresh([asked], params=[params])
    assert said(answers) == expected
    assert answers[0]["params"] is None
    assert tokens == full_blocks(PROMPT_TOKENS)
    # Of a window two pages before the end are loaded too, of a state one.
    more = {"interleaved windows": 2, "short convolutions": 1}.get(pair.shape, 0)
    assert pair.since(before) == {"loaded": tokens // BLOCK_TOKENS + more}


def test_the_decode_engine_waits_for_a_prefill_that_has_not_begun(pair: Pair) -> None:
    asked = prompt(1001, PROMPT_TOKENS)
    expected, tokens = pair.expected(asked)
    assert pair.decode("reset")
    before = pair.counts()
    pair.decode.send("generate", prompts=[asked], params=[TO_DECODE])
    time.sleep(0.5)
    pair.prefill.fresh([asked], max_tokens=1, params=[TO_PREFILL])
    answers = pair.decode.receive()
    assert (said(answers), cached(answers)) == (expected, [tokens])
    assert "lost" not in pair.since(before)
    assert answers[0]["answered_s"] < DEADLINE_S / 2


def test_many_prompts_at_once(pair: Pair) -> None:
    """More than may wait at once: the others are computed."""
    asked = [prompt(1010 + i, 200 + 10 * i) for i in range(20)]
    expected = said(pair.alone.fresh(asked))
    assert pair.decode("reset")
    before = pair.counts()
    pair.decode.send("generate", prompts=asked, params=[TO_DECODE] * len(asked))
    pair.prefill.fresh(asked, max_tokens=1, params=[TO_PREFILL] * len(asked))
    answers = pair.decode.receive()
    # Prompts computed in other pieces have other last bits where layers are recurrent.
    if pair.shape != "short convolutions":
        assert said(answers) == expected
    assert pair.since(before)["loaded"] >= 10 * (200 // BLOCK_TOKENS)


def test_a_promise_that_is_kept_in_part_is_awaited_until_the_deadline(pair: Pair) -> None:
    """The prefill engine stores the blocks of a part, and nothing more."""
    asked, part = prompt(1002, PROMPT_TOKENS), 700
    expected, tokens = pair.expected(asked, part)
    pair.prefill.fresh([asked[:part]], max_tokens=1)
    assert pair.decode("reset")
    pair.decode("deadline", deadline_s=2.0)
    try:
        before = pair.counts()
        [answer] = pair.decode.generate([asked], params=[TO_DECODE | {"remote_num_tokens": PROMPT_TOKENS}])
        assert said([answer]) == expected
        assert 1.5 < answer["answered_s"] < DEADLINE_S / 2
        counted = pair.since(before)
        assert counted["loaded"] >= tokens // BLOCK_TOKENS > 0
        assert counted["lost"] > 0
        # Nothing is awaited that no one has promised.
        before = pair.counts()
        pair.decode.fresh([prompt(1003, PROMPT_TOKENS)], params=[None])
        assert pair.since(before) == {}
    finally:
        pair.decode("deadline", deadline_s=DEADLINE_S)


def test_what_cannot_be_read_is_as_if_it_were_not_there(pair: Pair) -> None:
    asked = prompt(1004, 300)
    bad = [
        TO_DECODE | {"remote_num_tokens": "300"},
        TO_DECODE | {"remote_num_tokens": -1},
        TO_DECODE | {"remote_num_tokens": True},
        TO_DECODE | {"remote_num_tokens": [300.5]},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "do_remote_decode": {}},
    ]
    expected, _ = pair.expected(asked, 1)
    before = pair.counts()
    for params in bad:
        [answer] = pair.decode.fresh([asked], params=[params])
        assert said([answer]) == expected
    assert pair.since(before) == {"bad parameters": len(bad)}


@pytest.mark.parametrize(
    "pair", [("llama", 1), ("interleaved windows", 1)], ids=lambda each: f"{each[0]} on 1", indirect=True
)
def test_a_killed_prefill_engine_is_awaited_until_the_deadline(pair: Pair) -> None:
    asked = prompt(1005, PROMPT_TOKENS)
    expected, _ = pair.expected(asked, 1)
    pair.decode("deadline", deadline_s=3.0)
    try:
        arguments = pair.options | pair.flags[0] | {"max_num_batched_tokens": 64, "max_num_seqs": 4}
        with (
            Engine(Path(arguments.pop("model")), **arguments) as prefill,
            Client(pair.daemons[-1].url, deadline_s=10.0) as client,
        ):
            assert pair.decode("reset")
            some = client.status()["blocks"] + 24
            pair.decode.send("generate", prompts=[asked], params=[TO_DECODE])
            prefill.send("generate", prompts=[asked], max_tokens=1, params=[TO_PREFILL])
            eventually(lambda: client.status()["blocks"] >= some)
            prefill.kill()
            answers = pair.decode.receive()
        assert answers[0]["answered_s"] < DEADLINE_S * 3 / 4
        # What the killed engine stored was computed in pieces, which have other last bits.
        assert farthest(said(answers), expected) < 1e-4
    finally:
        pair.decode("deadline", deadline_s=DEADLINE_S)


def test_a_killed_daemon_is_not_awaited(pair: Pair) -> None:
    asked = prompt(1006, PROMPT_TOKENS)
    expected, _ = pair.expected(asked, 1)
    assert pair.decode("reset")
    pair.decode.send("generate", prompts=[asked], params=[TO_DECODE])
    time.sleep(0.5)
    pair.daemons[-1].kill()
    try:
        answers = pair.decode.receive()
        assert said(answers) == expected
        assert answers[0]["answered_s"] < DEADLINE_S / 2
    finally:
        pair.daemons[-1].start()
        eventually(lambda: pair.decode("connected"))
        eventually(lambda: pair.prefill("connected"))
    with Client(pair.daemons[-1].url, deadline_s=10.0) as client:
        status = client.status()
    assert (status["leases"], status["reservations"]) == (0, 0)
