"""Plots a report of fleets against their number of nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.lab.fleet.report import FleetPoint, FleetReport
from kvstore.lab.plots import COLOURS, MARKS, draw_panels

_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MIB = 1 << 20


def draw(report: FleetReport, path: Path) -> None:
    """Plots hits, network bytes and times to the first token by nodes. Raises the errors of `plots.draw`."""
    panels = [partial(_lines, report, "Tokens served, %", lambda p: 100 * p.hit_ratio)]
    if any(p.network != "none" for p in report.points):
        panels.append(partial(_lines, report, "Network bytes per request, MiB", _network_mib))
    panels += [
        partial(_lines, report, "Time to the first token, median, s", lambda p: p.ttft_p50_s),
        partial(_lines, report, "Time to the first token, 99th percentile, s", lambda p: p.ttft_p99_s),
    ]
    load = report.settings.copies_per_node
    each = f"{100 * load:g} % of it a node" if load else f"{report.points[0].copies:g} copies of it"
    draw_panels(path, f"{report.trace.name}, {each}: routing and network tier by number of nodes", panels)


def _network_mib(point: FleetPoint) -> float | None:
    return None if point.network == "none" else point.network_bytes_per_request / _MIB


def _lines(report: FleetReport, title: str, value: Callable[[FleetPoint], float | None], axes: Any) -> None:
    """Draws a line for each routing (colour) and network tier (dashes)."""
    routings = list(dict.fromkeys(p.routing for p in report.points))
    networks = list(dict.fromkeys(p.network for p in report.points))
    sizes = sorted({p.nodes for p in report.points})
    for routing in routings:
        for network in networks:
            mine = [p for p in report.points if (p.routing, p.network) == (routing, network)]
            xy = sorted((p.nodes, y) for p in mine if (y := value(p)) is not None)
            if not xy:
                continue
            which = routings.index(routing)
            axes.plot(
                [x for x, _ in xy],
                [y for _, y in xy],
                color=COLOURS[which % len(COLOURS)],
                marker=MARKS[which % len(MARKS)],
                linestyle=_DASHES[networks.index(network) % len(_DASHES)],
                label=f"{routing}, network {network}",
            )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)
    axes.set_title(title)
    axes.legend(loc="best", fontsize=8, handlelength=3.5)
