"""Parses and formats sizes and durations such as `512MiB` and `250ms`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from kvstore.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Notation:
    """Says how the values of a type are written in the file. `plural` names several of them."""

    name: str
    plural: str = ""


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_HINT = "a whole number of bytes, or one with a unit: 4096, 512MiB, 64GiB, 100GB"
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_HINT = "a number of seconds, or one with a unit: 0.5, 250ms, 5s, 2m, 30d"


def parse_size(text: object) -> int:
    """Returns the bytes of `4096`, `"512MiB"` or `"100GB"`, units in any case. Raises MisuseError."""
    size = -1
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,19})\s*([A-Za-z]*)\s*", text)):
        unit = _SIZE_UNITS.get(m[2].lower())
        size = int(m[1]) * unit if unit else -1
    if not 0 <= size < 1 << 63:
        raise MisuseError(f"{text!r:.80} is not a size", _SIZE_HINT)
    return size


def parse_write_budget(text: object, limit: int) -> int:
    """Returns the bytes per day of a size, or of a multiple of `limit` bytes such as `"0.5x"`; 0: no budget.

    Raises MisuseError otherwise.
    """
    if isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*x\s*", text)):
        return int(float(m[1]) * limit)
    try:
        return parse_size(text)
    except MisuseError:
        hint = 'bytes per day such as "500GiB", or a multiple of the limit such as "1x"'
        raise MisuseError(f"{text!r:.80} is not a write budget", hint) from None


def parse_duration(text: object) -> float:
    """Returns the seconds of `0.5`, `"250ms"`, `"5s"` or `"2m"`. Raises MisuseError otherwise."""
    seconds = -1.0
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    elif isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text)):
        scale = _DURATION_UNITS.get(m[2])
        seconds = float(m[1]) * scale if scale else -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise MisuseError(f"{text!r:.80} is not a duration", _DURATION_HINT)
    return seconds


def format_duration(seconds: float) -> str:
    """Returns seconds as text in the largest unit that leaves a whole number: `50ms`, `10s`, `24h`."""
    for unit, scale in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= 2 * scale and not seconds % scale:
            return f"{seconds / scale:.0f}{unit}"
    return f"{seconds * 1000:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"


def format_size(n: float) -> str:
    """Returns `n` bytes as text in binary units with at most one decimal: `512B`, `1.5KiB`, `8GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Values from 1023.95 would round to "1024", which is 1 of the next unit.
        if abs(n) < 1023.95:
            return f"{n:.1f}".removesuffix(".0") + unit
        n /= 1024
    return f"{n:.1f}".removesuffix(".0") + "TiB"


@dataclass(frozen=True, slots=True)
class Least:
    """A validator of sizes: MisuseError below `minimum` bytes."""

    minimum: int

    def __call__(self, size: int) -> int:
        if size < self.minimum:
            raise MisuseError(f"{format_size(size)} is too small", f"at least {format_size(self.minimum)}")
        return size


def at_least(minimum: int) -> AfterValidator:
    """Returns the annotation of sizes of at least `minimum` bytes."""
    return AfterValidator(Least(minimum))


Size = Annotated[int, BeforeValidator(parse_size), Notation("size")]
"""A number of bytes, written as an integer or as text with a unit."""
Duration = Annotated[float, BeforeValidator(parse_duration), Notation("duration")]
"""A number of seconds, written as a number or as text with a unit."""
