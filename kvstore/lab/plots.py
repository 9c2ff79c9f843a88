"""Plots reports as PNG or SVG. Needs matplotlib, an optional dependency: `pip install kvstore[lab]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError, MisuseError
from kvstore.lab.report import Point, Report

SUFFIXES = (".png", ".svg")
Panel = Callable[[Any], None]
"""Draws into one pair of axes."""

_INK, _GRID, _BOUND = "#333333", "#e3e3e3", "#8a8a8a"
# Okabe and Ito's palette is safe for colour blindness; markers differ too, for prints in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#000000")
MARKS = "osD^vPX*"
_TIER_COLOURS = {"dram": "#0072B2", "nvme": "#E69F00"}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.hashsalt": "kvstore",
}


def check(path: Path) -> None:
    """Raises the errors of `draw`, before the replays run."""
    if path.suffix.lower() not in SUFFIXES:
        raise MisuseError(f"cannot plot into {path}", f"a name that ends in {' or '.join(SUFFIXES)}")
    _pyplot()


def draw(report: Report, path: Path) -> None:
    """Plots hit ratio by capacity with Belady's bound; with two tiers also hits by tier and bytes written.

    Raises KVStoreError if matplotlib is absent or the file cannot be written.
    """
    panels: list[Callable[[Any, Report], None]] = [_hits]
    if report.two_tiers:
        panels += [_shares, _written]
    if any(p.drive_writes_per_day is not None for p in report.points):
        panels.append(_wear)
    trace = report.trace
    title = (
        f"{trace.name}: {trace.requests:,} requests, {trace.unique_blocks:,} unique blocks "
        f"of {report.settings.block_tokens} tokens"
    )
    draw_panels(path, title, [_panel(panel, report) for panel in panels])


def _panel(draw: Callable[[Any, Report], None], report: Report) -> Panel:
    return lambda axes: draw(axes, report)


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draws a figure of panels, two in a row. Raises the errors of `draw`."""
    check(path)
    plt = _pyplot()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with plt.rc_context(_STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=(6.2 * columns, 3.9 * rows), squeeze=False, layout="constrained"
        )
        try:
            for axes, panel in zip(grid.flat, panels, strict=False):
                panel(axes)
            for axes in grid.flat[len(panels) :]:
                axes.set_visible(False)
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as e:
            raise KVStoreError(f"cannot write {path}: {e.strerror}", "check the path") from None
        finally:
            plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        raise KVStoreError("plots need matplotlib", "pip install 'kvstore[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot


def _places(report: Report) -> dict[str, float]:
    """Returns the x position of each capacity, smallest first."""
    order = sorted(report.bounds, key=lambda b: b.blocks)
    return {bound.capacity: float(i) for i, bound in enumerate(order)}


def _capacity_axis(axes: Any, report: Report) -> None:
    places = _places(report)
    axes.set_xticks(list(places.values()), list(places), rotation=30 if len(places) > 6 else 0)
    axes.set_xlabel("capacity, DRAM + NVMe" if report.two_tiers else "capacity")
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(0, 1.12 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)


def _policies(report: Report) -> list[str]:
    return list(dict.fromkeys(p.policy for p in report.points))


def _lines(axes: Any, report: Report, value: Callable[[Point], float | None]) -> None:
    places = _places(report)
    for i, policy in enumerate(_policies(report)):
        mine = [(places[p.capacity], value(p)) for p in report.points if p.policy == policy]
        xy = sorted((x, y) for x, y in mine if y is not None)
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        axes.plot([x for x, _ in xy], [y for _, y in xy], color=colour, marker=mark, label=policy)
    _capacity_axis(axes, report)


def _hits(axes: Any, report: Report) -> None:
    places = _places(report)
    bound = sorted((places[b.capacity], 100 * b.hit_ratio) for b in report.bounds)
    xs, ys = [x for x, _ in bound], [y for _, y in bound]
    axes.plot(xs, ys, color=_BOUND, linestyle=(0, (4, 2)), label="Belady's bound")
    axes.fill_between(xs, ys, color=_GRID, alpha=0.35, linewidth=0)
    _lines(axes, report, lambda p: 100 * p.hit_ratio)
    axes.set_title("Tokens served, %")
    axes.legend(loc="best")


def _shares(axes: Any, report: Report) -> None:
    """Draws a stacked bar of tiers for each policy at each capacity."""
    places, policies = _places(report), _policies(report)
    width = 0.8 / len(policies)
    for p in report.points:
        at, bottom = places[p.capacity] + (policies.index(p.policy) - (len(policies) - 1) / 2) * width, 0.0
        for tier, share in p.share_by_tier.items():
            height = 100 * p.hit_ratio * share
            axes.bar(at, height, 0.9 * width, bottom=bottom, color=_TIER_COLOURS[tier], linewidth=0)
            bottom += height
        if len(policies) > 1:
            turned = 90 if len(policies) > 2 else 0
            where = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(p.policy, (at, bottom), **where, fontsize=7.5, rotation=turned)
    _capacity_axis(axes, report)
    for tier, colour in _TIER_COLOURS.items():
        axes.bar(0, 0, color=colour, label={"dram": "from DRAM", "nvme": "from NVMe"}[tier])
    axes.set_title("Hits by tier, % of all tokens")
    axes.legend(loc="upper left", ncols=2)


def _written(axes: Any, report: Report) -> None:
    _lines(axes, report, lambda p: (p.written_per_served or {}).get("nvme"))
    axes.set_title("Bytes written to NVMe per byte served")


def _wear(axes: Any, report: Report) -> None:
    _lines(axes, report, lambda p: p.drive_writes_per_day)
    axes.set_title("Drive writes per day")
