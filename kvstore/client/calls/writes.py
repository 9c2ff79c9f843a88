"""Calls that store blocks: put, reserve with commit, handoff."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvstore.client.calls.call import Call, Exchange, Flow, Work, call, returns
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
from kvstore.client.leases import INVALIDATED, NO_ANSWER, PutResult, Reservation
from kvstore.client.parts import Buffer
from kvstore.client.slots import Slots
from kvstore.cuda.device import Gpu
from kvstore.errors import DeniedError, TierError
from kvstore.types import Key
from kvstore.wire import messages as m

GRANTED, PRESENT, PENDING = 0, 1, 2

Block = tuple[Scope, Key]
"""A block, by its namespace and key."""


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
        part = Chain(keys)
        check_parent(parent, self.layout)
        of = self._chain_of(chain)
        token_ids = check_token_ids(tokens, keys, self.layout)
        views, gpu = check_blocks(keys, blocks, self.layout.block_bytes)

        def flow(exchange: Exchange) -> Flow[PutResult]:
            return put(exchange, self._scope, part, views, parent, gpu, token_ids, of)

        return Call(flow, deadline_s, lambda: PutResult(denied=len(keys)))

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
        part = Chain(keys)
        check_parent(parent, self.layout)
        of = self._chain_of(chain)
        token_ids = check_token_ids(tokens, keys, self.layout)
        gpu = check_device(device)

        def flow(exchange: Exchange) -> Flow[Reservation]:
            return reserve(exchange, self._scope, part, parent, gpu=gpu, tokens=token_ids, of=of)

        def miss() -> Reservation:
            lost = PutResult(denied=len(keys), why=NO_ANSWER)
            kind = Reservation if gpu is None else DeviceReservation
            return kind(
                Slots.none(self.layout.block_bytes), lost, lambda _: self._client.answer(lost), gpu=gpu
            )

        return Call(flow, deadline_s, miss)

    @call
    def handoff(self, keys: Sequence[Key], deadline_s: float | None = None) -> Call[int]:
        """Writes the stored prefix through to the network tier, for another node, and waits for it.

        Returns how many leading blocks are on the network: fewer than `keys` if the deadline passes or
        blocks are not stored here; 0 if the network tier is unavailable.
        """
        chain = Chain(keys)
        return Call(lambda exchange: hand_off(exchange, self._scope, chain), deadline_s, int)

    def _chain_of(self, chain: tuple[Scoped, Key] | None) -> Block | None:
        """Returns the block of a chain that blocks belong to. Raises MisuseError."""
        if chain is None:
            return None
        scope = scope_of(chain[0], self._client)
        check_chain((scope.layout, chain[1]), self.layout)
        return scope, chain[1]


def put(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    views: Sequence[Buffer],
    parent: Key | None,
    gpu: Gpu | None = None,
    tokens: bytes = b"",
    of: Block | None = None,
) -> Flow[PutResult]:
    """Stores the blocks that are not stored yet. `views`: all on the host, or all on `gpu`."""
    total = PutResult()
    batch, block_tokens = exchange.protocol.reserve_keys, 4 * scope.layout.block_tokens
    for at in range(0, len(chain), batch):
        part, some = chain.part(at, batch), tokens[at * block_tokens : (at + batch) * block_tokens]
        try:
            reservation = yield from reserve(exchange, scope, part, parent, False, gpu, some, of)
            result = reservation.result
            if len(reservation):
                result = yield from _fill_and_commit(exchange, reservation, views[at : at + batch])
        except DeniedError as error:
            # Blocks stored so far stay stored. Only a result can report them, an exception cannot.
            if not at:
                raise
            total.denied += len(chain) - at
            total.why = total.why or error.message
            break
        total.stored += result.stored
        total.present += result.present
        total.denied += result.denied
        total.why = total.why or result.why
        parent = None if scope.layout.independent else part.keys[-1]
    return total


def _fill_and_commit(
    exchange: Exchange, reservation: Reservation, views: Sequence[Buffer]
) -> Flow[PutResult]:
    try:
        checksums = yield Work(partial(_fill, reservation, views))
    except TierError:
        # The GPU has failed; the daemon frees the slots.
        exchange.post(m.Abort(reservation.lease))
        raise
    return (yield from commit(exchange, reservation.lease, checksums, reservation.result))


def _fill(reservation: Reservation, views: Sequence[Buffer]) -> bytes:
    reservation.gather_all([[views[wanted]] for wanted in reservation.wanted])
    return reservation.checksums()


def reserve(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    parent: Key | None,
    keep: bool = True,
    gpu: Gpu | None = None,
    tokens: bytes = b"",
    of: Block | None = None,
) -> Flow[Reservation]:
    """Reserves slots for the keys that are not stored yet. `keep`: the reservation keeps the connection.

    Keys beyond the limit of one reservation count as denied. With `gpu` the result is a `DeviceReservation`.
    `tokens`: of all keys, or empty. `of`: the block of a chain that the blocks belong to.
    """
    protocol = exchange.protocol
    beyond = max(0, len(chain) - protocol.reserve_keys)
    tokens = tokens[: 4 * scope.layout.block_tokens * protocol.reserve_keys]
    chain = chain.part(0, protocol.reserve_keys)
    scope.prompts.end_by_store(scope.name, chain.keys)
    # Blocks are stored without token ids if these would not fit into a frame.
    tokens = tokens if len(tokens) <= protocol.frame_bytes // 2 else b""
    namespace, fingerprint = yield from open_namespace(exchange, scope)
    above, above_key = (0, b"") if of is None else ((yield from open_namespace(exchange, of[0]))[0], of[1])
    device, left_s = protocol.maps.pool_of(gpu), exchange.left_s()
    size, joined, before = chain.key_bytes, chain.joined, parent or b""
    answer = checked(
        (yield m.Reserve(0, namespace, size, joined, before, left_s, device, tokens, above, bytes(above_key)))
    )
    status, number = answer.status, answer.lease
    wanted = [i for i, each in enumerate(status) if each == GRANTED]
    present = status.count(PRESENT) + status.count(PENDING)
    why = answer.why or (f"at most {len(chain)} blocks in one reservation" if beyond else "")
    result = PutResult(0, present, len(status) - len(wanted) - present + beyond, why)

    def end() -> None:
        if number:
            exchange.post(m.Abort(number))
        exchange.finish()

    try:
        slots = yield from map_slots(exchange, answer, scope.layout, writable=True)
    except Exception as error:
        exchange.post(m.Abort(number))
        if isinstance(error, DeniedError | TierError) and protocol.maps.leave_pool(gpu, error):
            return (yield from reserve(exchange, scope, chain, parent, keep, gpu, tokens, of))
        raise

    exchange.kept = keep and bool(number)

    def finish(checksums: bytes) -> Any:
        if not number:
            return exchange.resume(returns(result), result)
        lost = PutResult(0, present, len(status) - present, NO_ANSWER)
        return exchange.resume(commit(exchange, number, checksums, result), lost)

    kind = Reservation if gpu is None else DeviceReservation
    return kind(slots, result, finish, chain.keys, fingerprint, wanted, end, number, gpu)


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
