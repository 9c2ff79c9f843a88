"""A recording of what the daemon is asked for, started and fetched over REST: one at a time, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import OPERATOR
from kvstore.admin.schemas.responses import WHOLE, View
from kvstore.client.trace_recording import Part, record, trace_line
from kvstore.errors import KVStoreError

recordings = APIRouter(
    prefix="/v1/recording",
    tags=["trace"],
    dependencies=[OPERATOR],
    responses=documented(401, 403, 429, 503),
)

_MEDIA_TYPE = "application/x-ndjson"


class RecordingWanted(BaseModel):
    """For how long to record, and how much of it to keep."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: Annotated[float, Field(gt=0, le=86400, examples=[600])]
    max_bytes: Annotated[int, Field(ge=65536, le=64 << 20), WHOLE] = 16 << 20


class Recording(View):
    """How far a recording is. `dropped` requests found no room; `problem`: why it ended early."""

    running: bool = False
    passed_s: float = 0.0
    requests: int = 0
    blocks: int = 0
    dropped: int = 0
    problem: str = ""


class Recorder:
    """The recording that runs, or ran last, and its trace so far."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task: asyncio.Task[None] | None = None
        self._trace = bytearray()
        self.state = Recording()

    @property
    def trace(self) -> bytes:
        """What was asked for until now, a line of JSON a request."""
        return bytes(self._trace)

    async def start(self, seconds: float, max_bytes: int) -> None:
        """Forgets the last one and starts. Raises ProblemError if one runs, DeniedError, UnavailableError."""
        if self.state.running:
            raise ProblemError(409, "a recording is running", "DELETE /v1/recording ends it")
        self.state = Recording(running=True)
        parts = record(self._url, seconds, max_bytes, token="")
        try:
            await anext(parts)  # the daemon has agreed
        except KVStoreError:
            self.state.running = False
            raise
        self._trace = bytearray()
        self._task = asyncio.get_running_loop().create_task(self._run(parts, max_bytes))

    async def _run(self, parts: AsyncGenerator[Part, None], max_bytes: int) -> None:
        state, beyond, block_tokens = self.state, 0, 0
        try:
            async with aclosing(parts):
                async for part in parts:
                    for asked in part.requests:
                        block_tokens = block_tokens or asked.block_tokens or 1
                        line = trace_line(asked, block_tokens)
                        if len(self._trace) + len(line) > max_bytes:
                            beyond += 1
                            continue
                        self._trace += line
                        state.requests += 1
                        state.blocks += len(asked.hashes)
                    state.passed_s, state.dropped = part.passed_s, part.dropped + beyond
        except KVStoreError as error:
            state.problem = str(error)
        finally:
            state.running = False

    async def end(self) -> None:
        """Ends the recording, and keeps what it has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _recorder(request: Request) -> Recorder:
    recorder: Recorder = request.app.state.recorder
    return recorder


Here = Annotated[Recorder, Depends(_recorder)]


@recordings.put("", status_code=202, responses=documented(400, 409, 413, 422))
async def start_recording(recorder: Here, wanted: RecordingWanted) -> Recording:
    """Records what clients ask for, as a trace for `kvstore lab`: hashed keys, no content."""
    await recorder.start(wanted.seconds, wanted.max_bytes)
    return recorder.state


@recordings.get("")
async def show_recording(recorder: Here) -> Recording:
    """How far the recording is that runs, or ran last."""
    return recorder.state


@recordings.get(
    "/trace",
    response_class=Response,
    responses={200: {"content": {_MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def fetch_trace(recorder: Here) -> Response:
    """The trace so far: a line of JSON a request, as `kvstore lab record` writes it."""
    return Response(recorder.trace, media_type=_MEDIA_TYPE)


@recordings.delete("")
async def end_recording(recorder: Here) -> Recording:
    """Ends the recording. Its trace can be fetched until the next one starts."""
    await recorder.end()
    return recorder.state
