"""The HTTP side of the proxy, an ASGI application: passes requests on, and completions by way of a slot."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvstore_llamacpp.proxy.completions import Completions
from kvstore_llamacpp.proxy.llama_server.http_client import Headers, NoAnswerError, exchange
from kvstore_llamacpp.proxy.prompts import SLOT_PATHS, read_prompt, without_reuse
from kvstore_llamacpp.proxy.slots import NO_TOKENS, FullError

_logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STATUS_PATH = "/kvstore/status"
_MOST_BODY_BYTES = 256 << 20
_TAIL_BYTES = 1 << 16
_OF_A_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
_NOT_PASSED_ON = _OF_A_HOP | {b"host", b"content-length", b"expect"}
_EVENTS = b"text/event-stream"
_LOST = "llama-server has ended or does not answer"


@dataclass(slots=True)
class Request:
    """A request that was read in full. `finished`: its answer was sent in full."""

    method: str
    path: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    finished: bool = False

    @property
    def credentials(self) -> Headers:
        """The headers that llama-server checks API keys by."""
        return [each for each in self.headers if each[0] in (b"authorization", b"x-api-key")]


@dataclass(slots=True)
class Passed:
    """What was passed on of an answer: its status, and the end of its body."""

    status: int = 0
    tail: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> None:
        """Notes a piece of the body."""
        self.tail += piece
        if len(self.tail) > 2 * _TAIL_BYTES:
            del self.tail[:-_TAIL_BYTES]


class Proxy:
    """The application. `port`: llama-server's. `keys`: the API keys that it takes; none: it takes all."""

    def __init__(self, port: int, completions: Completions, keys: Iterable[str] = ()) -> None:
        self._port = port
        self._completions = completions
        self._keys = frozenset(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. A client that leaves cancels it in llama-server too."""
        if scope["type"] != "http":
            return
        body = await _read_body(receive)
        if body is None:
            await _error(send, 413, f"a body of more than {_MOST_BODY_BYTES >> 20} MiB")
            return
        query = scope["query_string"]
        target = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
        request = Request(scope["method"], scope["path"], target, list(scope["headers"]), body)
        answering = asyncio.ensure_future(self._answer(request, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not request.finished:
                self._completions.figures.cancelled += 1
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering
        finally:
            answering.cancel()
            leaving.cancel()

    async def _answer(self, request: Request, send: Send) -> None:
        if request.path == STATUS_PATH:
            await _json(send, 200, self._completions.status())
        elif request.method == "POST" and request.path.startswith("/slots/"):
            await _error(send, 403, "the slots belong to kvstore-llama-proxy: it saves and restores them")
        elif request.method == "POST" and request.path in SLOT_PATHS:
            await self._complete(request, send)
        else:
            await self._pass_on(request, send, request.body)

    async def _complete(self, request: Request, send: Send) -> None:
        """Answers by way of a slot. Its tokens are unknown afterwards unless the answer was complete."""
        completions = self._completions
        prompt = read_prompt(request.path, request.body) if self._may(request) else None
        tokens = (
            None if prompt is None else await completions.tokens(prompt, request.body, request.credentials)
        )
        try:
            slot = await completions.take(tokens)
        except FullError as error:
            await _error(send, 503, f"{error}: try again later, or raise --queue")
            return
        kept = False
        try:
            if prompt is None:
                await self._pass_on(request, send, without_reuse(request.body))
                return
            restored = 0
            if tokens is not None and prompt.caches:
                restored = await completions.restore(slot, tokens, request.credentials)
            more = [(b"x-kvstore-restored-tokens", b"%d" % restored)]
            body = prompt.body(request.body, slot.number)
            slot.tokens = NO_TOKENS if tokens is None else tokens
            passed = await self._pass_on(request, send, body, more)
            if tokens is not None and passed.status == 200 and request.finished:
                completions.keep(slot, tokens, bytes(passed.tail), request.credentials)
                kept = True
        finally:
            if not kept:
                slot.tokens = NO_TOKENS
                completions.give_back(slot)
            if prompt is None:
                # llama-server has chosen slots by itself.
                completions.forget()

    def _may(self, request: Request) -> bool:
        """Returns whether llama-server will take the request's API key."""
        given = dict(request.headers)
        key = given.get(b"authorization") or given.get(b"x-api-key") or b""
        return not self._keys or key.removeprefix(b"Bearer ") in self._keys

    async def _pass_on(self, request: Request, send: Send, body: bytes, more: Headers = ()) -> Passed:
        """Sends a request to llama-server, and its answer to the client."""
        passed = Passed()
        headers = [each for each in request.headers if each[0] not in _NOT_PASSED_ON]
        streamed = False
        try:
            async with exchange(self._port, request.method.encode(), request.target, headers, body) as answer:
                back = [each for each in answer.headers if each[0] not in _OF_A_HOP]
                streamed = any(name == b"content-type" and _EVENTS in value for name, value in back)
                passed.status = answer.status
                await send(_start(answer.status, [*back, *more]))
                async for piece in answer.pieces():
                    passed.add(piece)
                    await send(_piece(piece))
        except NoAnswerError as error:
            _logger.warning("%s %s: %s", request.method, request.path, error)
            if not passed.status:
                await _error(send, 502, f"{_LOST}: {error}")
            elif streamed:
                said = json.dumps({"error": _error_body(502, f"{_LOST}: {error}")}).encode()
                await send(_piece(b"data: " + said + b"\n\n"))
                await send(_piece(b"", more=False))
            # A body that ends before its length tells the client the same.
            return Passed(passed.status or 502)
        request.finished = True
        await send(_piece(b"", more=False))
        return passed


async def _read_body(receive: Receive) -> bytes | None:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(pieces)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > _MOST_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(pieces)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Headers) -> MutableMapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _piece(body: bytes, more: bool = True) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _json(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    await send(
        _start(status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
    )
    await send(_piece(body, more=False))


async def _error(send: Send, status: int, message: str) -> None:
    await _json(send, status, {"error": _error_body(status, message)})


def _error_body(status: int, message: str) -> dict[str, Any]:
    """Returns an error in llama-server's form."""
    kind = {403: "permission_error", 413: "invalid_request_error"}.get(status, "unavailable_error")
    return {"code": status, "message": message, "type": kind}
