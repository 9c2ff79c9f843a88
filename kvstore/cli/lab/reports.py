"""Renders reports of the lab as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape

from kvstore.cli.shared.output import cell, percent, table
from kvstore.config import format_size

if TYPE_CHECKING:
    from kvstore.lab.compare import Comparison
    from kvstore.lab.fleet.report import FleetPoint, FleetReport
    from kvstore.lab.recommendation import Recommendation
    from kvstore.lab.report import Point, Report, TraceInfo


def report_table(report: Report) -> Group:
    """Returns a table with one row per capacity and policy, below a summary of the trace."""
    bounds = {bound.capacity: bound.hit_ratio for bound in report.bounds}
    many = len({p.policy for p in report.points}) > 1
    shown = table(("capacity", "size", "policy"))
    for name in ("hits", "bound", *(("of NVMe", "written", "drives/day") if report.two_tiers else ())):
        shown.add_column(name, justify="right", no_wrap=True)
    last = ""
    for p in sorted(report.points, key=lambda p: sum(p.blocks_by_tier.values())):
        if many and last and last != p.capacity:
            shown.add_section()
        cells = [percent(p.hit_ratio), percent(bounds.get(p.capacity))]
        if report.two_tiers:
            written = (p.written_per_served or {}).get("nvme")
            share = percent(p.share_by_tier.get("nvme"))
            cells += [share, _number(written), _number(p.drive_writes_per_day)]
        size = " + ".join(map(format_size, p.bytes_by_tier.values()))
        new = p.capacity != last
        shown.add_row(p.capacity if new else "", size if new else "", p.policy, *cells)
        last = p.capacity
    notes = ["hits and bound: share of all input tokens"]
    if report.two_tiers:
        notes.append(
            "of NVMe: share of the hits; written: NVMe bytes per byte served; drives/day: drive writes"
        )
    notes += _denied(report.points)
    head = _head(report.trace, report.settings.block_tokens)
    return Group(*head, shown, *(f"[dim]{note}[/dim]" for note in notes))


def fleet_table(report: FleetReport) -> Group:
    """Returns a table with one row per fleet, below a summary of the trace and of the load."""
    settings = report.settings
    shown = table(("nodes", "routing", "network"), whole=("routing", "network"))
    for name in ("hits", "of network", "at best", "per request", "TTFT p50", "p99", "busy"):
        shown.add_column(name, justify="right", no_wrap=True)
    last = 0
    for p in report.points:
        if last and last != p.nodes:
            shown.add_section()
        of_network = p.network_hit_ratio / p.hit_ratio if p.hit_ratio else None
        networked = p.network != "none"
        cells = [
            percent(p.hit_ratio),
            percent(of_network) if networked else "-",
            percent(p.best_hit_ratio),
            format_size(p.network_bytes_per_request) if networked else "-",
            cell("ttft_s", p.ttft_p50_s),
            cell("ttft_s", p.ttft_p99_s),
            percent(p.busy_ratio, 1),
        ]
        nodes = f"{p.nodes:,}" + (f", {p.decode_nodes:,} decode" if p.decode_nodes else "")
        shown.add_row(nodes if p.nodes != last else "", p.routing, escape(p.network), *cells)
        last = p.nodes
    load = "every fleet has the same load"
    if settings.copies_per_node:
        load = f"every node has {100 * settings.copies_per_node:g} % of this load"
    load += f"; {percent(settings.common_block_ratio)} of the accesses are to blocks common to all copies"
    notes = [
        "hits: share of all input tokens; of network: share of the hits; at best: one cache for all",
        "per request: network bytes; TTFT: time to the first token; busy: time in which a node works",
        *_denied(report.points),
    ]
    head = _head(report.trace, settings.block_tokens)
    return Group(*head, load, shown, *(f"[dim]{note}[/dim]" for note in notes))


def recommendation_page(page: Recommendation) -> Group:
    """Returns the settings, what they save and wear, and a table of everything tried."""
    sizing, answer, speeds = page.sizing, page.sizing.answer, page.speeds
    report = sizing.report
    settings = table(("setting", "value"))
    for tier, limit in sizing.limits_bytes.items():
        settings.add_row(f"{tier}.limit", format_size(limit))
    settings.add_row("policy.eviction", answer.policy)
    if report.two_tiers and "nvme" in sizing.limits_bytes:
        options = report.settings.options
        settings.add_row("nvme.write_policy", options["write_policy"])
        settings.add_row("nvme.admission", options["admission"])
        settings.add_row("nvme.write_budget", options["write_budget"])
    worth = table(("effect", "value"))
    best = report.trace.best_hit_ratio
    worth.add_row("tokens served", f"{percent(answer.hit_ratio)}, at best {percent(best)}")
    if page.gpu_s_per_hour is not None:
        worth.add_row("prefill saved", f"{page.gpu_s_per_hour:,.0f} GPU seconds an hour")
    if sizing.cost is not None:
        worth.add_row("cost", f"{sizing.cost:,.2f}")
    if "nvme" in sizing.limits_bytes:
        worth.add_row("hits on NVMe", percent(answer.share_by_tier["nvme"]))
        if page.nvme_loads_bytes_per_s is not None and page.nvme_writes_bytes_per_day is not None:
            worth.add_row(
                "loaded from NVMe", f"{format_size(round(page.nvme_loads_bytes_per_s))}/s on average"
            )
            worth.add_row("written to NVMe", f"{format_size(round(page.nvme_writes_bytes_per_day))} a day")
            worth.add_row("drive writes", f"{_number(answer.drive_writes_per_day)} of the limit a day")
    notes = [
        f"with {format_size(round(page.token_bytes))} of KV per token, {speeds.prefill_tokens_per_s:,.0f} "
        f"tokens/s of prefill, {format_size(round(speeds.nvme_bytes_per_s))}/s from NVMe",
        f"searched {sizing.searched}",
    ]
    if page.nvme_tokens_per_s < speeds.prefill_tokens_per_s:
        notes.append(
            f"[yellow]NVMe loads {page.nvme_tokens_per_s:,.0f} tokens/s, which is slower than prefill: "
            "engines that report their speed do not wait for it[/yellow]"
        )
    return Group(settings, worth, *notes, "", report_table(report))


def comparison_table(both: Comparison, a: str, b: str) -> Group:
    """Returns a table with one row per pair of results, below the differing settings."""
    shown = table(("policy", "capacity"))
    for name in (escape(a), escape(b), "points"):
        shown.add_column(name, justify="right")
    for pair in both.pairs:
        ratios = [percent(_ratio(pair.a)), percent(_ratio(pair.b))]
        points = "-" if pair.points is None else f"{pair.points:+.2f}"
        shown.add_row(pair.policy, pair.capacity, *ratios, points)
    differing = [escape(f"{name} differs: {x}, {y}") for name, (x, y) in both.differing.items()]
    return Group(*differing, shown)


def _denied(points: Sequence[Point] | Sequence[FleetPoint]) -> list[str]:
    denied = sum(p.denied_blocks for p in points)
    why = f"[yellow]{denied:,} blocks were denied: DRAM is too small for the longest prompts[/yellow]"
    return [why] if denied else []


def _head(trace: TraceInfo, block_tokens: int) -> list[str]:
    lines = [
        f"{escape(trace.name)}: {trace.requests:,} requests, {trace.accesses:,} accesses to "
        f"{trace.unique_blocks:,} blocks of {block_tokens} tokens; "
        f"at best {percent(trace.best_hit_ratio)} of the tokens"
    ]
    if trace.skipped_lines:
        lines.append(f"[yellow]{trace.skipped_lines} bad lines skipped[/yellow]")
    return lines


def _ratio(point: Point | None) -> float | None:
    return point.hit_ratio if point else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
