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

from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.shapes import SHAPES

DEADLINE_S = 20.0
DRAM = {"dram": {"limit": "128MiB", "huge_pages": False}, "scrub": {"rate": 0}}
# What a proxy for NixlConnector sends to the prefill engine.
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TO_DECODE = {"do_remote_prefill": True, "do_remote_decode": False}
CHUNKS = {"max_num_batched_tokens": 1088, "max_num_seqs": 4}


@dataclass
class Pair:
    """A prefill and a decode engine, with a daemon each or with one for both; and one without the store."""

    alone: Engine
    prefill: Engine
    decode: Engine
    daemons: list[LocalDaemon]

    def expected(self, asked: list[int], **more: Any) -> tuple[list[tuple[Any, Any]], int]:
        """The answer to a prompt, and how many of its tokens can come from a cache."""
        assert self.alone("reset")
        self.alone.generate([asked], max_tokens=1)
        answers = self.alone.generate([asked], **more)
        [tokens] = cached(answers)
        return said(answers), tokens

    def decoded(self, asked: list[int], params: Any, **more: Any) -> tuple[list[tuple[Any, Any]], int, int]:
        """The decode engine's answer to a prompt; how many pages it has loaded, and lost."""
        before = self.decode("counts")
        answers = self.decode.fresh([asked], params=[params], **more)
        after = self.decode("counts")
        return said(answers), *(after.get(name, 0) - before.get(name, 0) for name in ("loaded", "lost"))


def restarted(pair: Pair, role: str, daemon: LocalDaemon, **extra: Any) -> dict[str, Any]:
    """The flag of an engine with a role."""
    [flag] = connector(daemon, **{"deadline_s": DEADLINE_S, **extra}).values()
    return {"kv_transfer_config": {**flag, "kv_role": role}}


def roles(daemons: list[LocalDaemon], **extra: Any) -> list[dict[str, Any]]:
    """The flags of the prefill and of the decode engine."""
    flags = []
    for role, daemon in (("kv_producer", daemons[0]), ("kv_consumer", daemons[-1])):
        [flag] = connector(daemon, **{"deadline_s": DEADLINE_S, **extra}).values()
        flags.append({"kv_transfer_config": {**flag, "kv_role": role}})
    return flags


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
        flags = roles(daemons, weights_revision=folder.name)
        for engine, flag in zip(processes, [{}, *flags], strict=True):
            engine.restart(**options, **flag)
        yield Pair(*processes, daemons)
        for engine in processes:
            assert engine("failures") == {}


def test_the_decode_engine_loads_what_the_prefill_engine_promises(pair: Pair) -> None:
    asked = prompt(1000, 1300)
    expected, tokens = pair.expected(asked)
    [answer] = pair.prefill.fresh([asked], max_tokens=1, params=[TO_PREFILL])
    assert answer["params"]["do_remote_prefill"] is True
    assert answer["params"]["remote_num_tokens"] == 1300
    assert answer["tokens"] == expected[0][0][:1]
    got, loaded, lost = pair.decoded(asked, answer["params"])
    print(got == expected, loaded, lost, tokens)
    assert (got, lost) == (expected, 0)
    assert loaded >= tokens // 32


def test_the_decode_engine_waits_for_a_prefill_that_has_not_begun(pair: Pair) -> None:
    asked = prompt(1001, 1300)
    expected, tokens = pair.expected(asked)
    assert pair.decode("reset")
    before = pair.decode("counts")
    pair.decode.send("generate", prompts=[asked], params=[TO_DECODE])
    time.sleep(0.5)
    t0 = time.monotonic()
    [answer] = pair.prefill.fresh([asked], max_tokens=1, params=[TO_PREFILL])
    t1 = time.monotonic()
    got = pair.decode.receive()
    t2 = time.monotonic()
    after = pair.decode("counts")
    print(said(got) == expected, answer["answered_s"], t1 - t0, t2 - t1, before, after)
    assert said(got) == expected
