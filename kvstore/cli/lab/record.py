"""The command that records requests of a running daemon as a trace."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TextColumn
from typer import Option

from kvstore.cli.shared.options import DaemonOptions, named, url_of
from kvstore.cli.shared.output import pairs, progress_bar
from kvstore.client.trace_recording import Part, trace_line
from kvstore.client.trace_recording import record as parts_of
from kvstore.config import parse_duration, parse_size
from kvstore.errors import KVStoreError, MisuseError


@dataclass(slots=True)
class _Count:
    """Totals of a recording so far."""

    file: str
    requests: int = 0
    blocks: int = 0
    dropped_requests: int = 0
    written_bytes: int = 0


def record(
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="File to write; must not exist.")],
    *,
    duration: Annotated[str, Option("--for", metavar="TIME", help="Duration of the recording.")] = "60s",
    max_bytes: Annotated[
        str,
        Option("--max-bytes", metavar="SIZE", help="Maximum size of the file and of the daemon's buffer."),
    ] = "64MiB",
    daemon: DaemonOptions,
) -> None:
    """Record the requests of a running daemon as a trace.

    The trace contains hashed keys and no content. The secret of the hash is discarded at the end. One
    recording runs at a time. Meanwhile, lookups of 512 keys or more send all keys instead of sampling them
    first. For operators.

    Example: kvstore trace record --out trace.jsonl --for 10m
    """
    seconds, most = named("--for", parse_duration, duration), named("--max-bytes", parse_size, max_bytes)
    count = _Count(str(out))
    totals = TextColumn("{task.fields[requests]} requests, {task.fields[dropped]} dropped")
    with progress_bar(totals, hidden=daemon.as_json and not sys.stderr.isatty()) as bar:
        task = bar.add_task("record", total=seconds, requests=0, dropped=0)

        def progress(part: Part) -> None:
            done = min(part.passed_s, seconds)
            bar.update(task, completed=done, requests=count.requests, dropped=count.dropped_requests)

        try:
            asyncio.run(_write(url_of(daemon.socket), out, seconds, most, count, progress))
        except KeyboardInterrupt:
            typer.echo("interrupted: the file has the requests up to now", err=True)
    daemon.show(asdict(count), lambda: pairs("record", asdict(count)))


async def _write(
    url: str, out: Path, seconds: float, most: int, count: _Count, progress: Callable[[Part], None]
) -> None:
    """Writes a recording's lines as they arrive, up to `most` bytes. Raises MisuseError, KVStoreError."""
    import aiofiles  # noqa: PLC0415 - the other commands work without it

    oversized = block_tokens = 0
    async with aclosing(parts_of(url, seconds, most)) as parts:
        # Waits for the daemon's acceptance, so that a refusal creates no file.
        progress(await anext(parts))
        try:
            async with aiofiles.open(out, "xb") as file:
                async for part in parts:
                    for request in part.requests:
                        # A trace has one block size. Without one in the layout, a block counts as one token.
                        block_tokens = block_tokens or request.block_tokens or 1
                        line = trace_line(request, block_tokens)
                        if count.written_bytes + len(line) > most:
                            oversized += 1
                            continue
                        await file.write(line)
                        count.requests += 1
                        count.blocks += len(request.hashes)
                        count.written_bytes += len(line)
                    await file.flush()
                    count.dropped_requests = part.dropped + oversized
                    progress(part)
        except FileExistsError:
            raise MisuseError(f"{out} already exists", "name another file") from None
        except OSError as error:
            raise KVStoreError(f"cannot write {out}: {error.strerror}") from None
