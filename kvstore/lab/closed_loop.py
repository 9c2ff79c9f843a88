"""Conversations as a closed loop: so many users, each of whom plays one conversation after another.

Between two requests of a conversation passes what the trace says, up to a cap; between two conversations the
user is idle for up to that long. Whoever is free first takes the next conversation. Nobody waits for answers
longer than the trace did: times do not depend on what is replayed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import MisuseError
from kvstore.lab.traces import Trace
from kvstore.lab.workload import Blocks, Numbering, Workload, assemble


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Who plays. `shared` is the part of tools and system prompt that all conversations have in common."""

    users: int = 64
    gap_cap_s: float = 300.0
    shared: float = 0.5
    seed: int = 1

    def __post_init__(self) -> None:
        if self.users < 1:
            raise MisuseError(f"users is {self.users}", "at least 1")
        if not self.gap_cap_s >= 0:
            raise MisuseError(f"gap_cap_s is {self.gap_cap_s}", "seconds, not negative")
        if not 0 <= self.shared <= 1:
            raise MisuseError(f"shared is {self.shared}", "a share from 0 to 1")


def of_conversations(trace: Trace, block_tokens: int, crowd: ClosedLoop) -> Workload:
    """What the crowd asks for while it plays each conversation of the trace once."""
    numbering = Numbering(block_tokens, trace.block_tokens)
    prompts: list[Blocks] = []
    tokens: list[int] = []
    offsets_s: list[list[float]] = []
    for session in trace.sessions():
        prompts += numbering.prompts(session, crowd.shared)
        tokens += [call.tokens_in for call in session.calls]
        offsets_s.append(_capped([call.t for call in session.calls], crowd.gap_cap_s))
    starts_s = _starts([each[-1] if each else 0.0 for each in offsets_s], crowd)
    times_s = [start + at for start, each in zip(starts_s, offsets_s, strict=True) for at in each]
    return assemble(numbering, prompts, times_s, tokens)


def _capped(times_s: Sequence[float], cap_s: float) -> list[float]:
    """Times from the first one on, with no gap longer than the cap."""
    out: list[float] = []
    for i, at in enumerate(times_s):
        out.append(out[-1] + min(cap_s, at - times_s[i - 1]) if i else 0.0)
    return out


def _starts(lengths_s: Sequence[float], crowd: ClosedLoop) -> list[float]:
    """When each conversation begins, in seconds from the start of all."""
    dice = random.Random(crowd.seed)
    order = list(range(len(lengths_s)))
    dice.shuffle(order)
    free_at = [(dice.uniform(0, crowd.gap_cap_s), user) for user in range(crowd.users)]
    heapq.heapify(free_at)
    starts_s = [0.0] * len(lengths_s)
    for number in order:
        at, user = heapq.heappop(free_at)
        starts_s[number] = at
        heapq.heappush(free_at, (at + lengths_s[number] + dice.uniform(0, crowd.gap_cap_s), user))
    return starts_s
