"""The client for event loops: the flows of `sync`, driven by awaits; copies run in the loop's threads.

Made and used in one event loop. Semantics, names and arguments are those of `kvstore.client.sync`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.client import calls
from kvstore.client.calls import Call, Flow
from kvstore.client.checks import (
    check_blocks,
    check_deadline,
    check_device,
    check_hint,
    check_keep,
    check_names,
    check_out,
    check_owner,
    check_parent,
    check_readers,
    check_speed,
    check_token,
    check_token_ids,
    check_ttl,
    no_lease,
    no_room,
    recompute_s,
    socket_path,
    with_wait,
)
from kvstore.client.connection import Backoff, BaseConnection
from kvstore.client.leases import Buffer, Lease, PutResult, Reservation
from kvstore.client.prompts import Prompts
from kvstore.client.protocol import POST_WAIT_S, Maps
from kvstore.errors import (
    DeniedError,
    KVStoreError,
    MisuseError,
    RemoteProtocolError,
    TierError,
    UnavailableError,
)
from kvstore.types import Key, Layout, check_keys, check_tenant
from kvstore.wire import messages as m

T = TypeVar("T")

_RECEIVE_BYTES = 256 << 10
_IDLE_LINKS = 64
_WATCH_EVERY_S = 0.1
_QUEUE_FULL_S = 0.002


class AsyncConnection(BaseConnection):
    """One connection on the running loop."""

    def __init__(self, token: str, maps: Maps) -> None:
        super().__init__(token, maps, socket.SOCK_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._watched = False

    async def connect(self, path: str) -> None:
        """Connects and shakes hands."""
        loop = asyncio.get_running_loop()
        while not self._reach(path):  # noqa: ASYNC110 - nothing tells when there is room
            await asyncio.sleep(_QUEUE_FULL_S)
        with contextlib.suppress(BrokenPipeError):
            await loop.sock_sendall(self._sock, self.session.hello())
        self.session.welcome(await self._receive())

    def _reach(self, path: str) -> bool:
        """Connects; False while the daemon's queue of connections is full, which no poll tells the end of."""
        try:
            self._sock.connect(path)
        except BlockingIOError:
            return False
        return True

    async def call(self, message: Any) -> Any:
        """Sends a request, returns its answer. Any exception, and being cancelled, closes the connection."""
        self._check_usable()
        try:
            self._send(self.session.send(message))
            return await self._receive()
        except BaseException:
            self.close()
            raise

    async def fetch(self, message: Any) -> tuple[Any, int]:
        """Like `call`, for an answer that brings a descriptor; -1 if it brought none."""
        self._check_usable()
        try:
            self._send(self.session.send(message))
            got = -1
            while True:
                await self._readable()
                data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                got = fds[0] if fds else got
                if not data:
                    raise ConnectionResetError("the daemon closed the connection")
                answer = self.session.receive(data)
                if answer is not None:
                    return answer, got
        except BaseException:
            self.close()
            raise

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Closes the connection. To be called in its loop."""
        if self._watched:
            self._unwatch()
        super().close()

    def _send(self, frame: bytes) -> None:
        """Sends a frame behind what waits, as the daemon reads: its answer can't come before that."""
        self._outbox.add(frame)
        self._flush()

    def _watch(self) -> None:
        if self._watched:
            return
        self._watched = True
        try:
            self._loop.call_soon_threadsafe(self._add_writer)
        except RuntimeError:
            # The loop is closed: nobody is left who could send.
            self._give_up()

    def _add_writer(self) -> None:
        if self._watched:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._loop.call_later(POST_WAIT_S, self._end_if_late)

    def _unwatch(self) -> None:
        self._watched = False
        if not self._loop.is_closed():
            self._loop.remove_writer(self._sock.fileno())

    def _writable(self) -> None:
        if self._sending.acquire(blocking=False):
            try:
                done = self._push()
            finally:
                self._sending.release()
            if done:
                self._unwatch()
                self._flush()

    def _end_if_late(self) -> None:
        if self._watched and self._is_late():
            self._give_up()
        elif self._watched:
            self._loop.call_later(_WATCH_EVERY_S, self._end_if_late)

    async def _receive(self) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(self._sock, _RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            answer = self.session.receive(data)
            if answer is not None:
                return answer


class AsyncClient:
    """See `kvstore.client.sync.Client`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        deadline_s: float = 1.0,
        strict: bool = False,
        recompute_tokens_per_s: float | None = None,
    ) -> None:
        self.path = socket_path(url)
        self.deadline_s = check_deadline(deadline_s)
        self.strict = strict
        self.recompute_tokens_per_s = check_speed(recompute_tokens_per_s)
        self._token = check_token(os.environ.get("KVSTORE_TOKEN", "") if token is None else token)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: list[AsyncConnection] = []
        self._maps = Maps()
        self._prompts = Prompts()
        self._backoff = Backoff()
        self._closed = False

    def namespace(self, layout: Layout, owner: str = "", ttl_s: float = 0.0) -> AsyncNamespace:
        """The blocks of one layout. Needs no daemon yet."""
        return AsyncNamespace(self, calls.Scope(layout, check_owner(owner), check_keep(ttl_s), self._prompts))

    async def invalidate(self, model: str = "", revision: str = "") -> int:
        """Deletes the tenant's namespaces of this model and revision."""
        check_names(model, revision)
        return await self.run(lambda c: calls.forget_all(c, model, revision), None, int)

    async def delete_tenant(self, name: str, deadline_s: float = 60.0) -> int:
        """Deletes all that a tenant has stored."""
        name = check_tenant(name)
        deleted: int = await self._attempt(lambda c: calls.delete_tenant(c, name), check_deadline(deadline_s))
        return deleted

    async def explain(self, keys: Sequence[Key], tenant: str = "", model: str = "") -> list[dict[str, Any]]:
        """What the daemon knows of keys. Raises UnavailableError or DeniedError if it does not say."""
        check_keys(keys)
        check_names(model, "")
        owner = check_owner(tenant)
        known: list[dict[str, Any]] = await self._attempt(
            lambda c: calls.explain(c, owner, model, keys), self.deadline_s
        )
        return known

    async def status(self) -> dict[str, Any]:
        """The daemon's state. Raises UnavailableError if it does not answer."""
        state: dict[str, Any] = await self._attempt(calls.status, self.deadline_s)
        return state

    async def control(self, call: str, **arguments: Any) -> dict[str, Any]:
        """See `kvstore.client.sync.Client`."""
        answer: dict[str, Any] = await self._attempt(
            lambda c: calls.control(c, call, arguments), self.deadline_s
        )
        return answer

    async def ping(self) -> None:
        """An empty round trip. Raises UnavailableError if the daemon does not answer."""
        await self._attempt(calls.ping, self.deadline_s)

    async def close(self) -> None:
        """Closes all connections; later calls miss."""
        self._closed = True
        links, self._idle = self._idle, []
        for link in links:
            link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, start: Callable[[Call], Flow], deadline_s: float | None, miss: Callable[[], T]) -> T:
        """Drives a flow; `miss()` when the daemon is away or says no (unless strict)."""
        try:
            deadline_s = self.deadline_s if deadline_s is None else check_deadline(deadline_s)
            result: T = await self._attempt(start, deadline_s)
        except (UnavailableError, DeniedError, TierError) as error:
            return self._missed(error, miss())
        return result

    def _missed(self, error: KVStoreError, miss: T) -> T:
        if self.strict:
            raise error
        if isinstance(miss, PutResult):
            miss.why = miss.why or error.message
        return miss

    async def _attempt(self, start: Callable[[Call], Flow], deadline_s: float) -> Any:
        ends = time.monotonic() + deadline_s
        link, reused = await self._borrow(ends)
        try:
            return await self._drive(link, start, ends)
        except (ConnectionError, RemoteProtocolError) as error:
            if not reused:
                raise self._gone(error) from error
        link = await self._connect(ends)
        try:
            return await self._drive(link, start, ends)
        except (ConnectionError, RemoteProtocolError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> UnavailableError:
        self._backoff.failed(error)
        if isinstance(error, RemoteProtocolError):
            return UnavailableError(f"the daemon at {self.path} refuses: {error.message}", error.hint)
        return UnavailableError(f"no answer from the daemon at {self.path}: {error}", "is it running?")

    async def _borrow(self, ends: float) -> tuple[AsyncConnection, bool]:
        if os.getpid() != self._pid:
            self._reset()
        if self._closed:
            raise UnavailableError("the client is closed")
        while self._idle:
            link = self._idle.pop()
            if not link.closed:
                return link, True
            link.close()
        return await self._connect(ends), False

    def _give_back(self, link: AsyncConnection) -> None:
        if link.pid != os.getpid():
            return
        # A connection that closes takes its leases with it.
        full = len(self._idle) >= _IDLE_LINKS and not link.session.holds
        if self._closed or link.closed or full:
            link.close()
        else:
            self._idle.append(link)

    async def _connect(self, ends: float) -> AsyncConnection:
        self._backoff.check()
        link = AsyncConnection(self._token, self._maps)
        try:
            await asyncio.wait_for(link.connect(self.path), max(ends - time.monotonic(), 0.001))
        except (OSError, RemoteProtocolError) as error:
            link.close()
            raise self._gone(error) from error
        except BaseException:
            link.close()
            raise
        return link

    async def _drive(self, link: AsyncConnection, start: Callable[[Call], Flow], ends: float) -> Any:
        call = Call(
            link.session,
            ends,
            link.post,
            lambda flow, miss: self._resume(link, flow, miss),
            lambda: self._give_back(link),
            _answered,
            link.ended,
        )
        try:
            async with asyncio.timeout(max(ends - time.monotonic(), 0.001)):
                result = await _pump(link, start(call))
        except (MisuseError, DeniedError, TierError):
            self._give_back(link)
            raise
        except (ConnectionError, RemoteProtocolError):
            link.close()
            raise
        except OSError as error:
            link.close()
            raise self._gone(error) from error
        except BaseException:
            link.close()
            raise
        if not call.kept:
            self._give_back(link)
        self._backoff.succeeded()
        return result

    async def _resume(self, link: AsyncConnection, flow: Flow, miss: Any) -> Any:
        try:
            async with asyncio.timeout(self.deadline_s):
                result = await _pump(link, flow)
        except (OSError, RemoteProtocolError, DeniedError) as error:
            link.close()
            return self._missed(UnavailableError(str(error)), miss)
        self._give_back(link)
        return result


async def _answered(value: Any) -> Any:
    return value


async def _pump(link: AsyncConnection, flow: Flow) -> Any:
    """Drives a flow to its end on a connection."""
    reply: Any = None
    failed: Exception | None = None
    try:
        while True:
            step = flow.send(reply) if failed is None else flow.throw(failed)
            failed = None
            if isinstance(step, calls.Post):
                link.post(step.message)
                reply = None
            elif isinstance(step, calls.Work):
                try:
                    reply = await _in_thread(step.call)
                except Exception as error:
                    failed = error
            elif isinstance(step, calls.Fetch):
                reply = await link.fetch(step.message)
            else:
                reply = await link.call(step)
    except StopIteration as end:
        return end.value


async def _in_thread(call: Callable[[], T]) -> T:
    """Runs a copy in a thread. Whoever is cancelled waits for its end: until then it moves bytes."""
    copying = asyncio.get_running_loop().run_in_executor(None, call)
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    failed = copying.exception()
    if cancelled is not None:
        raise cancelled from failed
    return copying.result()


class AsyncNamespace:
    """See `kvstore.client.sync.Namespace`; every method is awaited, leases and rooms work as there."""

    def __init__(self, client: AsyncClient, space: calls.Scope) -> None:
        self.layout = space.layout
        self._space = space
        self._client = client

    async def lookup(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> int:
        """How many leading keys are stored."""
        check_keys(keys if len(keys) < calls.SAMPLE_FROM else keys[:1])
        anew_s = self._anew_s(recompute_tokens_per_s)
        return await self._client.run(
            lambda c: calls.lookup(c, self._space, keys, anew_s, prompt), deadline_s, int
        )

    async def get(
        self,
        keys: Sequence[Key],
        out: Buffer,
        verify: bool = True,
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> int:
        """Copies the longest stored prefix into `out`; the number of good blocks."""
        joined, size = check_keys(keys)
        flat, gpu = check_out(keys, out, self.layout.block_bytes)
        anew_s = self._anew_s(recompute_tokens_per_s)
        return await self._client.run(
            lambda c: calls.get(c, self._space, keys, joined, size, flat, verify, anew_s, gpu, prompt),
            deadline_s,
            int,
        )

    async def put(
        self,
        keys: Sequence[Key],
        blocks: Buffer,
        parent: Key | None = None,
        deadline_s: float | None = None,
        tokens: Any = None,
    ) -> PutResult:
        """Stores blocks."""
        check_keys(keys)
        check_parent(parent)
        said = check_token_ids(tokens, keys, self.layout)
        views, gpu = check_blocks(keys, blocks, self.layout.block_bytes)
        return await self._client.run(
            lambda c: calls.put(c, self._space, keys, views, parent, gpu, said),
            deadline_s,
            lambda: PutResult(denied=len(keys)),
        )

    async def acquire(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        device: int | str | None = None,
        wait_s: float = 0.0,
        prompt: int | None = None,
    ) -> Lease:
        """A lease on the longest prefix that is ready in time; `wait_s`: see `Namespace.acquire`."""
        joined, size = check_keys(keys)
        gpu = check_device(device)
        until_s = with_wait(self._client.deadline_s if deadline_s is None else deadline_s, wait_s)
        anew_s = self._anew_s(recompute_tokens_per_s)
        return await self._client.run(
            lambda c: calls.acquire(c, self._space, keys, joined, size, anew_s, gpu, wait_s, prompt),
            until_s,
            lambda: no_lease(self.layout.block_bytes, gpu),
        )

    async def reserve(
        self,
        keys: Sequence[Key],
        parent: Key | None = None,
        deadline_s: float | None = None,
        device: int | str | None = None,
        tokens: Any = None,
    ) -> Reservation:
        """Slots to fill; `await room.commit()` makes them readable."""
        check_keys(keys)
        check_parent(parent)
        said = check_token_ids(tokens, keys, self.layout)
        gpu = check_device(device)
        lost = PutResult(denied=len(keys), why="the daemon did not answer")

        async def lost_again(_: bytes) -> PutResult:
            return lost

        def nothing() -> Reservation:
            return no_room(self.layout.block_bytes, lost, lost_again, gpu)

        return await self._client.run(
            lambda c: calls.reserve(c, self._space, keys, parent, gpu=gpu, tokens=said), deadline_s, nothing
        )

    async def handoff(self, keys: Sequence[Key], deadline_s: float | None = None) -> int:
        """Writes the stored prefix through to the network tier; how many leading blocks are there."""
        check_keys(keys)
        return await self._client.run(lambda c: calls.hand_off(c, self._space, keys), deadline_s, int)

    async def prefetch(self, keys: Sequence[Key], device: int | str | None = None) -> int:
        """Starts bringing the stored prefix into DRAM, or into the daemon's pool on a GPU."""
        gpu = check_device(device)
        return await self._count(m.Prefetch, keys, "" if gpu is None else gpu.uuid)

    async def pin(self, keys: Sequence[Key], ttl_s: float) -> int:
        """Keeps the stored prefix from eviction for `ttl_s`."""
        return await self._count(m.Pin, keys, check_ttl(ttl_s))

    async def unpin(self, keys: Sequence[Key]) -> int:
        """Undoes `pin`."""
        return await self._count(m.Unpin, keys)

    async def hint(
        self,
        keys: Sequence[Key],
        *,
        next_use_s: float | None = None,
        closed: bool = False,
        priority: int = 0,
    ) -> int:
        """Says what is expected of the stored prefix; how many blocks that is."""
        return await self._count(m.Hint, keys, *check_hint(next_use_s, closed, priority))

    async def invalidate(self, keys: Sequence[Key] | None = None) -> int:
        """Makes these keys misses; None: the whole namespace."""
        if keys is None:
            return await self._client.run(lambda c: calls.forget(c, self._space), None, int)
        return await self._count(m.Invalidate, keys)

    async def publish(self, tenants: Sequence[str]) -> bool:
        """Lets these tenants read the namespace, and no others."""
        readers = check_readers(tenants)
        return await self._client.run(lambda c: calls.publish(c, self._space, readers), None, bool)

    async def _count(self, message: type, keys: Sequence[Key], *more: Any) -> int:
        check_keys(keys)
        return await self._client.run(lambda c: calls.count(c, self._space, message, keys, *more), None, int)

    def _anew_s(self, tokens_per_s: float | None) -> float:
        """What computing a block anew takes (s), by the caller's speed or the client's; 0: nobody knows."""
        return recompute_s(self.layout, check_speed(tokens_per_s) or self._client.recompute_tokens_per_s)
