"""Commands about traces: recording one, and what a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.lab.record import record
from kvstore.cli.shared.options import JsonOption, show
from kvstore.cli.shared.tables import pairs

app = typer.Typer(no_args_is_help=True, help="Record traces, look at them.")

app.command()(record)


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="Chat requests or agent conversations, JSON lines or .zst.")],
    *,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out lines that are bad, and count them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a trace holds: requests, blocks, how many of these are different, how long it took.

    Example: kvstore trace info trace.jsonl
    """
    values = summary(file, skip_bad)
    show(values, as_json, lambda: pairs("trace", values))


def summary(file: Path, skip_bad: bool) -> dict[str, Any]:
    """Sums over a trace. `duration_s` ends with the last request's start; of conversations, the longest's.

    Raises KVStoreError for what cannot be read.
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
