"""Readers of recorded request traces, as JSON lines, plain or compressed by zstd.

Two formats. `requests`, published by the Mooncake project: each line one chat request (`timestamp` in ms,
`input_length`, `output_length`, `hash_ids` of blocks of 512 tokens, or of `block_tokens` where it is given).
The Qwen-Bailian usage traces differ by a `chat_id`, `timestamp` in s and blocks of 16 tokens.
`conversations`, published by the kv-cache-tester project: each line one conversation of a coding agent
(`block_size`, `requests` with `t`, `in`, `out`, `hash_ids`), in which sub-agents are nested and count their
time from their own start.

Only full blocks have keys; the last, partial block of a prompt has none. A session is bad if its times
decrease or a prompt has fewer ids than full blocks. Not covered: tokens, which these traces do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

import zstandard
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import from_json

from kvstore.errors import KVStoreError

CHAT_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
READ_BYTES = 64 << 10
MAX_LINE_BYTES = 256 << 20
MAX_WINDOW_BYTES = 1 << 31
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

Kind: TypeAlias = Literal["requests", "conversations"]


class BadLineError(KVStoreError):
    """A line of a trace is malformed. Other lines may be good."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `keys`: one 32-byte key for each full block of `block_tokens` tokens, in order.

    `time_s` counts from the trace's first request; in a conversation, from the conversation's start.
    Requests of one `session` are sequential.
    """

    time_s: float
    keys: list[bytes]
    input_tokens: int
    output_tokens: int
    block_tokens: int
    session: int


_Id = Annotated[int, Field(ge=0, lt=1 << 64)]
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)


class _Chat(_Row):
    TICKS_PER_S: ClassVar = 1000.0
    timestamp: _Seconds
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]
    block_tokens: Annotated[int, Field(ge=1)] = CHAT_BLOCK_TOKENS


class _BailianChat(_Chat):
    TICKS_PER_S: ClassVar = 1.0
    chat_id: int
    block_tokens: Annotated[int, Field(ge=1)] = BAILIAN_BLOCK_TOKENS


class Call(_Row):
    """One request of the trace. `main`: it is not of a sub-agent. `t`: seconds."""

    t: _Seconds
    tokens_in: _Count = Field(alias="in")
    tokens_out: _Count = Field(alias="out")
    hash_ids: list[_Id]
    model: str = ""
    main: bool = True


class _Agent(_Row):
    t: _Seconds
    requests: list[_Entry]


def _entry_kind(entry: object) -> str:
    return "agent" if isinstance(entry, dict) and "requests" in entry else "call"


_Entry = Annotated[Annotated[Call, Tag("call")] | Annotated[_Agent, Tag("agent")], Discriminator(_entry_kind)]


class _Conversation(_Row):
    block_size: Annotated[int, Field(ge=1)]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0
    requests: list[_Entry]


@dataclass(frozen=True, slots=True)
class TraceSession:
    """The sequential requests of one client. Iteration makes requests with keys, one at a time.

    `calls`: the same requests without keys. `own_clock`: times count from the start of the session instead of
    the trace. `preamble_tokens`: the tokens of tools and system prompt in main prompts.
    """

    number: int
    block_tokens: int
    calls: Sequence[Call]
    own_clock: bool
    preamble_tokens: int = 0

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Request]:
        last_salt, last_ids, last_keys = b"", list[int](), list[bytes]()
        for call in self.calls:
            # Ids mean something only within a conversation, and two models never share KV.
            salt = f"conversation {self.number} {call.model}".encode() if self.own_clock else b"chat"
            ids = call.hash_ids[: call.tokens_in // self.block_tokens]
            shared = _shared(last_ids, ids) if salt == last_salt else 0
            keys = _chain(salt, last_keys[:shared], ids[shared:])
            yield Request(call.t, keys, call.tokens_in, call.tokens_out, self.block_tokens, self.number)
            last_salt, last_ids, last_keys = salt, ids, keys

    def head(self, n: int) -> TraceSession:
        """Returns this session cut to its first `n` requests."""
        return replace(self, calls=self.calls[:n])


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of equal leading ids."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _chain(salt: bytes, keys: list[bytes], ids: Iterable[int]) -> list[bytes]:
    """Appends a key for each id to `keys`: a hash of the previous key and the id.

    Equal keys therefore mean equal prefixes, even in traces where equal ids do not.
    """
    parent = keys[-1] if keys else blake3(salt).digest()
    for i in ids:
        parent = blake3(parent + i.to_bytes(8, "little")).digest()
        keys.append(parent)
    return keys


class Trace:
    """A trace file. Each iteration reads it from the start, line by line.

    `kind`: the format, detected from the first line. `block_tokens`: tokens of one block. Opening and reading
    raise KVStoreError with the file and the line. `skip_bad`: malformed lines are skipped, and `skipped` has
    their errors since the latest iteration began.
    """

    def __init__(self, path: Path, skip_bad: bool = False) -> None:
        self.path = path
        self.skipped: list[str] = []
        self._skip_bad = skip_bad
        self.kind, self.block_tokens, self._chat_row = self._first()

    def _first(self) -> tuple[Kind, int, type[_Chat]]:
        """Returns format, block size and the row of chats of the first good line."""
        for where, line in self._lines():
            try:
                kind, chat_row = _kind(where, line)
                if kind == "conversations":
                    return kind, _parse(_Conversation, where, line).block_size, chat_row
                return kind, _parse(chat_row, where, line).block_tokens, chat_row
            except BadLineError as e:
                self._skip(e)
        raise KVStoreError(f"{self.path} holds no requests", _FORMATS_HINT)

    def _skip(self, error: BadLineError) -> None:
        if not self._skip_bad:
            raise error
        self.skipped.append(str(error))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.sessions())

    def count_sessions(self) -> int:
        """Returns the number of sessions: the non-blank lines of the file."""
        return sum(1 for _ in self._lines())

    def sessions(self, limit: int | None = None) -> Iterator[TraceSession]:
        """Iterates over the sessions in file order, cut to `limit` requests in total."""
        for session in self._sessions():
            if limit is None:
                yield session
                continue
            if limit <= 0:
                return
            yield session.head(limit)
            limit -= len(session)

    def _sessions(self) -> Iterator[TraceSession]:
        self.skipped = []
        number, clock = 0, _Clock(self._chat_row.TICKS_PER_S)
        for where, line in self._lines():
            try:
                if self.kind == "requests":
                    session = self._chat(number, where, line, clock)
                else:
                    session = self._conversation(number, where, line)
            except BadLineError as e:
                self._skip(e)
                continue
            yield session
            number += 1

    def _chat(self, number: int, where: str, line: bytes, clock: _Clock) -> TraceSession:
        row = _parse(self._chat_row, where, line)
        self._check_size(where, "block_tokens", row.block_tokens)
        call = Call.model_construct(
            t=0.0, tokens_in=row.input_length, tokens_out=row.output_length, hash_ids=row.hash_ids
        )
        _check_ids(where, call, self.block_tokens)
        call.t = clock.seconds_at(where, row.timestamp)
        return TraceSession(number, self.block_tokens, [call], own_clock=False)

    def _conversation(self, number: int, where: str, line: bytes) -> TraceSession:
        row = _parse(_Conversation, where, line)
        self._check_size(where, "block_size", row.block_size)
        calls = sorted(_flatten(where, row.requests), key=lambda call: call.t)
        for call in calls:
            _check_ids(where, call, self.block_tokens)
        preamble_tokens = row.tool_tokens + row.system_tokens
        return TraceSession(number, self.block_tokens, calls, True, preamble_tokens)

    def _check_size(self, where: str, field: str, tokens: int) -> None:
        if tokens != self.block_tokens:
            raise BadLineError(
                f"{where}: {field} is {tokens}, the first line has {self.block_tokens}",
                "one replay has one block size: split the trace",
            )

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Iterates over the non-blank lines, each with its position as text."""
        rest: list[bytes] = []
        size, number = 0, 1
        for chunk in _chunks(self.path):
            head, *more = chunk.split(b"\n")
            rest.append(head)
            size += len(head)
            if size > MAX_LINE_BYTES:
                raise KVStoreError(f"{self.path} line {number} is over {MAX_LINE_BYTES} bytes", _FORMATS_HINT)
            for piece in more:
                line, rest, size = b"".join(rest), [piece], len(piece)
                if line.strip():
                    yield f"{self.path} line {number}", line
                number += 1
        if (line := b"".join(rest)).strip():
            yield f"{self.path} line {number}", line


class _Clock:
    """The trace's clock: monotonic, from the first request."""

    def __init__(self, ticks_per_s: float) -> None:
        self._ticks_per_s = ticks_per_s
        self._start: float | None = None
        self._last = 0.0

    def seconds_at(self, where: str, timestamp: float) -> float:
        """Returns seconds since the first timestamp. Raises BadLineError if the clock decreases."""
        if self._start is None:
            self._start = timestamp
        elif timestamp < self._last:
            raise BadLineError(
                f"{where}: timestamp goes back from {self._last:g} to {timestamp:g}", _ORDER_HINT
            )
        self._last = timestamp
        return (timestamp - self._start) / self._ticks_per_s


def _flatten(
    where: str, entries: Iterable[Call | _Agent], start_s: float = 0.0, main: bool = True
) -> Iterator[Call]:
    """Iterates over all calls, with times from the start of the conversation."""
    last_s = 0.0
    for entry in entries:
        if entry.t < last_s:
            raise BadLineError(f"{where}: t goes back from {last_s:g} to {entry.t:g}", _ORDER_HINT)
        last_s = entry.t
        if isinstance(entry, _Agent):
            yield from _flatten(where, entry.requests, start_s + entry.t, main=False)
        else:
            yield entry.model_copy(update={"t": start_s + entry.t, "main": main})


def _check_ids(where: str, call: Call, block_tokens: int) -> None:
    """Raises BadLineError if a full block of the prompt has no id."""
    full = call.tokens_in // block_tokens
    if len(call.hash_ids) < full:
        raise BadLineError(
            f"{where}: {len(call.hash_ids)} hash_ids for {call.tokens_in} tokens",
            f"one for each full block of {block_tokens} tokens: {full}",
        )


_ORDER_HINT = "sort the requests by time"
_FORMATS_HINT = (
    "JSON lines, either chat requests {timestamp, input_length, output_length, hash_ids}, with a chat_id "
    "those of Qwen-Bailian, or agent conversations {block_size, requests: [{t, in, out, hash_ids}]}"
)


def _kind(where: str, line: bytes) -> tuple[Kind, type[_Chat]]:
    try:
        first = from_json(line)
    except ValueError as e:
        raise BadLineError(f"{where} is not JSON: {e}", _FORMATS_HINT) from None
    fields = first if isinstance(first, dict) else {}
    if "requests" in fields and "block_size" in fields:
        return "conversations", _Chat
    if "timestamp" in fields or "input_length" in fields:
        return "requests", _BailianChat if "chat_id" in fields else _Chat
    raise BadLineError(f"{where} has no known trace format", _FORMATS_HINT)


_RowT = TypeVar("_RowT", bound=_Row)


def _parse(model: type[_RowT], where: str, line: bytes) -> _RowT:
    try:
        return model.model_validate_json(line)
    except ValidationError as e:
        error = e.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, error["loc"]))
    if error["type"] == "json_invalid":
        raise BadLineError(f"{where} is not JSON: {error['msg']}", _FORMATS_HINT)
    if error["type"] == "missing":
        raise BadLineError(f"{where} has no field {field}", _FORMATS_HINT)
    raise BadLineError(f"{where}: {field}: {error['msg']}" if field else f"{where}: {error['msg']}")


def _chunks(path: Path) -> Iterator[bytes]:
    """Iterates over pieces of the file, decompressed if necessary."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZSTD_MAGIC))
            file.seek(0)
            pieces = iter(lambda: file.read(READ_BYTES), b"")
            if magic == _ZSTD_MAGIC or path.suffix in (".zst", ".zstd"):
                pieces = _decompressed(path, pieces)
            yield from pieces
    except OSError as e:
        hint = "check the path" if isinstance(e, FileNotFoundError) else ""
        raise KVStoreError(f"cannot read {path}: {e.strerror}", hint) from None


def _decompressed(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    try:
        for piece in pieces:
            rest = piece
            while rest:
                if frame.eof:
                    frame = decompressor.decompressobj()
                yield frame.decompress(rest)
                rest = frame.unused_data
    except zstandard.ZstdError as e:
        raise KVStoreError(f"{path} is not readable as zstd: {e}", "is the file complete?") from None
    if not frame.eof:
        raise KVStoreError(f"{path} ends within its zstd data", "the file is truncated: fetch it again")
