"""Small traces and workloads for the lab's tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvstore.lab.traces import CHAT_BLOCK_TOKENS, Call, TraceSession
from kvstore.lab.workload import Numbering, Workload, assemble


def chat(timestamp: float, ids: Sequence[int], rest: int = 0) -> dict[str, Any]:
    """Returns a request for full blocks with these ids and `rest` more tokens."""
    tokens = CHAT_BLOCK_TOKENS * len(ids) + rest
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 1, "hash_ids": list(ids)}


def call(t: float, ids: Sequence[int], model: str = "m") -> dict[str, Any]:
    return {"t": t, "model": model, "in": 64 * len(ids), "out": 1, "hash_ids": list(ids)}


def agent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "requests": list(requests)}


def conversation(*requests: dict[str, Any], tools: int = 0, system: int = 0) -> dict[str, Any]:
    return {"block_size": 64, "tool_tokens": tools, "system_tokens": system, "requests": list(requests)}


def write(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """Writes a trace file. Rows of text are written unchanged."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def chats(path: Path, requests: int = 300, seed: int = 1, apart_ms: int = 1000) -> Path:
    """Writes chats with 60 heads of skewed popularity. Each repetition is a little longer."""
    dice = random.Random(seed)
    heads = [[1000 * head + i for i in range(dice.randint(1, 6))] for head in range(1, 61)]
    rows = []
    for n in range(requests):
        ids = heads[min(int(dice.expovariate(0.08)), 59)]
        rows.append(chat(apart_ms * n, ids, dice.randint(0, 100)))
        ids.append(100_000 + n)
        if len(ids) > 20:
            del ids[2:]
    return write(path, rows)


def workload(prompts: Iterable[Sequence[int]]) -> Workload:
    """Returns prompts of one-token blocks, one per second. Equal ids after equal prefixes are one block."""
    numbering = Numbering(1, 1)
    blocks = []
    for n, ids in enumerate(prompts):
        one = Call.model_construct(t=0.0, tokens_in=len(ids), tokens_out=0, hash_ids=list(ids))
        blocks += numbering.prompts(TraceSession(n, 1, [one], own_clock=False), 0.0)
    return assemble(numbering, blocks, list(range(len(blocks))), [len(each) for each in blocks])


def prompts_of(load: Workload) -> list[list[int]]:
    """Returns the block numbers of each prompt."""
    starts = load.starts.tolist()
    return [load.blocks[a:b].tolist() for a, b in pairwise(starts)]
