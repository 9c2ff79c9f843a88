"""Decides by measured rates whether a load is faster than evaluating the tokens."""

from __future__ import annotations

_WEIGHT = 0.25
_TRY_EVERY = 16
_LEAST_TOKENS = 16


class Rates:
    """The rates of evaluation (tokens/s) and of loads (bytes/s), as moving averages; 0 until measured."""

    def __init__(self, always: bool = False) -> None:
        self.tokens_per_s = 0.0
        self.bytes_per_s = 0.0
        self._always = always
        self._refused = 0

    def note_evaluated(self, tokens: int, seconds: float) -> None:
        """Counts an evaluation. One of few tokens tells little of the rate of many, and is left out."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self.tokens_per_s = _average(self.tokens_per_s, tokens / seconds)

    def note_loaded(self, nbytes: int, seconds: float) -> None:
        """Counts a load, from the store into the slot."""
        if nbytes and seconds > 0:
            self.bytes_per_s = _average(self.bytes_per_s, nbytes / seconds)

    def is_worth(self, nbytes: int, tokens: int) -> bool:
        """Returns whether loading bytes is faster than evaluating tokens, or a rate is not known.

        Every 16th refusal is a load instead, so that a rate that has become better is seen.
        """
        if self._always or not self.tokens_per_s or not self.bytes_per_s:
            return True
        if nbytes / self.bytes_per_s < tokens / self.tokens_per_s:
            self._refused = 0
            return True
        self._refused = (self._refused + 1) % _TRY_EVERY
        return not self._refused


def _average(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
