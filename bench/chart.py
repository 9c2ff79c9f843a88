"""python -m bench chart: draws the README's picture from bench/RESULTS.md, for light and dark pages.

Time to the first token by prompt length, computed and loaded: the rows of `vllm-ttft`. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from bench.provenance import RESULTS
from bench.results import parse

DOCS = RESULTS.parents[1] / "docs"
_THEMES = {
    "light": ("#24292f", "#d0d7de", "#8c959f", "#0969da"),
    "dark": ("#e6edf3", "#30363d", "#8b949e", "#58a6ff"),
}
"""Colours of text, grid, computed and loaded."""


def main() -> int:
    """Writes docs/ttft-light.svg and docs/ttft-dark.svg. Returns 0, or 1 if there are no figures."""
    rows = figures(RESULTS.read_text(encoding="utf-8"))
    if not rows:
        print("bench chart: no figures of vllm-ttft (run `python -m bench report vllm-ttft` first)")
        return 1
    for theme in _THEMES:
        draw(rows, DOCS / f"ttft-{theme}.svg", theme)
    return 0


def figures(text: str) -> list[tuple[int, float, float]]:
    """Returns (tokens, seconds loaded, seconds computed) for each measured row of RESULTS.md."""
    [section] = [section for section in parse(text) if section.name == "vllm-ttft"]
    return [
        (int(row["name"].rpartition("/")[2]), float(row["value"]), float(row["reference"]))
        for row in section.rows
        if row.get("reference")
    ]


def draw(rows: list[tuple[int, float, float]], path: Path, theme: str) -> None:
    """Draws both times by prompt length."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    text, grid, computed_colour, loaded_colour = _THEMES[theme]
    style = {"svg.hashsalt": "kvstore", "svg.fonttype": "none", "font.size": 11, "text.color": text}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.6, 2.9), layout="constrained")
        axes = figure.subplots()
        tokens = [row[0] for row in rows]
        for column, colour, name in ((2, computed_colour, "recompute"), (1, loaded_colour, "kvstore hit")):
            seconds = [row[column] for row in rows]
            axes.plot(tokens, seconds, color=colour, marker="o", linewidth=2.5)
            axes.annotate(
                f"{name}: {seconds[-1]:.2g} s", (tokens[-1], seconds[-1]), (-8, 8), color=colour,
                textcoords="offset points", ha="right", fontweight="bold",
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xticks(tokens)
        axes.set_xlabel("prompt length in tokens", color=text)
        axes.set_ylabel("time to first token in s", color=text)
        axes.tick_params(colors=text)
        axes.grid(axis="y", color=grid)
        axes.spines[:].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
