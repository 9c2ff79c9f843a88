"""Trace recording over REST: one recording at a time, kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import OPERATOR
from kvstore.admin.schemas.requests import RecordingWanted
from kvstore.admin.schemas.responses import Recording
from kvstore.client.trace_recording import Part, record, trace_line
from kvstore.errors import KVStoreError

recordings = APIRouter(
    prefix="/v1/recording", tags=["trace"], dependencies=[OPERATOR], responses=documented(401, 403, 429, 503)
)

_MEDIA_TYPE = "application/x-ndjson"


class Recorder:
    """The current or latest recording, and its trace so far."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task: asyncio.Task[None] | None = None
        self._trace = bytearray()
        self.state = Recording()

    @property
    def trace(self) -> bytes:
        """The recorded requests, one JSON line each."""
        return bytes(self._trace)

    async def start(self, seconds: float, max_bytes: int) -> None:
        """Discards the last recording and starts one. Raises ProblemError, DeniedError, UnavailableError."""
        if self.state.running:
            raise ProblemError(409, "a recording is running", "DELETE /v1/recording ends it")
        self.state = Recording(running=True)
        parts = record(self._url, seconds, max_bytes, token="")
        try:
            await anext(parts)  # returns once the daemon has accepted
        except KVStoreError:
            self.state.running = False
            raise
        self._trace = bytearray()
        self._task = asyncio.get_running_loop().create_task(self._run(parts, max_bytes))

    async def _run(self, parts: AsyncGenerator[Part, None], max_bytes: int) -> None:
        state, oversized, block_tokens = self.state, 0, 0
        try:
            async with aclosing(parts):
                async for part in parts:
                    for request in part.requests:
                        block_tokens = block_tokens or request.block_tokens or 1
                        line = trace_line(request, block_tokens)
                        if len(self._trace) + len(line) > max_bytes:
                            oversized += 1
                            continue
                        self._trace += line
                        state.requests += 1
                        state.blocks += len(request.hashes)
                    state.passed_s, state.dropped = part.passed_s, part.dropped + oversized
        except KVStoreError as error:
            state.problem = str(error)
        finally:
            state.running = False

    async def end(self) -> None:
        """Ends the recording and keeps its trace."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _recorder(request: Request) -> Recorder:
    recorder: Recorder = request.app.state.recorder
    return recorder


TheRecorder = Annotated[Recorder, Depends(_recorder)]


@recordings.put("", status_code=202, responses=documented(400, 409, 413, 422))
async def start_recording(recorder: TheRecorder, wanted: RecordingWanted) -> Recording:
    """Records requests of clients as a trace for `kvstore lab`. The trace has hashed keys and no content."""
    await recorder.start(wanted.seconds, wanted.max_bytes)
    return recorder.state


@recordings.get("")
async def show_recording(recorder: TheRecorder) -> Recording:
    """Progress of the current or latest recording."""
    return recorder.state


@recordings.get(
    "/trace",
    response_class=Response,
    responses={200: {"content": {_MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def fetch_trace(recorder: TheRecorder) -> Response:
    """The trace so far, one JSON line per request, in the format of `kvstore lab record`."""
    return Response(recorder.trace, media_type=_MEDIA_TYPE)


@recordings.delete("")
async def end_recording(recorder: TheRecorder) -> Recording:
    """Ends the recording. Its trace can be fetched until the next one starts."""
    await recorder.end()
    return recorder.state
