"""core-step: the longest step of `Placement.handle` among 1 M blocks, by the size of the batch.

Requests of every kind, on full tiers, so that most steps evict. Steps are timed by the thread's CPU clock:
what other processes take does not count. The reference is the bound itself.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator

from bench.harness import Bench, Result, Target, expect, quantile
from bench.node import Node, Steps
from kvstore.core.blocks.key_batch import Keys

SIZES, SMOKE = (100_000, 1_000_000), (4096, 16_384)
"""Blocks of DRAM and NVMe."""

CHAIN = 2048
BOUND_MS = 1.0
BATCHES = (1, 32, 256, 2048)
BOUND_UP_TO = 256


def run(bench: Bench) -> Iterator[Result]:
    """A line for each size of batch, and one for filling the node, the index growing meanwhile."""
    dram_blocks, nvme_blocks = bench.pick(SIZES, SMOKE)
    node = Node(dram_blocks, nvme_blocks, 2 * nvme_blocks)
    raw: list[bytes] = []
    gc.collect()
    gc.freeze()  # as the daemon does
    node.steps = {}
    for n in range(node.slots[1] // CHAIN):
        bench.doing("filling", n * CHAIN / node.slots[1])
        raw.append(_put_chain(node, 256))
    yield _result("core-step/filling-by-256", node.steps, node, Target("<=", BOUND_MS, "value"))
    for batch in BATCHES:
        node.steps = {}
        _load(bench, node, raw, batch)
        target = Target("<=", BOUND_MS, "value") if batch <= BOUND_UP_TO else None
        yield _result(f"core-step/{batch}", node.steps, node, target)
    gc.unfreeze()


def _put_chain(node: Node, batch: int) -> bytes:
    """Puts a chain in batches; returns its keys."""
    keys = os.urandom(32 * CHAIN)
    for start in range(0, CHAIN, batch):
        parent = keys[32 * (start - 1) : 32 * start] if start else b""
        expect(node.put(Keys(keys[32 * start : 32 * (start + batch)], 32), parent), batch, "blocks stored")
    return keys


def _load(bench: Bench, node: Node, raw: list[bytes], batch: int) -> None:
    """A quarter of the seconds of all kinds of requests with batches of one size."""
    rng = random.Random(batch)
    started, found = time.monotonic(), 0
    while (passed := time.monotonic() - started) < bench.seconds / len(BATCHES) or not found:
        bench.doing(f"batches of {batch}", passed * len(BATCHES) / bench.seconds)
        for _ in range(max(1, 256 // batch)):
            keys = raw[rng.randrange(len(raw))]
            # The longest prefixes end with a full batch; shorter ones start further up the chain.
            start = rng.randrange(0, CHAIN, batch)
            some = Keys(keys[32 * start : 32 * (start + batch)], 32)
            there = node.lookup(some)
            node.prefetch(some)
            lease, came = node.acquire(some)
            expect(came, there, "blocks acquired of those found")
            found += came
            if lease:
                node.release(lease)
            cold = Keys(raw[rng.randrange(len(raw))][: 32 * batch], 32)
            lease, _ = node.acquire(cold)
            if lease:
                node.release(lease)
            fresh = Keys(os.urandom(32 * batch), 32)
            expect(node.put(fresh, b""), batch, "blocks stored")
            if rng.random() < 0.1:
                expect(node.invalidate(fresh), batch, "blocks invalidated")
            node.tick()


def _result(name: str, steps: Steps, node: Node, target: Target | None) -> Result:
    """The longest step of all, and of each kind the longest and the 99.9 % quantile."""
    kind = max(steps, key=lambda name: max(steps[name]))
    longest = max(steps[kind])
    return Result(
        name,
        longest,
        "ms",
        BOUND_MS,
        longest / BOUND_MS,
        sum(map(len, steps.values())),
        target=target,
        extra={
            "longest": kind,
            "longest_ms": {name: max(times) for name, times in steps.items()},
            "p999_ms": {name: quantile(times, 0.999) for name, times in steps.items()},
            "blocks": node.placement.residency.blocks.used,
        },
    )
