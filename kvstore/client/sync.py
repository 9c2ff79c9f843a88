"""The blocking client: thread-safe, a deadline on every call, and a miss whenever the daemon is away.

Every call borrows a connection for itself, so a slow call never delays another thread's. After a fork the
child starts with connections of its own. Reconnecting backs off from 50 ms to 2 s, and meanwhile calls miss
at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.client import flows
from kvstore.client.flows import Call, Flow
from kvstore.client.holds import Buffer, Lease, PutResult, Room, as_bytes
from kvstore.client.session import Maps, Session
from kvstore.errors import (
    DeniedError,
    KVStoreError,
    MisuseError,
    RemoteProtocolError,
    TierError,
    UnavailableError,
)
from kvstore.types import Key, Layout, check_keys
from kvstore.wire import messages as m

T = TypeVar("T")

_RECEIVE_BYTES = 256 << 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 2.0
_IDLE_LINKS = 64


def socket_path(url: str | None) -> str:
    """The path in `unix:///path`, or in KVSTORE_SOCKET when url is None. Raises MisuseError otherwise."""
    url = url or os.environ.get("KVSTORE_SOCKET") or "unix:///run/kvstore/kvstore.sock"
    path = url.removeprefix("unix://")
    if not path.startswith("/"):
        raise MisuseError(f"cannot connect to {url!r}", "unix:///absolute/path/of/kvstore.sock")
    if len(os.fsencode(path)) > 107:
        raise MisuseError(
            f"socket path of {len(os.fsencode(path))} bytes: {path}", "the kernel takes 107 at most"
        )
    return path


def check_deadline(deadline_s: float) -> float:
    """The deadline itself. Raises MisuseError unless it is a positive number of seconds."""
    if not 0 < deadline_s < 86400:
        raise MisuseError(f"deadline_s is {deadline_s!r}", "seconds, more than 0 and less than a day")
    return deadline_s


def check_blocks(keys: Sequence[Key], blocks: Buffer, block_bytes: int) -> list[memoryview]:
    """One flat view a key. Raises MisuseError when number or size of the blocks do not fit."""
    if hasattr(blocks, "ndim"):
        blocks = as_bytes(blocks, "blocks", len(keys) * block_bytes)
        return [blocks[i * block_bytes : (i + 1) * block_bytes] for i in range(len(keys))]
    if len(blocks) != len(keys):
        raise MisuseError(f"{len(blocks)} blocks for {len(keys)} keys", "one block a key")
    return [as_bytes(block, f"block {i}", block_bytes) for i, block in enumerate(blocks)]


def check_out(keys: Sequence[Key], out: Buffer, block_bytes: int) -> memoryview:
    """`out` as flat writable bytes with room for all keys. Raises MisuseError otherwise."""
    return as_bytes(out, "out", len(keys) * block_bytes, writable=True)


class Backoff:
    """When to try again, after so many failures."""

    def __init__(self) -> None:
        self._delay_s = _BACK_OFF_S
        self._until = 0.0

    def check(self) -> None:
        """Raises UnavailableError while it is too early."""
        if time.monotonic() < self._until:
            raise UnavailableError("the daemon is away", "waiting before the next attempt")

    def failed(self) -> None:
        """One more failure."""
        self._until = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, _BACK_OFF_MAX_S)

    def succeeded(self) -> None:
        """The daemon is there."""
        self._delay_s, self._until = _BACK_OFF_S, 0.0


class Link:
    """One blocking connection."""

    def __init__(self, path: str, token: str, maps: Maps, ends: float) -> None:
        self.pid = os.getpid()
        self.session = Session(token, maps)
        self._send_lock = threading.Lock()
        self._timeout_s = -1.0
        self.closed = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._set_timeout(ends)
            self._sock.connect(path)
            self._sock.sendall(self.session.hello())
            self.session.welcome(self._receive(ends))
        except BaseException:
            self._sock.close()
            raise

    def call(self, message: Any, ends: float) -> Any:
        """Sends a request, returns its answer. OSError (timeouts too) or RemoteProtocolError: close it."""
        self._set_timeout(ends)
        with self._send_lock:
            self._sock.sendall(self.session.send(message))
        return self._receive(ends)

    def fetch(self, message: Any, ends: float) -> tuple[Any, int]:
        """Like `call`, for an answer that brings a descriptor; -1 if it brought none."""
        self._set_timeout(ends)
        with self._send_lock:
            self._sock.sendall(self.session.send(message))
        got = -1
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            got = fds[0] if fds else got
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            answer = self.session.receive(data)
            if answer is not None:
                return answer, got

    def post(self, message: Any) -> None:
        """Sends a message that needs no answer; does nothing in another process, or if the link is gone."""
        if os.getpid() == self.pid:
            with self._send_lock, contextlib.suppress(OSError):
                self._sock.sendall(self.session.send(message))

    def close(self) -> None:
        """Closes this process's end."""
        self.closed = True
        self._sock.close()

    def _receive(self, ends: float) -> Any:
        while True:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            answer = self.session.receive(data)
            if answer is not None:
                return answer
            self._set_timeout(ends)

    def _set_timeout(self, ends: float) -> None:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        # A blocking socket with a kernel timeout costs one system call a message; Python's own two more.
        # Setting it costs one too, so a timeout that is nearly right is left alone.
        if not 0.9 * left <= self._timeout_s <= 1.05 * left:
            self._timeout_s = left
            value = struct.pack("ll", int(left), int(left % 1 * 1e6) or 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Client:
    """A client of the daemon at `url` (`unix:///path`; None: KVSTORE_SOCKET, or the default path).

    `deadline_s` bounds every call that does not bring its own. A daemon that is away, late or full makes a
    miss or a denial; with `strict` it raises UnavailableError or DeniedError instead. Misuse always raises.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, deadline_s: float = 1.0, strict: bool = False
    ) -> None:
        self.path = socket_path(url)
        self.deadline_s = check_deadline(deadline_s)
        self.strict = strict
        self._token = token if token is not None else os.environ.get("KVSTORE_TOKEN", "")
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._maps = Maps()
        self._backoff = Backoff()
        self._closed = False

    def namespace(self, layout: Layout) -> Namespace:
        """The blocks of one layout. Needs no daemon yet."""
        return Namespace(self, layout)

    def status(self) -> dict[str, Any]:
        """The daemon's state. Raises UnavailableError if it does not answer."""
        state: dict[str, Any] = self._attempt(flows.status, self.deadline_s)
        return state

    def ping(self) -> None:
        """An empty round trip. Raises UnavailableError if the daemon does not answer."""
        self._attempt(flows.ping, self.deadline_s)

    def close(self) -> None:
        """Closes all connections; later calls miss."""
        with self._lock:
            self._closed = True
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- driving flows

    def run(self, start: Callable[[Call], Flow], deadline_s: float | None, miss: Callable[[], T]) -> T:
        """Drives a flow; `miss()` when the daemon is away or says no (unless strict)."""
        try:
            result: T = self._attempt(
                start, self.deadline_s if deadline_s is None else check_deadline(deadline_s)
            )
        except (UnavailableError, DeniedError, TierError) as error:
            return self._missed(error, miss())
        return result

    def _missed(self, error: KVStoreError, miss: T) -> T:
        if self.strict:
            raise error
        if isinstance(miss, PutResult):
            miss.why = miss.why or error.message
        return miss

    def _attempt(self, start: Callable[[Call], Flow], deadline_s: float) -> Any:
        ends = time.monotonic() + deadline_s
        link, reused = self._borrow(ends)
        try:
            return self._drive(link, start, ends)
        except ConnectionError as error:
            # A daemon that restarted has closed idle connections: that alone is no miss.
            if not reused:
                raise self._gone(error) from error
        link = self._connect(ends)
        try:
            return self._drive(link, start, ends)
        except ConnectionError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> UnavailableError:
        self._backoff.failed()
        return UnavailableError(f"no answer from the daemon at {self.path}: {error}", "is it running?")

    def _drive(self, link: Link, start: Callable[[Call], Flow], ends: float) -> Any:
        call = Call(
            link.session,
            ends,
            link.post,
            lambda flow, miss: self._resume(link, flow, miss),
            lambda: self._give_back(link),
        )
        try:
            result = _pump(link, start(call), ends)
        except (MisuseError, DeniedError, TierError):
            self._give_back(link)
            raise
        except ConnectionError:
            link.close()
            raise
        except (OSError, RemoteProtocolError) as error:
            link.close()
            raise self._gone(error) from error
        except BaseException:
            link.close()
            raise
        if not call.kept:
            self._give_back(link)
        return result

    def _resume(self, link: Link, flow: Flow, miss: Any) -> Any:
        """Drives a later flow of a call that has kept its connection."""
        try:
            return _pump(link, flow, time.monotonic() + self.deadline_s)
        except (OSError, RemoteProtocolError, DeniedError) as error:
            link.close()
            return self._missed(UnavailableError(str(error)), miss)
        finally:
            self._give_back(link)

    def _borrow(self, ends: float) -> tuple[Link, bool]:
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            if self._idle:
                return self._idle.pop(), True
        return self._connect(ends), False

    def _connect(self, ends: float) -> Link:
        self._backoff.check()
        try:
            link = Link(self.path, self._token, self._maps, ends)
        except (OSError, RemoteProtocolError) as error:
            raise self._gone(error) from error
        self._backoff.succeeded()
        return link

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if self._closed or len(self._idle) >= _IDLE_LINKS:
                link.close()
            elif not link.closed:
                self._idle.append(link)


def _pump(link: Link, flow: Flow, ends: float) -> Any:
    """Drives a flow to its end on a connection."""
    reply: Any = None
    try:
        while True:
            step = flow.send(reply)
            if isinstance(step, flows.Post):
                link.post(step.message)
                reply = None
            elif isinstance(step, flows.Work):
                reply = step.call()
            elif isinstance(step, flows.Fetch):
                reply = link.fetch(step.message, ends)
            else:
                reply = link.call(step, ends)
    except StopIteration as end:
        return end.value


class Namespace:
    """The blocks of one layout. All methods may be called from any thread; none raises but for misuse.

    `keys` are one chain in prompt order: each block's parent is the one before it.
    """

    def __init__(self, client: Client, layout: Layout) -> None:
        self.layout = layout
        self._client = client

    def lookup(self, keys: Sequence[Key], deadline_s: float | None = None) -> int:
        """How many leading keys are stored. A promise, not a lease: `acquire` has the last word."""
        check_keys(keys[:1])
        return self._client.run(lambda c: flows.lookup(c, self.layout, keys), deadline_s, int)

    def get(
        self, keys: Sequence[Key], out: Buffer, verify: bool = True, deadline_s: float | None = None
    ) -> int:
        """Copies the longest stored prefix into `out`, (len(keys), block_bytes) writable bytes.

        Returns the number of leading blocks that arrived and matched their checksums; what lies in `out`
        behind them is undefined.
        """
        joined, size = check_keys(keys)
        flat = check_out(keys, out, self.layout.block_bytes)
        return self._client.run(
            lambda c: flows.get(c, self.layout, keys, joined, size, flat, verify), deadline_s, int
        )

    def put(
        self, keys: Sequence[Key], blocks: Buffer, parent: Key | None = None, deadline_s: float | None = None
    ) -> PutResult:
        """Stores blocks: a sequence of buffers of block_bytes each, or one array (len(keys), block_bytes).

        `parent` is the key before keys[0], None for the start of a prompt. Blocks that are there already
        are not written again.
        """
        check_keys(keys)
        views = check_blocks(keys, blocks, self.layout.block_bytes)
        return self._client.run(
            lambda c: flows.put(c, self.layout, keys, views, parent),
            deadline_s,
            lambda: PutResult(denied=len(keys)),
        )

    def acquire(self, keys: Sequence[Key], deadline_s: float | None = None) -> Lease:
        """A lease on the longest prefix that is ready in time: zero-copy, until it is released."""
        joined, size = check_keys(keys)
        return self._client.run(
            lambda c: flows.acquire(c, self.layout, keys, joined, size), deadline_s, self._no_lease
        )

    def reserve(
        self, keys: Sequence[Key], parent: Key | None = None, deadline_s: float | None = None
    ) -> Room:
        """Slots for those keys that are not stored yet, to be filled in place and committed."""
        check_keys(keys)
        lost = PutResult(denied=len(keys), why="the daemon did not answer")

        def nothing() -> Room:
            return Room.on_nothing(self.layout.block_bytes, lost, lambda _: lost)

        return self._client.run(lambda c: flows.reserve(c, self.layout, keys, parent), deadline_s, nothing)

    def prefetch(self, keys: Sequence[Key]) -> int:
        """Starts bringing the stored prefix into DRAM; how many blocks are there or on their way."""
        return self._count(m.Prefetch, keys)

    def pin(self, keys: Sequence[Key], ttl_s: float) -> int:
        """Keeps the stored prefix from eviction for `ttl_s`; how many blocks are kept."""
        if not 0 < ttl_s <= 30 * 86400:
            raise MisuseError(f"ttl_s is {ttl_s!r}", "seconds, more than 0 and at most 30 days")
        return self._count(m.Pin, keys, float(ttl_s))

    def unpin(self, keys: Sequence[Key]) -> int:
        """Undoes `pin`; how many blocks were pinned."""
        return self._count(m.Unpin, keys)

    def invalidate(self, keys: Sequence[Key]) -> int:
        """Makes these keys misses; how many blocks were forgotten."""
        return self._count(m.Invalidate, keys)

    def _count(self, message: type, keys: Sequence[Key], *more: Any) -> int:
        check_keys(keys)
        return self._client.run(lambda c: flows.count(c, self.layout, message, keys, *more), None, int)

    def _no_lease(self) -> Lease:
        return Lease.on_nothing(self.layout.block_bytes)
