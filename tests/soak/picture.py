"""Writes the samples of a soak, and draws them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.svg import Line, Picture

Samples = tuple[Sequence[float], Sequence[dict[str, float]]]
"""The seconds and the samples of one life."""

_DRAWN = "anonymous_mib", "core_mib", "descriptors", "threads"
_COLOURS = "first", "third", "fourth", "mark"
_POINTS = 100
_HEIGHT = 120.0


def write(out: Path, lives: Sequence[Samples]) -> None:
    """Writes samples.jsonl, a line a sample, and soak.svg, a chart a figure with a line a life."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"life": number, "s": round(at - times_s[0], 3), **figures}
        for number, (times_s, samples) in enumerate(lives, 1)
        for at, figures in zip(times_s, samples, strict=True)
    ]
    (out / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = Picture("What the daemon uses, by seconds of its life")
    for figure in _DRAWN:
        _draw(picture, figure, [life for life in lives if len(life[0]) > 1])
    (out / "soak.svg").write_text(picture.render())


def _draw(picture: Picture, figure: str, lives: Sequence[Samples]) -> None:
    most = max((each[figure] for _, samples in lives for each in samples), default=1.0)
    ticks = [0, round(most / 2), round(most * 1.1, 1)]
    picture.text(16, picture.bottom + 4, figure, "s")
    top = picture.bottom + 14
    longest = max((times_s[-1] - times_s[0] for times_s, _ in lives), default=1.0)
    for number, (times_s, samples) in enumerate(lives):
        step = max(1, len(times_s) // _POINTS)
        xs = [at - times_s[0] for at in times_s[::step]]
        line = Line(f"life {number + 1}", [each[figure] for each in samples[::step]], _COLOURS[number % 4])
        words = [f"{x:.0f}" if not number and i % (_POINTS // 4) == 0 else "" for i, x in enumerate(xs)]
        width = 600 * xs[-1] / longest
        picture.chart((80, top, width, _HEIGHT), xs, [line], ticks, words)
