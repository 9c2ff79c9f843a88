"""The command that records what a running daemon is asked for."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, url_of
from kvstore.cli.shared.tables import pairs
from kvstore.client.trace_recording import Part, trace_line
from kvstore.client.trace_recording import record as parts_of
from kvstore.config import parse_duration, parse_size
from kvstore.errors import KVStoreError, MisuseError

_T = TypeVar("_T")


@dataclass(slots=True)
class _Count:
    """What came of a recording so far."""

    requests: int = 0
    blocks: int = 0
    dropped: int = 0
    file_bytes: int = 0


def record(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to; must not be there yet.")
    ],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long.")] = "60s",
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="Most that file, and daemon's memory, take.")
    ] = "64MiB",
    as_json: JsonOption = False,
) -> None:
    """Record what a running daemon is asked for, as a trace that `replay` reads: hashed keys, no content.

    Keys are hashed under a secret that ends with the recording. For operators, one at a time. Meanwhile
    look-ups of 512 keys or more ask for all of them, and not for every so many first.

    Example: kvstore trace record --out trace.jsonl --for 10m
    """
    seconds, most = _option("--for", parse_duration, duration), _option("--max-bytes", parse_size, max_bytes)
    count = _Count()
    with _progress(hidden=as_json and not sys.stderr.isatty()) as bar:
        task = bar.add_task("record", total=seconds, requests=0, dropped=0)

        def progress(part: Part) -> None:
            done = min(part.passed_s, seconds)
            bar.update(task, completed=done, requests=count.requests, dropped=count.dropped)

        try:
            asyncio.run(_write(url_of(socket), out, seconds, most, count, progress))
        except KeyboardInterrupt:
            typer.echo("interrupted: the file has what came until then", err=True)
    shown = {
        "file": str(out),
        "requests": count.requests,
        "blocks": count.blocks,
        "dropped_requests": count.dropped,
        "written_bytes": count.file_bytes,
    }
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        Console().print(pairs("record", shown))


async def _write(
    url: str, out: Path, seconds: float, most: int, count: _Count, progress: Callable[[Part], None]
) -> None:
    """Writes the lines of a recording as they come, up to `most` bytes. Raises MisuseError if it can't."""
    import aiofiles  # noqa: PLC0415 - a daemon in an engine's environment does without

    beyond = block_tokens = 0
    async with aclosing(parts_of(url, seconds, most)) as parts:
        # The daemon has agreed: a refusal leaves no file behind.
        progress(await anext(parts))
        try:
            async with aiofiles.open(out, "xb") as file:
                async for part in parts:
                    for asked in part.requests:
                        # A trace has one block size, and a layout may leave it out: then blocks are counted.
                        block_tokens = block_tokens or asked.block_tokens or 1
                        line = trace_line(asked, block_tokens)
                        if count.file_bytes + len(line) > most:
                            beyond += 1
                            continue
                        await file.write(line)
                        count.requests += 1
                        count.blocks += len(asked.hashes)
                        count.file_bytes += len(line)
                    await file.flush()
                    count.dropped = part.dropped + beyond
                    progress(part)
        except FileExistsError:
            raise MisuseError(f"{out} is there already", "name another file") from None
        except OSError as error:
            raise KVStoreError(f"cannot write {out}: {error.strerror}") from None


def _option(name: str, parse: Callable[[object], _T], text: str) -> _T:
    try:
        return parse(text)
    except MisuseError as error:
        raise MisuseError(f"{name}: {error.message}", error.hint) from None


def _progress(hidden: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[requests]} requests, {task.fields[dropped]} dropped"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden,
    )
