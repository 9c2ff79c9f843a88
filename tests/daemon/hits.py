"""Small workloads with shared prefixes, and what a cache with room for everything has of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore import Client

Figures = dict[str, int]


def conversations(seed: int, prompts: int = 40, longest: int = 12) -> list[list[int]]:
    """Prompts as block numbers: some begin like others, some are others again, most are new."""
    dice = random.Random(seed)
    made: list[list[int]] = []
    fresh = iter(range(1, 1 << 30))
    for _ in range(prompts):
        start: list[int] = []
        if made and dice.random() < 0.6:
            before = dice.choice(made)
            start = before[: dice.randint(1, len(before))]
        if not start or dice.random() < 0.7:
            start = start + [next(fresh) for _ in range(dice.randint(1, longest))]
        made.append(start)
    return made


def counted(prompts: Iterable[Sequence[Any]]) -> Figures:
    """What is requested and found, if each prompt is stored before the next one comes."""
    sums: Counter[str] = Counter(requested=0, found=0)
    stored: set[Any] = set()
    for blocks in prompts:
        sums["requested"] += len(blocks)
        sums["found"] += next((i for i, block in enumerate(blocks) if block not in stored), len(blocks))
        stored.update(blocks)
    return dict(sums)


def figures(client: Client, unit: str = "blocks") -> Figures:
    """What the daemon has counted, of all tenants and tiers."""
    sums: Counter[str] = Counter()
    for row in client.control("figures")["hits"]:
        sums[row["what"]] += row[unit]
    return dict(+sums)


def since(before: Figures, now: Figures) -> Figures:
    """What has come since, of what has changed."""
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}
