"""Schedules the conversations of a trace as a closed loop of users.

Each user plays one conversation after another. The gap between two requests of a conversation is the trace's,
up to a cap. The gap between two conversations is random, up to the same cap. The first idle user plays
the next conversation. Request times do not depend on how fast a replay is served.
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
    """The users. `shared`: the fraction of tools and system prompt that all conversations have in common."""

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


def of_conversations(trace: Trace, block_tokens: int, loop: ClosedLoop) -> Workload:
    """Returns the workload of playing each conversation of the trace once."""
    numbering = Numbering(block_tokens, trace.block_tokens)
    prompts: list[Blocks] = []
    tokens: list[int] = []
    sessions: list[int] = []
    offsets_s: list[list[float]] = []
    for session in trace.sessions():
        prompts += numbering.prompts(session, loop.shared)
        tokens += [call.tokens_in for call in session.calls]
        sessions += [session.number] * len(session)
        offsets_s.append(_capped([call.t for call in session.calls], loop.gap_cap_s))
    starts_s = _starts([each[-1] if each else 0.0 for each in offsets_s], loop)
    times_s = [start + at for start, each in zip(starts_s, offsets_s, strict=True) for at in each]
    return assemble(numbering, prompts, times_s, tokens, sessions)


def _capped(times_s: Sequence[float], cap_s: float) -> list[float]:
    """Returns times relative to the first, with gaps cut to `cap_s`."""
    out: list[float] = []
    for i, at in enumerate(times_s):
        out.append(out[-1] + min(cap_s, at - times_s[i - 1]) if i else 0.0)
    return out


def _starts(lengths_s: Sequence[float], loop: ClosedLoop) -> list[float]:
    """Returns the start of each conversation, in seconds."""
    rng = random.Random(loop.seed)
    order = list(range(len(lengths_s)))
    rng.shuffle(order)
    free_at = [(rng.uniform(0, loop.gap_cap_s), user) for user in range(loop.users)]
    heapq.heapify(free_at)
    starts_s = [0.0] * len(lengths_s)
    for number in order:
        at, user = heapq.heappop(free_at)
        starts_s[number] = at
        heapq.heappush(free_at, (at + lengths_s[number] + rng.uniform(0, loop.gap_cap_s), user))
    return starts_s
