"""Prints the report of a check: as aligned text, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.tier_sizes import format_size

if TYPE_CHECKING:
    from kvstore_vllm.check import GroupReport, Report


def as_json(report: Report) -> str:
    """Returns the report as one JSON object. Sizes are in bytes."""
    values = asdict(report)
    values["refusals"] = [{"reason": reason, "hint": hint} for reason, hint in report.refusals]
    return json.dumps({"served": report.served, **values})


def as_text(report: Report) -> str:
    """Returns the report for people."""
    parts = [_head(report)]
    if report.groups:
        parts += [_groups(report), _engine(report)]
    if report.prompts:
        parts.append(_prompts(report))
    parts.append(_settings(report) if report.served else _refusals(report))
    return "\n\n".join(parts)


def _head(report: Report) -> str:
    shards = f"{report.tensor_parallel} tensor-parallel x {report.pipeline_parallel} pipeline"
    return table(
        [
            ["model", f"{report.model} ({report.architecture}, {report.dtype})"],
            ["shards", shards],
            ["result", "served" if report.served else "refused"],
        ],
        "ll",
    )


def _groups(report: Report) -> str:
    head = ["group", "kind", "layers", "window", "block tokens", "block", "block a shard", "a token"]
    rows = [_group(number, group) for number, group in enumerate(report.groups)]
    total = sum(group.token_bytes for group in report.groups)
    layers = sum(group.layers for group in report.groups)
    rows.append(["all", "", f"{layers:,}", "", "", "", "", _size(total)])
    return table([head, *rows], "llrrrrrr")


def _group(number: int, group: GroupReport) -> list[str]:
    shards = sorted(set(group.shard_bytes))
    return [
        str(number),
        group.kind,
        f"{group.layers:,}",
        f"{group.window_tokens:,}" if group.window_tokens else "-",
        f"{group.block_tokens:,}",
        _size(group.block_bytes),
        " to ".join(_size(size) for size in dict.fromkeys((shards[0], shards[-1]))),
        _size(group.token_bytes),
    ]


def _engine(report: Report) -> str:
    return (
        f"vLLM has {report.engine_blocks:,} blocks per GiB of a worker's KV memory. "
        f"A prefix ends at a multiple of {report.alignment_tokens:,} tokens."
    )


def _prompts(report: Report) -> str:
    tiers = [("DRAM", report.dram_bytes), ("NVMe", report.nvme_bytes)]
    head = ["prompt", "stored", *(f"in {_size(limit)} {name}" for name, limit in tiers)]
    rows = [
        [
            f"{each.tokens:,}",
            _size(each.stored_bytes),
            *(f"{count:,}" if each.stored_bytes else "-" for count in (each.dram, each.nvme)),
        ]
        for each in report.prompts
    ]
    return table([head, *rows], "rrrr")


def _settings(report: Report) -> str:
    return f"settings\n  --kv-transfer-config '{json.dumps(report.connector)}'"


def _refusals(report: Report) -> str:
    return "\n".join(f"refused  {reason}\n  hint   {hint}" for reason, hint in report.refusals)


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Returns rows as aligned columns. `align`: `l` or `r` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
