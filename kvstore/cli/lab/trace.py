"""Commands about traces: record one, summarize one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.cli.lab.options import SkipBadOption, TraceArgument
from kvstore.cli.lab.record import record
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import JsonOption
from kvstore.cli.shared.output import pairs, show

app = Commands(help="Record the requests of a daemon, or summarize a trace.")

app.command()(record)


@app.command()
def info(file: TraceArgument, *, skip_bad: SkipBadOption = False, as_json: JsonOption = False) -> None:
    """Summarize the requests, blocks, tokens and duration of a trace.

    Example: kvstore trace info trace.jsonl
    """
    values = summary(file, skip_bad)
    show(values, as_json, lambda: pairs("trace", values))


def summary(file: Path, skip_bad: bool) -> dict[str, Any]:
    """Returns sums over a trace. `duration_s` is the latest start of a request in any of its sessions.

    Raises KVStoreError for unreadable files.
    """
    from kvstore.lab.traces import Trace  # noqa: PLC0415

    trace = Trace(file, skip_bad)
    sessions = requests = blocks = input_tokens = output_tokens = 0
    unique: set[bytes] = set()
    duration_s = 0.0
    for session in trace.sessions():
        sessions += 1
        for request in session:
            requests += 1
            blocks += len(request.keys)
            unique.update(request.keys)
            input_tokens += request.input_tokens
            output_tokens += request.output_tokens
            duration_s = max(duration_s, request.time_s)
    return {
        "file": str(file),
        "kind": trace.kind,
        "block_tokens": trace.block_tokens,
        "sessions": sessions,
        "requests": requests,
        "blocks": blocks,
        "unique_blocks": len(unique),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "duration_s": duration_s,
        "bad_lines": len(trace.skipped),
    }
