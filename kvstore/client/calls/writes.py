"""Calls that store blocks: put, reserve with commit, handoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvstore.client.calls.call import Call, Exchange, Flow, R, Work, call, returns, side_by_side
from kvstore.client.calls.scope import (
    Chain,
    Scope,
    Scoped,
    checked,
    map_slots,
    open_namespace,
    scope_of,
    value_of,
)
from kvstore.client.checks import check_blocks, check_chain, check_device, check_parent, check_token_ids
from kvstore.client.gpu import DeviceReservation
from kvstore.client.leases import GIVEN_UP, INVALIDATED, NO_ANSWER, PutResult, Reservation
from kvstore.client.parts import Buffer, Parts
from kvstore.client.slots import Slots
from kvstore.cuda.device import Gpu
from kvstore.errors import DeniedError, TierError
from kvstore.types import Key
from kvstore.wire import messages as m

GRANTED, PRESENT, PENDING = 0, 1, 2

Block = tuple[Scope, Key]
"""A block, by its namespace and key."""


@dataclass(frozen=True, slots=True)
class Put:
    """One of several puts of a client. `fill` fills a Reservation and returns whether it has.

    If it returns False, the blocks are not stored, and count as denied. It must neither commit the
    reservation nor keep it, and an asyncio client calls it in another thread. The other fields are the
    arguments of `reserve`.
    """

    namespace: Scoped
    keys: Sequence[Key]
    fill: Callable[[Reservation], bool]
    parent: Key | None = None
    device: int | str | None = None
    tokens: Any = None
    chain: tuple[Scoped, Key] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that need slots. `tokens`: of all keys, or empty. `of`: the block of a chain they belong to.

    `gpu`: where their bytes are, None: on the host.
    """

    scope: Scope
    chain: Chain
    parent: Key | None = None
    gpu: Gpu | None = None
    tokens: bytes = b""
    of: Block | None = None

    def part(self, start: int, count: int, parent: Key | None) -> Wanted:
        """Returns at most `count` blocks from `start` on, behind `parent`."""
        size = 4 * self.scope.layout.block_tokens
        tokens = self.tokens[start * size : (start + count) * size]
        return replace(self, chain=self.chain.part(start, count), parent=parent, tokens=tokens)


class WriteCalls(Scoped):
    """The calls that store blocks in one namespace."""

    @call
    def put(
        self,
        keys: Sequence[Key],
        blocks: Buffer,
        parent: Key | None = None,
        deadline_s: float | None = None,
        tokens: Any = None,
        chain: tuple[Scoped, Key] | None = None,
    ) -> Call[PutResult]:
        """Stores blocks: a sequence of buffers of block_bytes each, or one array (len(keys), block_bytes).

        All of them may be device arrays of one GPU. Kernels that write these arrays must have ended.

        `parent` is the key before keys[0], None at the start of a prompt and in an independent namespace.
        Stored blocks are not written again. `tokens`: the token ids of all blocks, `layout.block_tokens`
        each, which the daemon publishes in KV events; None: no events for these blocks.

        `chain`, in an independent namespace: the namespace and the key of the block of a chain without which
        these blocks are of no use, such as the last one before a state. The eviction policy then treats them
        like that block; they are denied if it is not stored, so store the chain first. None: each block
        stands for itself. Daemons before version 11 of the wire ignore it.
        """
        pieces, gpu = check_blocks(keys, blocks, self.layout.block_bytes)
        wanted = wanted_of(self._client, self, keys, parent, gpu, tokens, chain)
        return Call(
            lambda exchange: put(exchange, wanted, pieces), deadline_s, lambda: PutResult(denied=len(keys))
        )

    @call
    def reserve(
        self,
        keys: Sequence[Key],
        parent: Key | None = None,
        deadline_s: float | None = None,
        device: int | str | None = None,
        tokens: Any = None,
        chain: tuple[Scoped, Key] | None = None,
    ) -> Call[Reservation]:
        """Returns slots for the keys that are not stored yet, to be filled in place and committed.

        With `device` the result is a `DeviceReservation`, filled from that GPU and stored in the daemon's
        pool on the GPU if possible. `tokens`, `chain`: see put. The `commit` of an asyncio client is awaited.
        """
        gpu = check_device(device)
        wanted = wanted_of(self._client, self, keys, parent, gpu, tokens, chain)

        def miss() -> Reservation:
            lost = PutResult(denied=len(keys), why=NO_ANSWER)
            kind = Reservation if gpu is None else DeviceReservation
            return kind(
                Slots.none(self.layout.block_bytes), lost, lambda _: self._client.answer(lost), gpu=gpu
            )

        return Call(lambda exchange: reserve(exchange, wanted), deadline_s, miss)

    @call
    def handoff(self, keys: Sequence[Key], deadline_s: float | None = None) -> Call[int]:
        """Writes the stored prefix through to the network tier, for another node, and waits for it.

        Returns how many leading blocks are on the network: fewer than `keys` if the deadline passes or
        blocks are not stored here; 0 if the network tier is unavailable.
        """
        chain = Chain(keys)
        return Call(lambda exchange: hand_off(exchange, self._scope, chain), deadline_s, int)


def wanted_of(
    client: object,
    namespace: Scoped,
    keys: Sequence[Key],
    parent: Key | None,
    gpu: Gpu | None,
    tokens: Any,
    chain: tuple[Scoped, Key] | None,
) -> Wanted:
    """Returns the blocks of a put or reserve in a namespace of this client. Raises MisuseError."""
    scope, of = scope_of(namespace, client), None
    layout, part = scope.layout, Chain(keys)
    check_parent(parent, layout)
    if chain is not None:
        of = scope_of(chain[0], client), chain[1]
        check_chain((of[0].layout, chain[1]), layout)
    return Wanted(scope, part, parent, gpu, check_token_ids(tokens, keys, layout), of)


def put(exchange: Exchange, wanted: Wanted, blocks: Parts) -> Flow[PutResult]:
    """Stores the blocks that are not stored yet, each of one piece; all on the host, or all on their GPU."""
    total, n, batch = PutResult(), len(wanted.chain), exchange.protocol.reserve_keys
    parent = wanted.parent
    for at in range(0, n, batch):
        part = wanted.part(at, batch, parent)
        try:
            reservation = yield from reserve(exchange, part, keep=False)
            result = reservation.result
            if len(reservation):
                some = blocks.take([at + i for i in reservation.wanted])
                result = yield from _fill_and_commit(exchange, reservation, some)
        except DeniedError as error:
            # Blocks stored so far stay stored. Only a result can report them, an exception cannot.
            if not at:
                raise
            total.denied += n - at
            total.why = total.why or error.message
            break
        total.stored += result.stored
        total.present += result.present
        total.denied += result.denied
        total.why = total.why or result.why
        parent = None if wanted.scope.layout.independent else part.chain.keys[-1]
    return total


def _fill_and_commit(exchange: Exchange, reservation: Reservation, blocks: Parts) -> Flow[PutResult]:
    try:
        checksums = yield Work(partial(_fill, reservation, blocks))
    except TierError:
        # The GPU has failed; the daemon frees the slots.
        exchange.post(m.Abort(reservation.lease))
        raise
    return (yield from commit(exchange, reservation.lease, checksums, reservation.result))


def _fill(reservation: Reservation, blocks: Parts) -> bytes:
    reservation.gather_all(blocks)
    return reservation.checksums()


def put_each(
    exchange: Exchange, puts: Sequence[tuple[Wanted, Callable[[Reservation], bool]]]
) -> Flow[list[PutResult]]:
    """Reserves slots for all puts, fills them, and commits all: side by side. See `Put`.

    A put that the daemon refuses is denied, with the reason.
    """
    answers = yield from side_by_side([_settled(_ask(exchange, wanted)) for wanted, _ in puts])
    results, filled = list[PutResult](), list[tuple[int, bytes, PutResult]]()
    began_s = time.monotonic()
    try:
        for (wanted, fill), answer in zip(puts, answers, strict=True):
            if isinstance(answer, DeniedError):
                results.append(PutResult(denied=len(wanted.chain), why=str(answer)))
                continue
            reservation = yield from _reserved(exchange, wanted, answer, keep=False)
            result = reservation.result
            results.append(result)
            if not len(reservation):
                continue
            checksums = yield Work(partial(_filled_by, fill, reservation))
            if checksums is None:
                exchange.post(m.Abort(reservation.lease))
                result.denied += len(reservation)
                result.why = result.why or GIVEN_UP
            else:
                filled.append((reservation.lease, checksums, result))
    except BaseException:
        for answer in answers:
            if isinstance(answer, m.Reserved) and answer.lease:
                exchange.post(m.Abort(answer.lease))
        raise
    exchange.ends_s += time.monotonic() - began_s
    ends = yield from side_by_side([_settled(commit(exchange, *each)) for each in filled])
    for (_, checksums, result), end in zip(filled, ends, strict=True):
        if isinstance(end, DeniedError):
            result.denied += len(checksums) // 8
            result.why = result.why or str(end)
    return results


def _filled_by(fill: Callable[[Reservation], bool], reservation: Reservation) -> bytes | None:
    """Returns the checksums of the slots, None if `fill` has not filled them."""
    return reservation.checksums() if fill(reservation) else None


def _settled(flow: Flow[R]) -> Flow[R | DeniedError]:
    """Runs a flow. Returns the refusal if the daemon refuses."""
    try:
        return (yield from flow)
    except DeniedError as error:
        return error


def reserve(exchange: Exchange, wanted: Wanted, keep: bool = True) -> Flow[Reservation]:
    """Reserves slots for the keys that are not stored yet. `keep`: the reservation keeps the connection.

    Keys beyond the limit of one reservation count as denied. With a GPU the result is a `DeviceReservation`.
    """
    answer = yield from _ask(exchange, wanted)
    return (yield from _reserved(exchange, wanted, answer, keep))


def _ask(exchange: Exchange, wanted: Wanted) -> Flow[m.Reserved]:
    """Asks for slots, for as many keys as one reservation has; returns the answer."""
    protocol = exchange.protocol
    some, of = wanted.part(0, protocol.reserve_keys, wanted.parent), wanted.of
    scope, chain = some.scope, some.chain
    scope.prompts.end_by_store(scope.name, chain.keys)
    # Blocks are stored without token ids if these would not fit into a frame.
    tokens = some.tokens if len(some.tokens) <= protocol.frame_bytes // 2 else b""
    namespace, _ = yield from open_namespace(exchange, scope)
    above, above_key = (0, b"") if of is None else ((yield from open_namespace(exchange, of[0]))[0], of[1])
    device, left_s = protocol.maps.pool_of(some.gpu), exchange.left_s()
    size, joined, before = chain.key_bytes, chain.joined, some.parent or b""
    answer: m.Reserved = checked(
        (yield m.Reserve(0, namespace, size, joined, before, left_s, device, tokens, above, bytes(above_key)))
    )
    return answer


def _reserved(exchange: Exchange, wanted: Wanted, answer: m.Reserved, keep: bool) -> Flow[Reservation]:
    """Returns the reservation of an answer, with its slots mapped."""
    gpu, scope = wanted.gpu, wanted.scope
    status, number = answer.status, answer.lease
    chain, beyond = wanted.chain.part(0, len(status)), len(wanted.chain) - len(status)
    granted = [i for i, each in enumerate(status) if each == GRANTED]
    present = status.count(PRESENT) + status.count(PENDING)
    why = answer.why or (f"at most {len(chain)} blocks in one reservation" if beyond else "")
    result = PutResult(0, present, len(status) - len(granted) - present + beyond, why)

    def end() -> None:
        if number:
            exchange.post(m.Abort(number))
        exchange.finish()

    try:
        slots = yield from map_slots(exchange, answer, scope.layout, writable=True)
    except Exception as error:
        exchange.post(m.Abort(number))
        if isinstance(error, DeniedError | TierError) and exchange.protocol.maps.leave_pool(gpu, error):
            return (yield from reserve(exchange, wanted, keep))
        raise

    exchange.kept = keep and bool(number)

    def finish(checksums: bytes) -> Any:
        if not number:
            return exchange.resume(returns(result), result)
        lost = PutResult(0, present, len(status) - present, NO_ANSWER)
        return exchange.resume(commit(exchange, number, checksums, result), lost)

    _, fingerprint = yield from open_namespace(exchange, scope)
    kind = Reservation if gpu is None else DeviceReservation
    return kind(slots, result, finish, chain.keys, fingerprint, granted, end, number, gpu)


def commit(exchange: Exchange, number: int, checksums: bytes, result: PutResult) -> Flow[PutResult]:
    """Makes the blocks of reservation `number` readable; returns the result of the put.

    Aborts the reservation if the daemon refuses.
    """
    n = len(checksums) // 8
    answer = yield m.Commit(0, number, checksums, b"\x01" * n)
    if isinstance(answer, m.Denied | m.Busy):
        exchange.post(m.Abort(number))
    result.stored = value_of(answer)
    if result.stored < n:
        result.denied += n - result.stored
        result.why = result.why or INVALIDATED
    return result


def hand_off(exchange: Exchange, scope: Scope, chain: Chain) -> Flow[int]:
    """Returns how many leading blocks are on the network, once all are or the deadline passes."""
    namespace, _ = yield from open_namespace(exchange, scope)
    total, batch = 0, exchange.protocol.batch_keys
    for at in range(0, len(chain), batch):
        part = chain.part(at, batch)
        message = m.HandOff(0, namespace, part.key_bytes, part.joined, exchange.left_s())
        written = value_of((yield message))
        total += written
        if written < len(part):
            break
    return total
