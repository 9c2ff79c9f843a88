"""Sizes and durations as people write them, and back."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from kvstore.errors import MisuseError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_HINT = "a whole number of bytes, or one with a unit: 4096, 512MiB, 64GiB, 100GB"
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_HINT = "a number of seconds, or one with a unit: 0.5, 250ms, 5s, 2m, 30d"


def parse_size(text: object) -> int:
    """Bytes meant by `4096`, `"512MiB"` or `"100GB"`. Units in any case; raises MisuseError for the rest."""
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
    """Bytes a day meant by a size, or by `"0.5x"`: so many times a device of `limit` bytes; 0: no bound.

    Raises MisuseError for anything else.
    """
    if isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*x\s*", text)):
        return int(float(m[1]) * limit)
    try:
        return parse_size(text)
    except MisuseError:
        hint = 'bytes a day such as "500GiB", or times the limit such as "1x"'
        raise MisuseError(f"{text!r:.80} is not a write budget", hint) from None


def parse_duration(text: object) -> float:
    """Seconds meant by `0.5`, `"250ms"`, `"5s"` or `"2m"`. Raises MisuseError for anything else."""
    seconds = -1.0
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    elif isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text)):
        scale = _DURATION_UNITS.get(m[2])
        seconds = float(m[1]) * scale if scale else -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise MisuseError(f"{text!r:.80} is not a duration", _DURATION_HINT)
    return seconds


def format_size(n: float) -> str:
    """`n` bytes for people, in binary units with at most one decimal: `512B`, `1.5KiB`, `8GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.95 and above would round to "1024": that is the next unit's 1.
        if abs(n) < 1023.95:
            return f"{n:.1f}".removesuffix(".0") + unit
        n /= 1024
    return f"{n:.1f}".removesuffix(".0") + "TiB"


def at_least(minimum: int) -> AfterValidator:
    """Refuses sizes below `minimum` bytes."""

    def check(size: int) -> int:
        if size < minimum:
            raise MisuseError(f"{format_size(size)} is too small", f"at least {format_size(minimum)}")
        return size

    return AfterValidator(check)


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, written as an integer or as text with a unit."""
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, written as a number or as text with a unit."""
