"""Draws bar and line charts as SVG text, the same bytes for the same figures. Needs no package.

A picture has its colours in classes. With both themes it has a background and follows the reader's setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 720
"""The width of every picture in px."""

_THEMES = {
    "light": {"card": "#ffffff", "edge": "#d0d7de", "text": "#24292f", "soft": "#57606a", "grid": "#d8dee4",
              "first": "#0969da", "second": "#8c959f", "third": "#8250df", "fourth": "#bf8700",
              "mark": "#cf222e"},
    "dark": {"card": "#161b22", "edge": "#30363d", "text": "#e6edf3", "soft": "#9da7b1", "grid": "#30363d",
             "first": "#58a6ff", "second": "#8b949e", "third": "#bc8cff", "fourth": "#d29922",
             "mark": "#ff7b72"},
}  # fmt: skip
_LINE_PX = 22
_LABEL_PX, _VALUE_PX = 236, 152


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: `size` on the axis, `mark` where the target is (None: no target), and the figures in words."""

    label: str
    size: float
    mark: float | None
    figures: str
    colour: str = "first"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: y by x, a colour of the theme, and whether it is dashed."""

    label: str
    ys: Sequence[float]
    colour: str
    dashed: bool = False


@dataclass(slots=True)
class Picture:
    """The elements of one picture, drawn from the top to the bottom. `bottom`: the next free y in px."""

    title: str
    bottom: float = 40.0
    elements: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Writes words; `kind`: classes beside that of all text."""
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.elements.append(f'<text class="t {kind}" {at}>{escape(words, quote=False)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draws a straight line of a class."""
        self.elements.append(
            f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )

    def bars(
        self, heading: str, rows: Sequence[Bar], most: float, ticks: Sequence[tuple[float, str]]
    ) -> None:
        """Adds a heading and horizontal bars on an axis from 0 to `most`."""
        left, right = _LABEL_PX, WIDTH - _VALUE_PX
        scale = (right - left) / most
        top = self.bottom + 26
        self.text(16, self.bottom + 12, heading, "b")
        end = top + _LINE_PX * len(rows)
        for value, words in ticks:
            self.line(left + value * scale, top - 4, left + value * scale, end, "grid")
            self.text(left + value * scale, end + 15, words, "s", "middle")
        for i, row in enumerate(rows):
            y = top + _LINE_PX * i
            self.text(left - 10, y + 14, row.label, anchor="end")
            size = f'width="{min(row.size, most) * scale:.1f}" height="{_LINE_PX - 8}"'
            self.elements.append(f'<rect class="{row.colour}" x="{left}" y="{y + 3:.1f}" {size} rx="2"/>')
            if row.mark is not None:
                self.line(left + row.mark * scale, y, left + row.mark * scale, y + _LINE_PX - 2, "mark")
            self.text(right + 12, y + 14, row.figures, "s")
        self.bottom = end + 24

    def chart(
        self, box: tuple[float, float, float, float], xs: Sequence[float], lines: Sequence[Line],
        y_ticks: Sequence[float], x_words: Sequence[str], y_end: float = 0.0,
    ) -> None:  # fmt: skip
        """Draws lines in a box (x, y, width, height in px). The y axis ends at `y_end`, 0: the last tick."""
        left, top, width, height = box
        across = width / (xs[-1] - xs[0])
        down = height / (y_end or y_ticks[-1])
        for tick in y_ticks:
            self.line(left, top + height - tick * down, left + width, top + height - tick * down, "grid")
            self.text(left - 8, top + height - tick * down + 4, f"{tick:g}", "s", "end")
        for x, words in zip(xs, x_words, strict=True):
            self.text(left + (x - xs[0]) * across, top + height + 18, words, "s", "middle")
        for line in lines:
            points = [
                (left + (x - xs[0]) * across, top + height - y * down)
                for x, y in zip(xs, line.ys, strict=True)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
            self.elements.append(f'<polyline class="l {line.colour}" points="{path}"{dashes}/>')
            if not line.dashed:
                self.elements += [
                    f'<circle class="{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points
                ]
        self.bottom = max(self.bottom, top + height + 30)

    def legend(self, x: float, y: float, lines: Sequence[Line], step: float) -> None:
        """Names lines side by side, `step` px apart."""
        for i, line in enumerate(lines):
            at = x + i * step
            dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
            place = f'x1="{at:.1f}" y1="{y - 4:.1f}" x2="{at + 22:.1f}" y2="{y - 4:.1f}"'
            self.elements.append(f'<line class="l {line.colour}" {place}{dashes}/>')
            self.text(at + 28, y, line.label, "s")

    def render(self, theme: str = "") -> str:
        """Returns the file's text. `theme` "": both, on a background; otherwise one, transparent."""
        height = round(self.bottom + 8)
        style = _style(_THEMES[theme or "light"])
        if not theme:
            style += f"@media (prefers-color-scheme: dark) {{ {_style(_THEMES['dark'])}}}"
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        head = f'<text class="t h" x="16" y="26">{escape(self.title, quote=False)}</text>'
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title, quote=False)}</title>",
            f"<style>{_FIXED}{style}</style>",
            *([] if theme else [card]),
            *([head] if self.title else []),
            *self.elements,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


_FIXED = (
    ".t { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; } .s { font-size: 12px; } "
    ".b { font-weight: 600; } .h { font-size: 15px; font-weight: 600; } "
    ".grid { stroke-width: 1; } .mark { stroke-width: 2.5; } .l { stroke-width: 2.5; fill: none; } "
)


def _style(colours: dict[str, str]) -> str:
    """Returns the rules of a theme."""
    rules = [
        f".card {{ fill: {colours['card']}; stroke: {colours['edge']}; }}",
        f".t {{ fill: {colours['text']}; }} .s {{ fill: {colours['soft']}; }}",
        f".grid {{ stroke: {colours['grid']}; }} .mark {{ stroke: {colours['mark']}; }}",
    ]
    for name in ("first", "second", "third", "fourth"):
        rules.append(f".{name} {{ fill: {colours[name]}; }}")
        rules.append(f".l.{name} {{ fill: none; stroke: {colours[name]}; }}")
    return " ".join(rules) + " "
