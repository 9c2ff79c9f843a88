"""Records the requests to a daemon, over a connection of its own. Not covered: replays (`kvstore lab`)."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.client.aio import AsyncConnection
from kvstore.client.calls.scope import checked
from kvstore.client.checks import check_token, socket_path
from kvstore.client.extents import Maps
from kvstore.client.unavailable import unavailable
from kvstore.errors import RemoteProtocolError
from kvstore.socket_paths import find_daemon
from kvstore.wire import messages as m

_ANSWER_WITHIN_S = 5.0
_READ_EVERY_S = 0.5
_MUCH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request: seconds since the recording began, tokens per block (0: unknown), hashes of its keys."""

    time_s: float
    block_tokens: int
    hashes: list[int]


@dataclass(frozen=True, slots=True)
class Part:
    """The requests since the last part. `dropped`: requests lost so far because the buffer was full.

    `passed_s`: seconds since the recording began.
    """

    requests: list[RecordedRequest]
    dropped: int
    passed_s: float


async def record(
    url: str | None, seconds: float, max_bytes: int, token: str | None = None
) -> AsyncGenerator[Part, None]:
    """Yields the parts of a recording of `seconds` seconds. The daemon buffers at most `max_bytes` bytes.

    Yields an empty part as soon as the daemon records. Closing the generator ends the recording. Raises
    DeniedError if the daemon refuses, UnavailableError if it is away.
    """
    path = socket_path(url) or str(find_daemon())
    token = check_token(os.environ.get("KVSTORE_TOKEN", "") if token is None else token)
    connection = AsyncConnection(token, Maps())
    try:
        await connection.connect(path, time.monotonic() + _ANSWER_WITHIN_S)
        await _call(connection, m.RecordStart(0, seconds, max_bytes))
        began, ended = time.monotonic(), False
        yield Part([], 0, 0.0)
        while not ended:
            answer = await _call(connection, m.RecordRead(0))
            ended = answer.ended
            requests = list(_requests(answer.requests))
            yield Part(requests, answer.dropped, time.monotonic() - began)
            # The size of an answer is bounded: after a long one, more requests may wait.
            await asyncio.sleep(_READ_EVERY_S if len(answer.requests) < _MUCH_BYTES else 0)
    except (OSError, RemoteProtocolError) as error:
        raise unavailable(path, error) from None
    finally:
        connection.close()


def trace_line(request: RecordedRequest, block_tokens: int) -> bytes:
    """Returns a request as a line of a trace file for `kvstore lab`."""
    row = {
        "timestamp": round(1000 * request.time_s, 3),
        "input_length": block_tokens * len(request.hashes),
        "output_length": 0,
        "block_tokens": block_tokens,
        "hash_ids": request.hashes,
    }
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


async def _call(connection: AsyncConnection, message: Any) -> Any:
    return checked(await connection.call(message, time.monotonic() + _ANSWER_WITHIN_S))


def _requests(data: bytes) -> Iterator[RecordedRequest]:
    at = 0
    while at < len(data):
        time_s, block_tokens, n = m.REQUEST_RECORD.unpack_from(data, at)
        at += m.REQUEST_RECORD.size
        yield RecordedRequest(time_s, block_tokens, np.frombuffer(data, "<u8", n, at).tolist())
        at += 8 * n
