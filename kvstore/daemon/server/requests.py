"""What a peer may ask, and what it becomes: messages in, events to the shell. One object a connection.

Numbers of namespaces are the connection's own. Whether a namespace or an extent of another tenant is there at
all is told only to those that may read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.requests.leases import lease_number
from kvstore.daemon.operator.blocks import LONGEST_S
from kvstore.daemon.operator.explain import namespaces_for
from kvstore.daemon.runtime.ports import Requester
from kvstore.daemon.runtime.tier_set import DRAM
from kvstore.daemon.server.block_waits import KEYS_BYTES, Wait
from kvstore.daemon.server.prompts import Prompts
from kvstore.daemon.server.services import Services
from kvstore.daemon.tenancy.auth import Principal, Role
from kvstore.daemon.tenancy.deletion import refusal
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Numbering
from kvstore.errors import MisuseError, RemoteProtocolError
from kvstore.types import HBM_EXTENTS, MAX_KEY_BYTES, SLOT_RECORD, Layout, check_tenant, slot_bytes
from kvstore.wire import messages as m

_WAITS = 64
_REOPENS = "root, and who runs the daemon, can write to whatever memory they may read"
_REOPENS_HINT = "run what only reads as another user"
_ABSENT = "there is no such namespace, or it is not published to this tenant"
_ABSENT_HINT = "its owner publishes it; then open it again"


class Wire(Requester, Protocol):
    """The connection that requests come from."""

    number: int
    who: Principal

    @property
    def uid(self) -> int:
        """Whose process the peer is."""

    def send(self, message: Any) -> None:
        """Sends an answer."""

    def send_descriptor(self, request: int, extent: int, writable: bool) -> None:
        """Answers with an extent's descriptor. Raises KeyError if there is no such extent."""

    def send_handle(self, request: int, extent: int) -> None:
        """The same for an extent in a GPU's memory; a refusal where CUDA IPC does not work."""

    def queue(self, message: Any) -> None:
        """Has a message run as if the peer had sent it: in its tenant's turn."""

    def status(self) -> dict[str, Any]:
        """What this peer may see of the daemon's state."""

    def control(self, request: int, call: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Runs an operator's call: its answer, None if that comes later. Raises MisuseError."""


@dataclass(slots=True)
class Woken:
    """An Acquire that has waited for its first block. It costs its tenant what an Acquire costs."""

    q: m.Acquire
    event: ev.Acquire
    space: NamespaceEntry

    @property
    def keys(self) -> bytes:
        """See Acquire."""
        return self.q.keys

    @property
    def key_bytes(self) -> int:
        """See Acquire."""
        return self.q.key_bytes


class Requests:
    """The requests of one connection, and the namespaces that it has opened."""

    def __init__(self, wire: Wire, services: Services) -> None:
        self._wire = wire
        self._services = services
        self._spaces = Numbering(m.NAMESPACES)
        self._waits: set[Wait] = set()
        self._left = False
        self.prompts = Prompts(services.hits, wire.who.tenant)

    def run(self, message: Any) -> None:
        """Runs one message of the peer's. Raises RemoteProtocolError if it is none that peers send."""
        known = _RUNS.get(type(message))
        if known is None:
            raise RemoteProtocolError(f"{type(message).__name__} is not for the daemon")
        role, run = known
        if self._wire.who.role >= role:
            run(self, message)
        elif hasattr(message, "id"):
            self._lacks(message.id, role)

    def leave(self) -> None:
        """Nobody waits for answers any more."""
        self._left = True
        for wait in self._waits:
            self._services.waits.cancel(wait)
        self.prompts.leave()

    def _ping(self, q: m.Ping) -> None:
        self._wire.send(m.Value(q.id, 0))

    def _status(self, q: m.Status) -> None:
        self._wire.send(m.Report(q.id, self._wire.status()))

    # -- namespaces

    def _open(self, q: m.Open) -> None:
        who = self._wire.who
        try:
            layout = Layout(**q.layout)
        except (MisuseError, TypeError) as error:
            self._deny(q.id, f"the layout makes no sense: {error}")
            return
        owner = "" if q.owner == who.name else q.owner
        if not owner and not self._has_keys(q):
            return
        # How long blocks live is for writers to say.
        ttl_s = q.ttl_s if who.role >= Role.WRITE and not owner else 0.0
        space, answer = self._services.catalog.open(who, layout, owner, ttl_s)
        if space is None and owner:
            self._deny(q.id, _ABSENT, _ABSENT_HINT)
            return
        if space is None:
            assert isinstance(answer, ac.Deny)
            self._wire.answer(q.id, answer)
            return
        self._wire.send(m.Opened(q.id, self._spaces.number_of(space), space.fingerprint))

    def _has_keys(self, q: Any) -> bool:
        """Whether a namespace can be opened now; if not, the request runs again when keys have been made."""
        data_keys, name = self._services.data_keys, self._wire.who.name
        if data_keys.exist(name):
            return True

        def ended(error: Exception | None) -> None:
            if self._left:
                return
            try:
                if error is None:
                    self.run(q)
            except Exception as failure:
                error = failure
            if error is not None:
                refused = refusal(q.id, error)
                self._deny(q.id, refused.why, refused.hint)

        data_keys.make(name, ended)
        return False

    def _space(self, q: Any, own: bool = False) -> NamespaceEntry | None:
        """The namespace that a request names; refuses it, and returns None, if the peer may not do that."""
        who, space = self._wire.who, self._spaces.at(q.namespace)
        if space is None:
            self._deny(
                q.id, f"unknown namespace {q.namespace}", "open the namespace on this connection first"
            )
        elif space.tenant == who.tenant:
            return space if space.number else self._opened_again(q, space)
        elif not space.number or not self._services.catalog.may_read(who, space):
            self._deny(q.id, _ABSENT, _ABSENT_HINT)
        elif own:
            self._deny(q.id, "this namespace is another tenant's", "it can be read, and not be changed")
        else:
            return space
        return None

    def _opened_again(self, q: Any, space: NamespaceEntry) -> NamespaceEntry | None:
        """A namespace that was closed, or has ended with all that its tenant had, opened again."""
        assert space.layout is not None
        again = self._services.namespaces.find(space.tenant, space.fingerprint)
        if again is None or not again.number:
            if not self._has_keys(q):
                return None
            # A block can only be waited for in a namespace that there is.
            waits = isinstance(q, m.Acquire) and q.wait_s > 0
            again, answer = self._services.catalog.open(self._wire.who, space.layout, "", space.ttl_s, waits)
            if isinstance(answer, ac.Deny):
                self._deny(q.id, answer.why, answer.hint)
            elif again is not None and not again.number:
                self._miss(q, space)
                return None
        if again is not None:
            self._spaces.set(q.namespace, again)
        return again

    def _miss(self, q: Any, space: NamespaceEntry) -> None:
        """Answers a reader's request about a namespace that nobody has opened for writing yet."""
        if isinstance(q, m.Lookup | m.Acquire):
            self.prompts.asked(q, space)
        if isinstance(q, m.Lookup):
            self._wire.answer(q.id, ac.Found(q.id, 0, gaps=False))
        elif isinstance(q, m.Acquire):
            nothing = np.empty(0, SLOT_RECORD)
            self._wire.answer(q.id, ac.Grant(q.id, 0, slot_bytes(space.block_bytes), nothing))
        elif q.id:
            self._wire.answer(q.id, ac.Answer(q.id, 0))

    # -- reading

    def _lookup(self, q: m.Lookup) -> None:
        space = self._space(q)
        if space is not None:
            self._services.recorder.looked_up(self._wire.number, space, q.key_bytes, q.keys)
            self.prompts.asked(q, space)
            by = self._deadline(q.timeout_s)
            until, who, at = by if q.recompute_s else math.inf, self._wire.who.tenant, self._tier(q)
            event = ev.Lookup(0, space.number, self._keys(q), who, until, q.recompute_s, at)
            if (remote := self._services.network) is None:
                self._ask(q, event)
            else:
                remote.requests.lookup(self._wire, q.id, event, space, by)

    def _acquire(self, q: m.Acquire) -> None:
        space, keys = self._space(q), self._keys(q)
        if space is None or self._has_too_many(q, keys):
            return
        waits = q.wait_s > 0 and keys.n and not self._services.view.stored(space.number, keys.take(0, 1))
        if waits and self._waits_too_much(q):
            return
        self._services.recorder.acquired(self._wire.number, space, q.key_bytes, q.keys)
        self.prompts.asked(q, space)
        until, who, client = self._deadline(q.timeout_s), self._wire.who.tenant, self._wire.number
        event = ev.Acquire(0, client, space.number, keys, until, who, q.recompute_s, self._tier(q))
        if waits:
            self._acquire_later(q, event, space)
        else:
            self._acquire_now(q, event, space)

    def _waits_too_much(self, q: m.Acquire) -> bool:
        """Whether too many calls wait for blocks already; then this one is refused."""
        most = self._services.config().limits.queued_requests
        if len(self._waits) >= _WAITS:
            self._deny(q.id, f"{_WAITS} calls of this connection wait for blocks", "wait for fewer at once")
        elif self._services.waits.count(self._wire.who.tenant) >= most:
            hint = "wait for fewer at once, or raise limits.queued_requests"
            self._deny(q.id, f"{most} calls of this tenant wait for blocks", hint)
        elif (taken := self._services.waits.nbytes(self._wire.who.tenant) + len(q.keys)) > KEYS_BYTES:
            why = f"keys of this tenant that are waited for would take {taken} bytes, at most {KEYS_BYTES}"
            self._deny(q.id, why, "wait for fewer at once, or name fewer keys")
        else:
            return False
        return True

    def _acquire_later(self, q: m.Acquire, event: ev.Acquire, space: NamespaceEntry) -> None:
        """When the first block is stored, here or on the network, or the wait ends without it."""

        def woken() -> None:
            if not self._left:
                self._waits.discard(wait)
                self._wire.queue(Woken(q, event, space))

        wait = self._services.waits.add(space, event.keys, event.tenant, q.wait_s, woken)
        self._waits.add(wait)

    def _acquire_woken(self, woken: Woken) -> None:
        # It may have been forgotten, or taken back: what is gone is not opened again for this.
        q, event, space = woken.q, woken.event, woken.space
        if not space.number or not self._services.catalog.may_read(self._wire.who, space):
            self._deny(q.id, _ABSENT, _ABSENT_HINT)
            return
        event.namespace = space.number
        self._acquire_now(q, event, space)

    def _acquire_now(self, q: m.Acquire, event: ev.Acquire, space: NamespaceEntry) -> None:
        if (remote := self._services.network) is None:
            self._ask(q, event)
        else:
            remote.requests.acquire(self._wire, q.id, event, space)

    def _release(self, q: m.Release) -> None:
        self.prompts.released(q)
        self._services.core.handle(ev.Release(self._wire.number, lease_number(self._wire.number, q.lease)))

    def _abort(self, q: m.Abort) -> None:
        self._services.core.handle(ev.Abort(self._wire.number, lease_number(self._wire.number, q.lease)))

    def _hand_off(self, q: m.HandOff) -> None:
        space = self._space(q, own=True)
        if space is not None and self._services.network is None:
            self._deny(q.id, "there is no network tier", "set network.url")
        elif space is not None:
            assert self._services.network is not None
            until, who, keys = self._deadline(q.timeout_s), self._wire.who.tenant, self._keys(q)
            if not self._has_too_many(q, keys):
                self._services.network.requests.hand_off(self._wire, q.id, space, keys, who, until)

    def _prefetch(self, q: m.Prefetch) -> None:
        space = self._space(q)
        if space is not None:
            event = ev.Prefetch(0, space.number, self._keys(q), self._wire.who.tenant, self._tier(q))
            if (remote := self._services.network) is None:
                self._ask(q, event)
            else:
                remote.requests.prefetch(self._wire, q.id, event, space)

    def _suspect(self, q: m.Suspect) -> None:
        space = self._space(q)
        if space is not None:
            event = ev.Suspect(0, space.number, self._keys(q), self._tier(q))
            if q.id:
                self._ask(q, event)
            else:
                self._services.core.handle(event)

    def _explain(self, q: m.Explain) -> None:
        numbers = namespaces_for(
            self._wire.who, self._services.authenticator, self._services.namespaces, q.tenant, q.model
        )
        self._ask(q, ev.Explain(0, numbers, self._keys(q)))

    def _map(self, q: m.Map) -> None:
        if (q.writable or q.extent >= HBM_EXTENTS) and self._wire.who.role < Role.WRITE:
            self._lacks(q.id, Role.WRITE)
            return
        try:
            catalog, who = self._services.catalog, self._wire.who
            if not catalog.may_map(who, q.extent, q.writable):
                raise KeyError(q.extent)
            only_reads = who.role < Role.WRITE or not catalog.may_map(who, q.extent, writable=True)
            if only_reads and self._services.authenticator.is_privileged(self._wire.uid):
                self._deny(q.id, _REOPENS, _REOPENS_HINT)
                return
            if q.extent < HBM_EXTENTS:
                self._wire.send_descriptor(q.id, q.extent, q.writable)
            else:
                self._wire.send_handle(q.id, q.extent)
        except KeyError:
            self._deny(q.id, f"there is no extent {q.extent}")

    # -- writing

    def _reserve(self, q: m.Reserve) -> None:
        if len(q.parent) > MAX_KEY_BYTES:
            raise RemoteProtocolError(f"a parent key of {len(q.parent)} bytes")
        space = self._space(q, own=True)
        if space is not None:
            keys = self._keys(q)
            if q.tokens and not self._services.kv_events.hear(space, keys, q.tokens):
                self._deny(
                    q.id, f"{len(q.tokens) // 4} tokens for {keys.n} blocks", "see Layout.block_tokens"
                )
                return
            until, client = self._deadline(q.timeout_s), self._wire.number
            at = self._tier(q)
            self._ask(q, ev.Reserve(0, client, space.number, keys, q.parent, until, at))

    def _commit(self, q: m.Commit) -> None:
        sums = np.frombuffer(q.checksums, "<u8")
        written = np.frombuffer(q.written, np.uint8) != 0
        lease = lease_number(self._wire.number, q.lease)
        self._ask(q, ev.Commit(0, self._wire.number, lease, sums, written))

    def _pin(self, q: m.Pin) -> None:
        space = self._space(q, own=True)
        if space is not None:
            self._ask(q, ev.Pin(0, space.number, self._keys(q), self._deadline(q.ttl_s)))

    def _unpin(self, q: m.Unpin) -> None:
        space = self._space(q, own=True)
        if space is not None:
            self._ask(q, ev.Unpin(0, space.number, self._keys(q)))

    def _hint(self, q: m.Hint) -> None:
        space = self._space(q, own=True)
        if space is not None:
            next_use_s = q.next_use_s if q.expected else None
            priority = q.priority - m.NORMAL
            self._ask(q, ev.Hint(0, space.number, self._keys(q), next_use_s, q.closed, priority))

    def _invalidate(self, q: m.Invalidate) -> None:
        space = self._space(q, own=True)
        if space is not None:
            self._services.deletion.invalidate(self._wire, q.id, space, self._keys(q))

    # -- administration

    def _control(self, q: m.Control) -> None:
        if not self._wire.who.operator:
            self._deny(q.id, "only operators may ask this", "ask whoever runs the daemon")
            return
        try:
            answer = self._wire.control(q.id, q.call, q.arguments)
        except MisuseError as error:
            self._deny(q.id, error.message, error.hint)
            return
        if answer is not None:
            self._wire.send(m.Report(q.id, answer))

    def _record(self, q: m.RecordStart) -> None:
        if not self._wire.who.operator:
            self._deny(q.id, "only operators record what is asked for", "ask whoever runs the daemon")
            return
        try:
            self._services.recorder.start(self._wire.number, q.seconds, q.max_bytes)
        except MisuseError as error:
            self._deny(q.id, error.message, error.hint)
        else:
            self._wire.send(m.Value(q.id, 0))

    def _read_record(self, q: m.RecordRead) -> None:
        if self._services.recorder.owner != self._wire.number:
            self._deny(q.id, "this connection records nothing", "start a recording first")
        else:
            self._wire.send(m.Recorded(q.id, *self._services.recorder.read()))

    def _publish(self, q: m.Publish) -> None:
        space = self._space(q, own=not self._wire.who.operator)
        if space is None:
            return
        try:
            readers = [check_tenant(name) for name in q.tenants]
        except MisuseError as error:
            self._deny(q.id, error.message, error.hint)
            return
        self._services.catalog.publish(self._wire, q.id, space, readers)

    def _forget(self, q: m.Forget) -> None:
        who = self._wire.who
        if q.namespace:
            space = self._space(q, own=not who.operator)
            spaces = [space] if space is not None else None
        else:
            spaces = self._services.namespaces.of(who.tenant, q.revision, q.model)
        if spaces:
            self._services.deletion.forget(self._wire, q.id, spaces)
        elif spaces is not None:
            self._wire.send(m.Value(q.id, 0))

    def _delete_tenant(self, q: m.DeleteTenant) -> None:
        who = self._wire.who
        if q.name != who.name and not who.operator:
            self._deny(q.id, "only operators delete other tenants", "ask whoever runs the daemon")
        elif self._services.authenticator.number(q.name) is None:
            self._deny(q.id, f"there is no tenant {q.name!r}", "`kvstore tenant list` names them")
        else:
            self._services.deletion.delete(self._wire, q.id, q.name)

    # -- shared

    def _ask(self, q: Any, event: Any) -> None:
        self._services.core.ask(self._wire, q.id, event)

    def _keys(self, q: Any) -> Keys:
        return Keys(q.keys, q.key_bytes)

    def _has_too_many(self, q: Any, keys: Keys) -> bool:
        """Refuses a request of more keys than one call may have, before any of them is looked up."""
        most = self._services.view.limits.batch_keys
        if keys.n > most:
            self._deny(q.id, f"{keys.n} keys in one call", f"at most {most} keys a call (limits.batch_keys)")
        return keys.n > most

    def _tier(self, q: Any) -> int:
        """The tier of memory that a request is to be served in."""
        # Who maps a GPU's memory can write to it.
        return self._services.tiers.pool_on(q.device) if self._wire.who.role >= Role.WRITE else DRAM

    def _deadline(self, timeout_s: float) -> float:
        return self._services.core.now() + min(max(timeout_s, 0.0), LONGEST_S)

    def _lacks(self, request: int, role: Role) -> None:
        mine = self._wire.who.role.name.lower()
        why = f"this peer's role is {mine}, this needs {role.name.lower()}"
        self._deny(request, why, "ask whoever runs the daemon for another role")

    def _deny(self, request: int, why: str, hint: str = "") -> None:
        # What asks for no answer gets none.
        if request:
            self._wire.send(m.Denied(request, why, hint))


_RUNS: dict[type, tuple[Role, Callable[[Requests, Any], None]]] = {
    m.Ping: (Role.READ, Requests._ping),
    m.Status: (Role.READ, Requests._status),
    m.Open: (Role.READ, Requests._open),
    m.Lookup: (Role.READ, Requests._lookup),
    m.Acquire: (Role.READ, Requests._acquire),
    Woken: (Role.READ, Requests._acquire_woken),
    m.Release: (Role.READ, Requests._release),
    m.Abort: (Role.READ, Requests._abort),
    m.Prefetch: (Role.READ, Requests._prefetch),
    m.HandOff: (Role.WRITE, Requests._hand_off),
    m.Suspect: (Role.READ, Requests._suspect),
    m.Map: (Role.READ, Requests._map),
    m.Reserve: (Role.WRITE, Requests._reserve),
    m.Commit: (Role.WRITE, Requests._commit),
    m.Explain: (Role.READ, Requests._explain),
    m.RecordStart: (Role.READ, Requests._record),
    m.RecordRead: (Role.READ, Requests._read_record),
    m.Hint: (Role.WRITE, Requests._hint),
    m.Pin: (Role.WRITE, Requests._pin),
    m.Unpin: (Role.WRITE, Requests._unpin),
    m.Invalidate: (Role.WRITE, Requests._invalidate),
    m.Publish: (Role.ADMIN, Requests._publish),
    m.Forget: (Role.ADMIN, Requests._forget),
    m.DeleteTenant: (Role.ADMIN, Requests._delete_tenant),
    m.Control: (Role.READ, Requests._control),
}
"""By its type: who may have a message run, and what runs it."""
