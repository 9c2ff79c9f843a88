"""The calls of a client, written once: generators that yield steps and are sent the results.

A step is a message that needs an answer, `Post` (a message that needs none), `Work` (something to run
outside the event loop) or `Fetch` (a message whose answer brings a descriptor). Whoever drives a flow owns
sockets, threads and time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvstore.client.gpu import DeviceLease, DeviceReservation, open_extent
from kvstore.client.leases import Buffer, Lease, PutResult, Reservation, Slots
from kvstore.client.prompts import Prompts, Question
from kvstore.client.protocol import ProtocolState
from kvstore.cuda.device import Gpu
from kvstore.errors import DeniedError, KVStoreError, TierError
from kvstore.types import EXPLAIN_KEYS, HBM_EXTENTS, SLOT_RECORD, Key, Layout, check_keys
from kvstore.wire import messages as m

GRANTED, PRESENT, PENDING = 0, 1, 2
SAMPLE_FROM = 512


Flow = Generator[Any, Any, Any]


@dataclass(slots=True)
class Post:
    """Send, and go on."""

    message: Any


@dataclass(slots=True)
class Fetch:
    """Send, and expect Mapped with a descriptor; the result is (message, fd)."""

    message: m.Map


@dataclass(slots=True)
class Work:
    """Run `call`; it may take long. What it raises is raised here."""

    call: Callable[[], Any]


@dataclass(slots=True)
class Call:
    """One call on one connection: its session, its end in monotonic seconds, and ways to come back to it.

    `post` sends a message that needs no answer. A call whose result needs the connection again sets `kept`:
    nobody else gets the connection then until `run` has driven one more flow on it (answering its second
    argument if that fails) or `done` is called. `answer` makes of a value what callers get: itself, or
    something to await. `ended` tells whether the connection has ended, and its leases with it.
    """

    session: ProtocolState
    ends: float
    post: Callable[[Any], None]
    run: Callable[[Flow, Any], Any]
    done: Callable[[], None]
    answer: Callable[[Any], Any]
    ended: Callable[[], bool]
    kept: bool = False

    def left_s(self) -> float:
        """What the daemon may still take, leaving some of the deadline for the way back."""
        return max(0.0, (self.ends - time.monotonic()) * 0.9 - 0.002)


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespace that calls are about: a layout's, of a tenant ("": one's own), and for how long (s).

    `ttl_s` 0: for as long as the tenant's configuration says. `prompts`: those that its client asks for.
    """

    layout: Layout
    owner: str = ""
    ttl_s: float = 0.0
    prompts: Prompts = field(default_factory=Prompts, compare=False, repr=False)

    @property
    def name(self) -> object:
        """What tells it apart from others."""
        return self.layout, self.owner


def open_namespace(call: Call, space: Scope) -> Flow:
    """(number, fingerprint) of the namespace on this connection."""
    layout = space.layout
    # By identity, since hashing a layout's seven fields costs more than the rest of the step.
    name = id(layout), space.owner, space.ttl_s
    known = call.session.namespace(name)
    if known is None:
        answer = yield m.Open(0, layout.to_map(), space.owner, space.ttl_s)
        _check(answer)
        known = call.session.opened(name, (answer.namespace, answer.fingerprint, layout))
    return known[:2]


def count(call: Call, space: Scope, make: Callable[..., Any], keys: Sequence[Key], *more: Any) -> Flow:
    """A call about keys that is answered by a number; in batches, and the sum of theirs."""
    namespace, _ = yield from open_namespace(call, space)
    total, batch = 0, call.session.batch_keys
    for at in range(0, len(keys), batch):
        joined, size = check_keys(keys[at : at + batch])
        answer = yield make(0, namespace, size, joined, *more)
        total += _value(answer)
    return total


def lookup(
    call: Call, space: Scope, keys: Sequence[Key], recompute_s: float = 0.0, prompt: int | None = None
) -> Flow:
    """Length of the stored prefix; with `recompute_s`, of that which is worth loading before the call ends.

    `prompt`: how many blocks the prompt has whose first question this is, 0 for none; None: see `prompts`.

    A stored block's parent is stored, so of a long prompt every k-th key is asked first, then the keys
    between the last one found and the next: two short requests instead of a long one. Where parents may be
    missing, and where what loading takes counts, all keys are asked.
    """
    namespace, _ = yield from open_namespace(call, space)

    question = space.prompts.looking(space.name, keys, prompt)

    def ask(some: Sequence[Key], known: int, step: int = 1) -> m.Lookup:
        joined, size = check_keys(some)
        left_s = call.left_s()
        return m.Lookup(0, namespace, size, joined, left_s, recompute_s, "", question.asks, known, step)

    def part(at: int, some: Sequence[Key]) -> Flow:
        answer = yield ask(some, question.known(at))
        _hear(question, at, answer)
        return _value(answer)

    if not keys and question.asks:
        return (yield from part(0, keys))
    batch = call.session.batch_keys
    step = int(len(keys) ** 0.5)
    if len(keys) >= SAMPLE_FROM and step + 2 < batch and not recompute_s:
        answer = yield ask(keys[step - 1 :: step], -(-question.known() // step), step)
        start = _value(answer) * step
        question.hear(0, 0 if answer.gaps else start)
        if not answer.gaps:
            rest = keys[start : start + step - 1]
            return start + ((yield from part(start, rest)) if rest else 0)
    total = 0
    for at in range(0, len(keys), batch):
        some = keys[at : at + batch]
        found = yield from part(at, some)
        total += found
        if found < len(some):
            break
    return total


def acquire(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    joined: bytes,
    size: int,
    recompute_s: float = 0.0,
    gpu: Gpu | None = None,
    wait_s: float = 0.0,
    prompt: int | None = None,
) -> Flow:
    """A lease on the longest prefix that is ready in time. `prompt`: see lookup. Otherwise like `lease`."""
    question = space.prompts.taking(space.name, keys, prompt)
    taken = yield from lease(call, space, keys, joined, size, question, 0, recompute_s, gpu, wait_s)
    space.prompts.taken(question)
    return taken


def lease(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    joined: bytes,
    size: int,
    question: Question,
    at: int,
    recompute_s: float = 0.0,
    gpu: Gpu | None = None,
    wait_s: float = 0.0,
) -> Flow:
    """A lease on the longest prefix that is ready in time. `joined`: all keys, `size` bytes each.

    They are asked for as part of `question`, from its position `at` on.

    Blocks that take longer to load than `recompute_s` each are left out; 0: none is. With `gpu` (a
    `kvstore.cuda.device.Gpu`) it is a `DeviceLease`. While there is not even the first block, the daemon
    waits for it up to `wait_s`.
    """
    if len(keys) > call.session.batch_keys:
        joined = joined[: call.session.batch_keys * size]
    namespace, fingerprint = yield from open_namespace(call, space)
    device = call.session.maps.pool_of(gpu)
    left_s, asks, known = call.left_s(), question.asks, question.known(at)
    answer = yield m.Acquire(
        0, namespace, size, joined, left_s, recompute_s, device, min(wait_s, left_s), asks, known
    )
    _hear(question, at, answer)
    _check(answer)
    number, granted = answer.lease, len(answer.slots) // SLOT_RECORD.itemsize
    question.deliver(at, granted)
    corrupt: set[Key] = set()

    holds = call.session.holds
    if number:
        holds.add(number)

    def end() -> None:
        holds.discard(number)
        good = next((i for i in range(granted) if keys[i] in corrupt), granted) if corrupt else granted
        call.post(m.Release(number, granted - good, len(corrupt)))

    try:
        slots = yield from _slots(call, answer, space.layout, writable=False)
    except Exception as error:
        holds.discard(number)
        yield Post(m.Release(number, unused=granted))
        if isinstance(error, KVStoreError) and call.session.maps.leave_pool(gpu, error):
            again = lease(call, space, keys, joined, size, question, at, recompute_s, gpu, wait_s)
            return (yield from again)
        raise

    def suspect(key: Key) -> None:
        corrupt.add(key)
        call.post(m.Suspect(0, namespace, len(key), key, device if slots.in_hbm else ""))

    over = end if number else _nothing
    if gpu is None:
        made = Lease(slots, keys, fingerprint, over, suspect)
    else:
        made = DeviceLease(slots, keys, fingerprint, over, suspect, gpu)
    return made.held_over(call.ended) if number else made


def hand_off(call: Call, space: Scope, keys: Sequence[Key]) -> Flow:
    """How many leading blocks of one prompt are on the network, when all are or time is up."""
    namespace, _ = yield from open_namespace(call, space)
    total, batch = 0, call.session.batch_keys
    for at in range(0, len(keys), batch):
        joined, size = check_keys(keys[at : at + batch])
        there = _value((yield m.HandOff(0, namespace, size, joined, call.left_s())))
        total += there
        if there < len(keys[at : at + batch]):
            break
    return total


def get(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    joined: bytes,
    size: int,
    out: Any,
    verify: bool,
    recompute_s: float = 0.0,
    gpu: Gpu | None = None,
    prompt: int | None = None,
) -> Flow:
    """Copies the longest prefix into `out`, bytes of the host or of `gpu`; the number of good blocks.

    A block whose bytes are wrong is asked for once more, when the daemon has put the bad copy out of the way:
    another tier may have a good one.
    """
    question = space.prompts.taking(space.name, keys, prompt)
    at = yield from _copy(call, space, keys, joined, size, question, out, verify, recompute_s, gpu)
    question.deliver(at, 0)
    space.prompts.taken(question)
    return at


def _copy(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    joined: bytes,
    size: int,
    question: Question,
    out: Any,
    verify: bool,
    recompute_s: float,
    gpu: Gpu | None,
) -> Flow:
    """What `get` does, as a part of `question`."""
    batch, block_bytes = call.session.batch_keys, space.layout.block_bytes
    at, bad = 0, -1
    while at < len(keys):
        part = keys[at : at + batch] if len(keys) > batch or at else keys
        some = joined[at * size : (at + len(part)) * size]
        try:
            held = yield from lease(call, space, part, some, size, question, at, recompute_s, gpu)
        except DeniedError:
            if not at:
                raise
            return at
        n = granted = len(held)
        with held:
            if granted:
                n = yield Work(partial(held.copy_into, out[at * block_bytes :], verify))
        at += n
        if n < granted:
            if at == bad:
                return at
            bad = at
            namespace, _ = yield from open_namespace(call, space)
            device = gpu.uuid if gpu is not None and held.in_hbm else ""
            yield m.Suspect(0, namespace, size, keys[at], device)
        elif n < len(part):
            return at
    return at


def reserve(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    parent: Key | None,
    keep: bool = True,
    gpu: Gpu | None = None,
    tokens: bytes = b"",
) -> Flow:
    """Reserves slots for the keys that are not stored yet. `keep`: it keeps the connection until it ends.

    Keys beyond what one reservation takes count as denied. With `gpu` it is a `DeviceReservation`.
    `tokens`: of all keys, or empty.
    """
    beyond = max(0, len(keys) - call.session.reserve_keys)
    tokens = tokens[: 4 * space.layout.block_tokens * call.session.reserve_keys]
    keys = keys[: call.session.reserve_keys]
    joined, size = check_keys(keys)
    space.prompts.storing(space.name, keys)
    # Without them a block is stored all the same.
    tokens = tokens if len(tokens) <= call.session.frame_bytes // 2 else b""
    namespace, fingerprint = yield from open_namespace(call, space)
    device = call.session.maps.pool_of(gpu)
    answer = yield m.Reserve(0, namespace, size, joined, parent or b"", call.left_s(), device, tokens)
    _check(answer)
    status = answer.status
    wanted = [i for i, s in enumerate(status) if s == GRANTED]
    present = status.count(PRESENT) + status.count(PENDING)
    why = answer.why or (f"at most {len(keys)} blocks in one reservation" if beyond else "")
    result = PutResult(0, present, len(status) - len(wanted) - present + beyond, why)
    lease = answer.lease

    def end() -> None:
        call.post(m.Abort(lease))
        if keep:
            call.done()

    try:
        slots = yield from _slots(call, answer, space.layout, writable=True)
    except Exception as error:
        yield Post(m.Abort(lease))
        if isinstance(error, KVStoreError) and call.session.maps.leave_pool(gpu, error):
            return (yield from reserve(call, space, keys, parent, keep, gpu, tokens))
        raise

    call.kept = keep and bool(lease)

    def finish(sums: bytes) -> Any:
        if not lease:
            return call.answer(result)
        lost = PutResult(0, present, len(status) - present, "the daemon did not answer")
        return call.run(commit(lease, sums, result), lost)

    over = end if lease else _nothing
    if gpu is None:
        return Reservation(slots, keys, fingerprint, wanted, result, lease, over, finish)
    return DeviceReservation(slots, keys, fingerprint, wanted, result, lease, over, finish).on(gpu)


def commit(lease: int, checksums: bytes, result: PutResult) -> Flow:
    """Makes a room's blocks readable; what came of the put. A room that is refused is given up."""
    n = len(checksums) // 8
    answer = yield m.Commit(0, lease, checksums, b"\x01" * n)
    if isinstance(answer, m.Denied | m.Busy):
        yield Post(m.Abort(lease))
    result.stored = _value(answer)
    if result.stored < n:
        result.denied += n - result.stored
        result.why = result.why or "invalidated while it was written"
    return result


def put(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    views: Sequence[Buffer],
    parent: Key | None,
    gpu: Gpu | None = None,
    tokens: bytes = b"",
) -> Flow:
    """Stores those blocks that are not stored yet. `views`: bytes of the host, or all of `gpu`."""
    total = PutResult()
    batch, size = call.session.reserve_keys, 4 * space.layout.block_tokens
    for at in range(0, len(keys), batch):
        try:
            some, said = keys[at : at + batch], tokens[at * size : (at + batch) * size]
            result = yield from _put_batch(call, space, some, views[at : at + batch], parent, gpu, said)
        except DeniedError as error:
            # What was stored before stays, and is worth more than an exception.
            if not at:
                raise
            total.denied += len(keys) - at
            total.why = total.why or error.message
            break
        total.stored += result.stored
        total.present += result.present
        total.denied += result.denied
        total.why = total.why or result.why
        parent = keys[min(at + batch, len(keys)) - 1]
    return total


def _put_batch(
    call: Call,
    space: Scope,
    keys: Sequence[Key],
    views: Sequence[Buffer],
    parent: Key | None,
    gpu: Gpu | None,
    tokens: bytes,
) -> Flow:
    room = yield from reserve(call, space, keys, parent, keep=False, gpu=gpu, tokens=tokens)
    if not len(room):
        return room.result
    try:
        sums = yield Work(partial(_fill, room, views))
    except TierError:
        # A GPU that fails is no reason to keep the room.
        yield Post(m.Abort(room.lease))
        raise
    return (yield from commit(room.lease, sums, room.result))


def publish(call: Call, space: Scope, tenants: Sequence[str]) -> Flow:
    """Lets these tenants, and no others, read a namespace; True."""
    namespace, _ = yield from open_namespace(call, space)
    _check((yield m.Publish(0, namespace, tuple(tenants))))
    return True


def forget(call: Call, space: Scope) -> Flow:
    """Deletes a namespace; how many blocks."""
    namespace, _ = yield from open_namespace(call, space)
    return _value((yield m.Forget(0, namespace, "", "")))


def forget_all(call: Call, model: str, revision: str) -> Flow:
    """Deletes the tenant's namespaces of this model and revision, "" for any; how many blocks."""
    return _value((yield m.Forget(0, 0, model, revision)))


def delete_tenant(call: Call, name: str) -> Flow:
    """Deletes all that a tenant has stored; how many blocks."""
    return _value((yield m.DeleteTenant(0, name)))


def explain(call: Call, tenant: str, model: str, keys: Sequence[Key]) -> Flow:
    """What the daemon knows of keys: a map a key and namespace."""
    blocks: list[dict[str, Any]] = []
    for at in range(0, len(keys), EXPLAIN_KEYS):
        joined, size = check_keys(keys[at : at + EXPLAIN_KEYS])
        answer = yield m.Explain(0, tenant, model, size, joined)
        _check(answer)
        blocks += answer.blocks
    return blocks


def status(call: Call) -> Flow:
    """The daemon's state."""
    answer = yield m.Status(0)
    _check(answer)
    return answer.status


def control(call: Call, name: str, arguments: dict[str, Any]) -> Flow:
    """What an operator asks for by name."""
    answer = yield m.Control(0, name, arguments)
    _check(answer)
    return answer.status if isinstance(answer, m.Report) else {"value": answer.value}


def ping(call: Call) -> Flow:
    """An empty round trip."""
    return _value((yield m.Ping(0)))


def _fill(room: Reservation, views: Sequence[Buffer]) -> bytes:
    room.gather_all([[views[wanted]] for wanted in room.wanted])
    return room.checksums()


def _slots(call: Call, answer: Any, layout: Layout, writable: bool) -> Flow:
    """The slots that an answer grants, mapped; extents not seen before are fetched first."""
    maps = call.session.maps
    mapped: dict[int, Any] = {}
    # The upper half of a record's first field, read as 32-bit numbers.
    for extent in set(np.frombuffer(answer.slots, "<u4")[1 :: SLOT_RECORD.itemsize // 4].tolist()):
        known = maps.get(extent, writable)
        if known is None and extent < HBM_EXTENTS:
            reply, fd = yield Fetch(m.Map(0, extent, writable))
            _check(reply)
            known = maps.add(extent, writable, fd, reply.extent_bytes)
        elif known is None:
            reply = yield m.Map(0, extent, writable)
            _check(reply)
            known = yield Work(partial(open_extent, maps, extent, reply))
        mapped[extent] = known
    return Slots(mapped, answer.slots, answer.slot_bytes, layout.block_bytes)


def _hear(question: Question, at: int, answer: Any) -> None:
    """Takes in what an answer says of a prompt; a daemon that is busy has not heard the question."""
    if not isinstance(answer, m.Busy):
        question.hear(at, getattr(answer, "stored", 0))


def _check(answer: Any) -> None:
    if isinstance(answer, m.Denied):
        raise DeniedError(answer.why, answer.hint)
    if isinstance(answer, m.Busy):
        raise DeniedError(answer.why, f"try again in {answer.retry_s:.3g} s")


def _value(answer: Any) -> int:
    _check(answer)
    return int(answer.value)


def _nothing() -> None:
    """The end of a hold on nothing."""
