"""The blocking client: thread-safe, a deadline on every call, and a miss whenever the daemon is away.

Every call borrows a connection for itself, so a slow call never delays another thread's. After a fork the
child starts with connections of its own. Reconnecting backs off from 50 ms to 2 s, and meanwhile calls miss
at once.
"""

from __future__ import annotations

import os
import threading
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
from kvstore.client.connection import Backoff, Connection, pump
from kvstore.client.leases import Buffer, Lease, PutResult, Reservation
from kvstore.client.prompts import Prompts
from kvstore.client.protocol import Maps
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

_IDLE_LINKS = 64


class Client:
    """A client of the daemon at `url` (`unix:///path`; None: KVSTORE_SOCKET, or the default path).

    `deadline_s` bounds every call that does not bring its own. A daemon that is away, late or full makes a
    miss or a denial; with `strict`, a call that was refused as a whole raises UnavailableError or DeniedError
    instead. Blocks that were not stored are counted in `PutResult.denied` either way. Misuse always raises.
    `token` says who asks (None: KVSTORE_TOKEN). `recompute_tokens_per_s` is how fast the engine computes KV:
    blocks that take longer to load than to compute are then left out by `acquire`, `get` and `lookup`.
    """

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
        self._prompts = Prompts()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._maps = Maps()
        self._backoff = Backoff()
        self._closed = False

    def namespace(self, layout: Layout, owner: str = "", ttl_s: float = 0.0) -> Namespace:
        """The blocks of one layout. Needs no daemon yet.

        `owner` is the tenant whose blocks they are, "" for one's own: another's can be read while it
        publishes them to this tenant. `ttl_s` after they were stored, blocks are misses (0: as configured).
        """
        return Namespace(self, calls.Scope(layout, check_owner(owner), check_keep(ttl_s), self._prompts))

    def invalidate(self, model: str = "", revision: str = "") -> int:
        """Deletes the tenant's namespaces of this model and revision, "" for any; how many blocks went.

        Needs the role admin. 0 also when the daemon is away or says no (unless strict).
        """
        check_names(model, revision)
        return self.run(lambda c: calls.forget_all(c, model, revision), None, int)

    def delete_tenant(self, name: str, deadline_s: float = 60.0) -> int:
        """Deletes all that a tenant has stored; how many blocks.

        For its admins, and for operators. Raises DeniedError or UnavailableError if it was not done.
        """
        name = check_tenant(name)
        deleted: int = self._attempt(lambda c: calls.delete_tenant(c, name), check_deadline(deadline_s))
        return deleted

    def explain(self, keys: Sequence[Key], tenant: str = "", model: str = "") -> list[dict[str, Any]]:
        """What the daemon knows of keys, and decided about them lately: a map a key and namespace, or none.

        In the tenant's own namespaces of this model ("": any), for operators in those of `tenant`, "": all.
        Raises UnavailableError or DeniedError if it does not say.
        """
        check_keys(keys)
        check_names(model, "")
        owner = check_owner(tenant)
        known: list[dict[str, Any]] = self._attempt(
            lambda c: calls.explain(c, owner, model, keys), self.deadline_s
        )
        return known

    def status(self) -> dict[str, Any]:
        """The daemon's state. Raises UnavailableError if it does not answer."""
        state: dict[str, Any] = self._attempt(calls.status, self.deadline_s)
        return state

    def control(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Runs an operator command (`kvstore/daemon/operator/commands.py` lists them) and returns its answer.

        Raises DeniedError for what is refused, UnavailableError if the daemon does not answer.
        """
        answer: dict[str, Any] = self._attempt(lambda c: calls.control(c, call, arguments), self.deadline_s)
        return answer

    def ping(self) -> None:
        """An empty round trip. Raises UnavailableError if the daemon does not answer."""
        self._attempt(calls.ping, self.deadline_s)

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
        except (ConnectionError, RemoteProtocolError) as error:
            # A daemon that restarted, or has other tenants now, has closed idle connections: that alone is
            # no miss.
            if not reused:
                raise self._gone(error) from error
        link = self._connect(ends)
        try:
            return self._drive(link, start, ends)
        except (ConnectionError, RemoteProtocolError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> UnavailableError:
        self._backoff.failed(error)
        if isinstance(error, RemoteProtocolError):
            return UnavailableError(f"the daemon at {self.path} refuses: {error.message}", error.hint)
        return UnavailableError(f"no answer from the daemon at {self.path}: {error}", "is it running?")

    def _drive(self, link: Connection, start: Callable[[Call], Flow], ends: float) -> Any:
        call = Call(
            link.session,
            ends,
            link.post,
            lambda flow, miss: self._resume(link, flow, miss),
            lambda: self._give_back(link),
            lambda value: value,
            link.ended,
        )
        try:
            result = pump(link, start(call), ends)
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

    def _resume(self, link: Connection, flow: Flow, miss: Any) -> Any:
        """Drives a later flow of a call that has kept its connection."""
        try:
            return pump(link, flow, time.monotonic() + self.deadline_s)
        except (OSError, RemoteProtocolError, DeniedError) as error:
            link.close()
            return self._missed(UnavailableError(str(error)), miss)
        finally:
            self._give_back(link)

    def _borrow(self, ends: float) -> tuple[Connection, bool]:
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            while self._idle:
                link = self._idle.pop()
                if not link.closed:
                    return link, True
                link.close()
        return self._connect(ends), False

    def _connect(self, ends: float) -> Connection:
        self._backoff.check()
        try:
            link = Connection(self.path, self._token, self._maps, ends)
        except (OSError, RemoteProtocolError) as error:
            raise self._gone(error) from error
        return link

    def _give_back(self, link: Connection) -> None:
        if link.pid != os.getpid():
            return
        with self._lock:
            # A connection that closes takes its leases with it.
            full = len(self._idle) >= _IDLE_LINKS and not link.session.holds
            if self._closed or link.closed or full:
                link.close()
            else:
                self._idle.append(link)


class Namespace:
    """The blocks of one layout. All methods may be called from any thread; none raises but for misuse.

    `keys` are one chain in prompt order: each block's parent is the one before it.
    """

    def __init__(self, client: Client, space: calls.Scope) -> None:
        self.layout = space.layout
        self._space = space
        self._client = client

    def lookup(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> int:
        """How many leading keys are stored. A promise, not a lease: `acquire` has the last word.

        With `recompute_tokens_per_s` (tokens/s; None: the client's), of those that are worth loading.

        `prompt` is for the daemon's hit ratio, in which a prompt counts once: how many whole blocks the
        prompt has for which this is the first question, 0 if it is no first question. None: the client tells
        by the keys. The same keys within a second from the same thread or task are a poll; `acquire` and
        `get` of what was looked up deliver it; `put` and `reserve` end it. Pass it where several processes
        ask for one prompt.
        """
        check_keys(keys if len(keys) < calls.SAMPLE_FROM else keys[:1])
        anew_s = self._anew_s(recompute_tokens_per_s)
        return self._client.run(lambda c: calls.lookup(c, self._space, keys, anew_s, prompt), deadline_s, int)

    def get(
        self,
        keys: Sequence[Key],
        out: Buffer,
        verify: bool = True,
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> int:
        """Copies the longest stored prefix into `out`, (len(keys), block_bytes) writable bytes, or such an
        array in a GPU's memory.

        Returns the number of leading blocks that arrived and matched their checksums; what lies in `out`
        behind them is undefined. `recompute_tokens_per_s`, `prompt`: see lookup.
        """
        joined, size = check_keys(keys)
        flat, gpu = check_out(keys, out, self.layout.block_bytes)
        anew_s = self._anew_s(recompute_tokens_per_s)
        return self._client.run(
            lambda c: calls.get(c, self._space, keys, joined, size, flat, verify, anew_s, gpu, prompt),
            deadline_s,
            int,
        )

    def put(
        self,
        keys: Sequence[Key],
        blocks: Buffer,
        parent: Key | None = None,
        deadline_s: float | None = None,
        tokens: Any = None,
    ) -> PutResult:
        """Stores blocks: a sequence of buffers of block_bytes each, or one array (len(keys), block_bytes).

        All of them may be device arrays of one GPU; what computes these must be over.

        `parent` is the key before keys[0], None for the start of a prompt. Blocks that are there already
        are not written again. `tokens`: the token ids of all blocks, `layout.block_tokens` each, for routers
        that hear from the daemon what is where; None: they hear nothing of these blocks.
        """
        check_keys(keys)
        check_parent(parent)
        said = check_token_ids(tokens, keys, self.layout)
        views, gpu = check_blocks(keys, blocks, self.layout.block_bytes)
        return self._client.run(
            lambda c: calls.put(c, self._space, keys, views, parent, gpu, said),
            deadline_s,
            lambda: PutResult(denied=len(keys)),
        )

    def acquire(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        device: int | str | None = None,
        wait_s: float = 0.0,
        prompt: int | None = None,
    ) -> Lease:
        """A lease on the longest prefix that is ready in time: zero-copy, until it is released.

        `recompute_tokens_per_s`, `prompt`: see lookup. With `device` (0, "cuda:0", a UUID) it is a
        `DeviceLease`, whose blocks are in that GPU's memory: in the daemon's pool there if they can be, else
        brought from DRAM.
        MisuseError if there is no such GPU, or no kvstore[cuda].

        While not even the first block is stored, here or on the network, the call waits for it up to `wait_s`
        (s, on top of the deadline), and 60 s at most: then the lease is empty. So a decode node starts as
        soon as blocks arrive, and asks again for the keys behind those it got.
        """
        joined, size = check_keys(keys)
        gpu = check_device(device)
        until_s = with_wait(self._client.deadline_s if deadline_s is None else deadline_s, wait_s)
        anew_s = self._anew_s(recompute_tokens_per_s)
        return self._client.run(
            lambda c: calls.acquire(c, self._space, keys, joined, size, anew_s, gpu, wait_s, prompt),
            until_s,
            lambda: no_lease(self.layout.block_bytes, gpu),
        )

    def reserve(
        self,
        keys: Sequence[Key],
        parent: Key | None = None,
        deadline_s: float | None = None,
        device: int | str | None = None,
        tokens: Any = None,
    ) -> Reservation:
        """Slots for those keys that are not stored yet, to be filled in place and committed.

        With `device`, a `DeviceReservation`, filled from that GPU and stored in its pool if possible.
        `tokens`: see put.
        """
        check_keys(keys)
        check_parent(parent)
        said = check_token_ids(tokens, keys, self.layout)
        gpu = check_device(device)
        lost = PutResult(denied=len(keys), why="the daemon did not answer")

        def nothing() -> Reservation:
            return no_room(self.layout.block_bytes, lost, lambda _: lost, gpu)

        return self._client.run(
            lambda c: calls.reserve(c, self._space, keys, parent, gpu=gpu, tokens=said), deadline_s, nothing
        )

    def handoff(self, keys: Sequence[Key], deadline_s: float | None = None) -> int:
        """Writes the stored prefix through to the network tier, for another node; returns when it is there.

        How many leading blocks are there: fewer than `keys` if the deadline came first, or blocks are not
        stored here; 0 if the network tier is away.
        """
        check_keys(keys)
        return self._client.run(lambda c: calls.hand_off(c, self._space, keys), deadline_s, int)

    def prefetch(self, keys: Sequence[Key], device: int | str | None = None) -> int:
        """Starts bringing the stored prefix into DRAM; how many blocks are there or on their way.

        With `device`, into the daemon's pool on that GPU, if there is one.
        """
        gpu = check_device(device)
        return self._count(m.Prefetch, keys, "" if gpu is None else gpu.uuid)

    def pin(self, keys: Sequence[Key], ttl_s: float) -> int:
        """Keeps the stored prefix from eviction for `ttl_s`; how many blocks are kept."""
        return self._count(m.Pin, keys, check_ttl(ttl_s))

    def unpin(self, keys: Sequence[Key]) -> int:
        """Undoes `pin`; how many blocks were pinned."""
        return self._count(m.Unpin, keys)

    def hint(
        self,
        keys: Sequence[Key],
        *,
        next_use_s: float | None = None,
        closed: bool = False,
        priority: int = 0,
    ) -> int:
        """Says what is expected of the stored prefix; how many blocks that is. Advice, which may be ignored.

        `next_use_s`: when it will be used again (s from now), if anybody knows. `closed`: its session is
        over. `priority`: -1, 0 or 1. Closed or below 0, blocks that only this chain has make way sooner.
        """
        return self._count(m.Hint, keys, *check_hint(next_use_s, closed, priority))

    def invalidate(self, keys: Sequence[Key] | None = None) -> int:
        """Makes these keys misses; how many blocks were forgotten. None: the whole namespace, for admins."""
        if keys is None:
            return self._client.run(lambda c: calls.forget(c, self._space), None, int)
        return self._count(m.Invalidate, keys)

    def publish(self, tenants: Sequence[str]) -> bool:
        """Lets these tenants read the namespace, and no others: an empty list takes it back. For admins.

        Whether it is so now; False when the daemon is away or says no (unless strict).
        """
        readers = check_readers(tenants)
        return self._client.run(lambda c: calls.publish(c, self._space, readers), None, bool)

    def _count(self, message: type, keys: Sequence[Key], *more: Any) -> int:
        check_keys(keys)
        return self._client.run(lambda c: calls.count(c, self._space, message, keys, *more), None, int)

    def _anew_s(self, tokens_per_s: float | None) -> float:
        """What computing a block anew takes (s), by the caller's speed or the client's; 0: nobody knows."""
        return recompute_s(self.layout, check_speed(tokens_per_s) or self._client.recompute_tokens_per_s)
