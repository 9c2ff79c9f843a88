"""Prints the report of a check: as aligned text, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.model_check import prompts_table, refusals_text, size_text, table

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
        parts.append(prompts_table(report.prompts, report.dram_bytes, report.nvme_bytes))
    parts.append(_settings(report) if report.served else refusals_text(report.refusals))
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
    rows.append(["all", "", f"{layers:,}", "", "", "", "", size_text(total)])
    return table([head, *rows], "llrrrrrr")


def _group(number: int, group: GroupReport) -> list[str]:
    shards = sorted(set(group.shard_bytes))
    return [
        str(number),
        group.kind,
        f"{group.layers:,}",
        f"{group.window_tokens:,}" if group.window_tokens else "-",
        f"{group.block_tokens:,}",
        size_text(group.block_bytes),
        " to ".join(size_text(size) for size in dict.fromkeys((shards[0], shards[-1]))),
        size_text(group.token_bytes),
    ]


def _engine(report: Report) -> str:
    return (
        f"vLLM has {report.engine_blocks:,} blocks per GiB of a worker's KV memory. "
        f"A prefix ends at a multiple of {report.alignment_tokens:,} tokens."
    )


def _settings(report: Report) -> str:
    return f"settings\n  --kv-transfer-config '{json.dumps(report.connector)}'"
