"""How long the engine takes to compute tokens of a prompt, measured from its steps.

A step lasts from when it is scheduled, or from the end of the step before, to its report. So idle time
does not count, and neither does the wait of a step that was scheduled ahead. Of a step that computes mostly
prompts, the time beyond that of a step with few tokens is what its tokens cost: a request that loads its
prefix has one step too. The median of the last steps of a class counts, so one slow step does not. A class
has steps of about as many tokens at about the same position, because attention takes longer behind more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_SAMPLES = 9
"""The last steps of a class that count."""
_ENOUGH = 3
"""Steps after which a class is known."""
_FEW_TOKENS = 16
"""A step of at most so many tokens shows what a step costs without its tokens."""
_MOSTLY = 0.9
"""The least share of prompts' tokens in a step that is measured."""
_POSITIONS = 256
"""Positions below this are one class; the classes behind it double."""

Class = tuple[int, int]


@dataclass(slots=True)
class _Step:
    """A scheduled step: `tokens` of prompts around `position`, and `others`."""

    serial: int
    began_s: float
    tokens: int
    position: float
    others: int
    measured: bool


class PrefillRate:
    """The engine's speed. Times are of the monotonic clock, in seconds. `step_tokens`: the most of a step."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._serial = 0
        self._steps: deque[_Step] = deque(maxlen=64)
        self._ended_s = -math.inf
        self._bare_s: deque[float] = deque(maxlen=_SAMPLES)
        self._took: dict[Class, deque[tuple[float, int]]] = {}
        self._rates: dict[Class, float | None] = {}

    def begin(
        self, prompts: Iterable[tuple[int, int]], others: int, now_s: float, measured: bool = True
    ) -> int:
        """Notes a step that was just scheduled. Returns its serial number, for `end`.

        `prompts`: the first position and the number of prompts' tokens, by request. `others`: all other
        tokens. `measured`: whether the step only computes.
        """
        self._serial += 1
        spans = list(prompts)
        tokens = sum(n for _, n in spans)
        if tokens + others:
            middle = sum(n * (first + n / 2) for first, n in spans) / max(1, tokens)
            self._steps.append(_Step(self._serial, now_s, tokens, middle, others, measured))
        return self._serial

    def end(self, serial: int, now_s: float) -> None:
        """Notes the report of a step. Reports of earlier steps are lost if they have not come by now."""
        while self._steps and self._steps[0].serial <= serial:
            step = self._steps.popleft()
            if step.serial == serial and step.measured:
                self._note(step, now_s - max(step.began_s, self._ended_s))
        self._ended_s = now_s

    def seconds(self, first: int, stop: int) -> float | None:
        """Returns the time to compute the tokens from `first` to `stop`; None if it is unknown."""
        if stop <= first:
            return None
        total, size = 0.0, min(stop - first, self._step_tokens)
        for at in range(first, stop, size):
            tokens = min(size, stop - at)
            rate = self._rate(_class(size, at + tokens / 2))
            if rate is None:
                return None
            total += rate * tokens
        return total

    def _note(self, step: _Step, took_s: float) -> None:
        if step.tokens + step.others <= _FEW_TOKENS:
            self._bare_s.append(took_s)
        elif step.tokens >= _MOSTLY * (step.tokens + step.others):
            samples = self._took.setdefault(_class(step.tokens, step.position), deque(maxlen=_SAMPLES))
            samples.append((took_s, step.tokens))
        else:
            return
        self._rates.clear()

    def _rate(self, wanted: Class) -> float | None:
        """Returns the seconds per token of the nearest known class; None if none has about this size."""
        if wanted not in self._rates:
            self._rates[wanted] = self._measured(wanted)
        return self._rates[wanted]

    def _measured(self, wanted: Class) -> float | None:
        near = [
            (abs(size - wanted[0]), abs(position - wanted[1]), samples)
            for (size, position), samples in self._took.items()
            if len(samples) >= _ENOUGH and abs(size - wanted[0]) <= 1
        ]
        if not near:
            return None
        *_, samples = min(near, key=lambda each: each[:2])
        bare_s = median(self._bare_s) if self._bare_s else 0.0
        return median(max(0.0, took_s - bare_s) / tokens for took_s, tokens in samples)


def _class(tokens: int, position: float) -> Class:
    return tokens.bit_length(), int(position / _POSITIONS).bit_length()
