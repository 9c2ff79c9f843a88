"""capacity: prompts that one core of the daemon serves, beside what a node asks at its busiest.

Engines are imitated: a process asks for prompts as a connector does, without computing. Each prompt has
65,536 tokens. Its first half is stored and is leased; its second half is new and is put in batches of one
step (2048 tokens), with write-through to NVMe. Every shard has blocks of its own. Blocks have 16 tokens, or
128, as the page about vLLM advises for 8 shards. Their bytes are few, so that clients do not need the cores:
decisions of the daemon do not depend on bytes.

The rate of a node with more cores is bounded by the daemon's loop, so the figure is the reciprocal of the
daemon's CPU time a prompt; of several daemons, which share the shards and the bytes, of the busiest one's.
The reference is the busiest 10 s of a public hour of chat requests, all of them on one node: Mooncake's
conversation trace (FAST'25), 90,000 asked tokens a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, NotDone, Result, Target, cpu_seconds, expect, quantile
from bench.served import serve, wait_until
from bench.tenant_load import Cue, running
from kvstore import Client, Layout, Namespace

PROMPT_TOKENS, STEP_TOKENS = 65_536, 2048
ASKED_TOKENS_S = 90_000.0
HEADROOM = 3.0
MOST_DENIED = 0.01
"""The most new blocks that may find no room, as a share: writes to NVMe lag where clients take the cores."""
DRAM_BYTES, NVME_BYTES = 512 * MIB, 4 * GIB


@dataclass(frozen=True, slots=True)
class Node:
    """The engines of a node, the shards of each, the tokens of a block, and the daemons."""

    engines: int
    shards: int
    block_tokens: int = 16
    daemons: int = 1
    prompt_tokens: int = PROMPT_TOKENS
    step_tokens: int = STEP_TOKENS

    @property
    def half(self) -> int:
        """The blocks of half a prompt, of one shard."""
        return self.prompt_tokens // self.block_tokens // 2

    @property
    def step(self) -> int:
        """The blocks that are put at once, of one shard."""
        return self.step_tokens // self.block_tokens

    @property
    def layouts(self) -> list[Layout]:
        """Returns the layout of each shard."""
        return [
            Layout(model="bench", block_bytes=4 * KIB, shard=f"{n}/{self.shards}") for n in range(self.shards)
        ]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was asked for: its begin and its end (s, monotonic clock), and its stored blocks."""

    began: float
    ended: float
    stored: int

    def share(self, start: float, over: float) -> float:
        """Returns the part of its time that lies between `start` and `over`."""
        return max(0.0, min(self.ended, over) - max(self.began, start)) / (self.ended - self.began)


NODES = {
    "1-engine": Node(1, 1),
    "8-engines": Node(8, 1),
    "8-engines-of-8-shards": Node(8, 8),
    "8-engines-of-8-shards/2-daemons": Node(8, 8, daemons=2),
    "8-engines-of-8-shards/128-tokens": Node(8, 8, 128),
    "8-engines-of-8-shards/128-tokens/2-daemons": Node(8, 8, 128, 2),
}
SMOKE = {
    name: Node(min(2, node.engines), min(2, node.shards), node.block_tokens, node.daemons, 2048, 512)
    for name, node in NODES.items()
}


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per node."""
    for name, node in bench.pick(NODES, SMOKE).items():
        with ExitStack() as daemons:
            tiers = DRAM_BYTES // node.daemons, NVME_BYTES // node.daemons
            served = [
                daemons.enter_context(serve(tiers[0], (daemons.enter_context(bench.scratch()), tiers[1])))
                for _ in range(node.daemons)
            ]
            bench.doing(f"{name}: storing the shared half")
            shared = [os.urandom(32) for _ in range(node.half)]
            for layout, (client, _) in zip(node.layouts, cycle(served)):
                stored = _store(client.namespace(layout), shared, None, node.step)
                expect(stored, len(shared), "blocks stored")
            for client, _ in served:
                wait_until(client, lambda status: not status["copies_under_way"], 0.05)
            bench.doing(name)
            urls, pids = [daemon.url for _, daemon in served], [daemon.pid for _, daemon in served]
            with ExitStack() as stack:
                ends = [stack.enter_context(running(_ask, urls, node, shared)) for _ in range(node.engines)]
                before_s, start = [cpu_seconds(pid) for pid in pids], time.monotonic()
                time.sleep(bench.pick(max(1.0, bench.seconds), 0.3))
                used_s = max(cpu_seconds(pid) - before for pid, before in zip(pids, before_s, strict=True))
                over = time.monotonic()
                asked = [prompt for end in ends for prompt in end()]
            new = len(asked) * node.half * node.shards
            denied = 1 - sum(prompt.stored for prompt in asked) / new
            if denied > MOST_DENIED:
                raise NotDone(f"{denied:.1%} of {new} blocks were not stored")
        yield _row(name, node, asked, (start, over), used_s, denied)


def _row(
    name: str, node: Node, asked: list[Prompt], within: tuple[float, float], used_s: float, denied: float
) -> Result:
    start, over = within
    prompts = sum(prompt.share(start, over) for prompt in asked)
    rate = prompts / used_s
    needed = ASKED_TOKENS_S / node.prompt_tokens
    extra = {
        "daemon_cpu_ms_per_prompt": 1000 * used_s / prompts,
        "daemon_cores": used_s / (over - start),
        "served_per_s": prompts / (over - start),
        "prompt_p99_ms": 1000 * quantile([prompt.ended - prompt.began for prompt in asked], 0.99),
        "denied_share": denied,
    }
    target = Target(">=", HEADROOM)
    row = f"capacity/{name}"
    return Result(row, rate, "prompts/s", needed, rate / needed, len(asked), target=target, extra=extra)


def _ask(cue: Cue, urls: list[str], node: Node, shared: list[bytes]) -> list[Prompt]:
    """Asks for prompt after prompt, and returns them. Shards are dealt out to the daemons at `urls`."""
    asked: list[Prompt] = []
    with ExitStack() as stack:
        shards = [
            stack.enter_context(Client(url, deadline_s=30.0, strict=True)).namespace(layout)
            for layout, url in zip(node.layouts, cycle(urls))
        ]
        while not (asked and cue.is_set()):
            new = [os.urandom(32) for _ in range(node.half)]
            began, stored = time.monotonic(), 0
            for shard in shards:
                expect(shard.lookup(shared + new), len(shared), "blocks found")
                with shard.acquire(shared) as lease:
                    expect(len(lease), len(shared), "blocks leased")
                stored += _store(shard, new, shared[-1], node.step)
            asked.append(Prompt(began, time.monotonic(), stored))
            cue.begin()
    return asked


def _store(shard: Namespace, keys: list[bytes], parent: bytes | None, step: int) -> int:
    """Stores a chain up to the first block that finds no room. Returns the number of stored blocks."""
    data, stored = np.zeros((step, shard.layout.block_bytes), np.uint8), 0
    for at in range(0, len(keys), step):
        batch = keys[at : at + step]
        stored += shard.put(batch, data[: len(batch)], parent).stored
        if stored < at + len(batch):
            break
        parent = batch[-1]
    return stored
