"""Calls that read blocks: lookup, contains, acquire, get."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.calls import direct_reads
from kvstore.client.calls.call import Call, Exchange, Flow, R, Work, call, side_by_side
from kvstore.client.calls.presence import PRESENCE_SINCE, Mask, contains, contains_all, find_tiers, map_tables
from kvstore.client.calls.scope import (
    Chain,
    Scope,
    Scoped,
    checked,
    map_slots,
    open_namespace,
    value_of,
)
from kvstore.client.checks import check_device, check_out, check_speed, recompute_s, with_wait
from kvstore.client.estimates import UNKNOWN, Estimate, StoredPrefix
from kvstore.client.gpu import DeviceLease
from kvstore.client.leases import Lease
from kvstore.client.parts import Buffer
from kvstore.client.prompts import PromptRequests
from kvstore.client.slots import Slots
from kvstore.cuda.device import Gpu
from kvstore.errors import DeniedError, TierError
from kvstore.types import SLOT_RECORD, Key, Layout, check_keys
from kvstore.wire import messages as m

DRAM = 0
"""The number of the tier whose blocks need no loading."""
SAMPLE_FROM = 512
"""A lookup of at least this number of keys sends a sample of them first."""
ESTIMATES_SINCE = 11
"""The version of the wire that introduced the load time and the blocks that the caller has."""

LookedUp = tuple[list[StoredPrefix], list[Mask]]
"""The stored prefix of each chain, and which keys of each other namespace are stored."""


class ReadCalls(Scoped):
    """The calls that read blocks of one namespace."""

    @call
    def lookup(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> Call[int]:
        """Returns how many leading keys are stored. The blocks are not leased: `acquire` may find fewer.

        In an independent namespace, `contains` says the same of all keys, for the same effort.

        With `recompute_tokens_per_s` (tokens/s; None: the client's), counts only blocks that are faster to
        load than to recompute.

        `prompt` is for the daemon's hit ratio, which counts each prompt once: the number of whole blocks of
        the prompt if this is its first request, 0 if it is not. None: the client decides by the keys. A
        lookup of the same keys by the same thread or task within 1 s is a poll; `acquire` and `get` of keys
        that were looked up belong to the same prompt; `put` and `reserve` end it. Pass `prompt` where
        several processes make requests for one prompt.
        """
        check_sample(self.layout, keys)
        block_s = self._recompute_s(recompute_tokens_per_s)
        return Call(lambda exchange: lookup(exchange, self._scope, keys, block_s, prompt), deadline_s, int)

    @call
    def contains(self, keys: Sequence[Key], deadline_s: float | None = None) -> Call[npt.NDArray[np.bool_]]:
        """Returns which keys are stored on the node or the network: one bool for each key.

        A key counts for itself, whether or not the keys before it are stored. The answer is advisory: blocks
        are not leased, and `acquire` may find fewer. It does not count for the hit ratio, and it is no use
        of the blocks for the eviction policy. Needs a daemon that speaks version 9 of the wire.
        """
        chain = Chain(keys)

        def miss() -> npt.NDArray[np.bool_]:
            return np.zeros(len(keys), np.bool_)

        return Call(lambda exchange: contains(exchange, self._scope, chain), deadline_s, miss)

    @call
    def get(
        self,
        keys: Sequence[Key],
        out: Buffer,
        verify: bool = True,
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        prompt: int | None = None,
    ) -> Call[int]:
        """Copies the longest stored prefix into `out`: (len(keys), block_bytes) writable bytes, on the host
        or in a GPU's memory, or a list of writable buffers on the host, one of block_bytes for each key.

        Returns the number of leading blocks that were read and matched their checksums. The bytes of `out`
        behind them are undefined. `recompute_tokens_per_s`, `prompt`: see lookup.
        """
        chain = Chain(keys)
        target, gpu = check_out(keys, out, self.layout.block_bytes)
        block_s = self._recompute_s(recompute_tokens_per_s)

        def flow(exchange: Exchange) -> Flow[int]:
            return get(exchange, self._scope, chain, target, verify, block_s, gpu, prompt)

        return Call(flow, deadline_s, int)

    @call
    def acquire(
        self,
        keys: Sequence[Key],
        deadline_s: float | None = None,
        recompute_tokens_per_s: float | None = None,
        device: int | str | None = None,
        wait_s: float = 0.0,
        prompt: int | None = None,
    ) -> Call[Lease]:
        """Returns a lease on the longest prefix that is ready in time. Its blocks are read without a copy.

        In an independent namespace, `keys` are the blocks that the caller wants, whatever lies between them
        in the prompt: the lease has the leading keys that are ready.

        `recompute_tokens_per_s`, `prompt`: see lookup. With `device` (0, "cuda:0", a UUID) the result is a
        `DeviceLease`, whose blocks are in that GPU's memory: in the daemon's pool on the GPU, or copied from
        DRAM. Raises MisuseError if the GPU or kvstore[cuda] is missing.

        If the first block is stored neither here nor on the network, the call waits for it for up to
        `wait_s` seconds after the deadline, and for at most 60 s. The lease is empty if the block is not
        stored by then. A decode node can thus start with the first blocks and acquire the next keys later.
        """
        chain, gpu = Chain(keys), check_device(device)
        until_s = with_wait(self._client.deadline_s if deadline_s is None else deadline_s, wait_s)
        block_s = self._recompute_s(recompute_tokens_per_s)

        def flow(exchange: Exchange) -> Flow[Lease]:
            return acquire(exchange, self._scope, chain, block_s, gpu, wait_s, prompt)

        return Call(flow, until_s, lambda: no_lease(self.layout.block_bytes, gpu))

    def _recompute_s(self, tokens_per_s: float | None) -> float:
        """Returns the seconds to recompute one block, at the given speed or the client's; 0: unknown."""
        return recompute_s(self.layout, check_speed(tokens_per_s) or self._client.recompute_tokens_per_s)


def check_sample(layout: Layout, keys: Sequence[Key]) -> None:
    """Checks the keys of a lookup: all if all may be sent, else the first and last. Raises MisuseError."""
    check_keys(keys if len(keys) < SAMPLE_FROM or layout.independent else (keys[0], keys[-1]))


def lookup(
    exchange: Exchange, scope: Scope, keys: Sequence[Key], recompute_s: float = 0.0, prompt: int | None = None
) -> Flow[int]:
    """Returns the length of the stored prefix; with `recompute_s`, of the part that is worth loading."""
    yield from map_tables(exchange, (scope,))
    found = yield from find_prefix(exchange, scope, keys, prompt, Estimate(recompute_s))
    return found.worth_loading


def find_prefix(
    exchange: Exchange,
    scope: Scope,
    keys: Sequence[Key],
    prompt: int | None,
    estimate: Estimate,
    at_once: bool = False,
) -> Flow[StoredPrefix]:
    """Returns the length of the stored prefix, and of its part that is worth loading.

    The parent of a stored block is stored. So a lookup of a long prompt first asks for every k-th key, then
    for the keys between the last one found and the next: in the presence table, or by two short requests. It
    asks for all keys if parents are missing, if the blocks are independent, for an exact estimate, or if one
    request has room for them and the caller wants the answer `at_once`.
    """
    namespace, fingerprint = yield from open_namespace(exchange, scope)
    requests = scope.prompts.of_lookup(scope.name, keys, prompt)
    sampled = len(keys) >= SAMPLE_FROM and not scope.layout.independent and not estimate.exact
    root = int(len(keys) ** 0.5) if sampled else 1
    tiers = find_tiers(exchange, fingerprint, keys, root) if keys else None
    if tiers is not None and _is_worth_loading(tiers, estimate) and _are_distinct(scope, keys, len(tiers)):
        exchange.connection.report(namespace, requests.new_blocks, tiers[requests.known() :])
        requests.note_answer(0, len(tiers))
        return StoredPrefix(len(tiers), len(tiers))
    if estimate.load_s and exchange.protocol.version < ESTIMATES_SINCE:
        estimate = UNKNOWN

    def message(at: int, some: Sequence[Key], known: int, guess: Estimate, step: int = 1) -> m.Lookup:
        joined, size = check_keys(some)
        left_s, new, have = exchange.left_s(), requests.new_blocks, max(0, guess.have - at) // step
        return m.Lookup(
            0, namespace, size, joined, left_s, guess.recompute_s, "", new, known, step, guess.load_s, have
        )

    def found_of(at: int, some: Sequence[Key], guess: Estimate) -> Flow[StoredPrefix]:
        answer = yield message(at, some, requests.known(at), guess)
        _note(requests, at, answer)
        return _found(answer)

    if not keys and requests.new_blocks:
        if exchange.protocol.version < PRESENCE_SINCE:
            return (yield from found_of(0, keys, estimate))
        exchange.connection.report(namespace, requests.new_blocks, b"")
        requests.note_answer(0, 0)
        return StoredPrefix()
    batch = exchange.protocol.batch_keys
    step = 0 if at_once and len(keys) <= batch else root
    if step > 1 and step + 2 < batch:
        known = -(-requests.known() // step)
        answer = yield message(0, keys[step - 1 :: step], known, estimate, step)
        found = _found(answer).times(step)
        requests.note_answer(0, 0 if answer.gaps else found.blocks)
        if not answer.gaps:
            rest = keys[found.blocks : found.blocks + step - 1]
            guess = UNKNOWN if found.is_cut else estimate
            return found.then((yield from found_of(found.blocks, rest, guess))) if rest else found
    found = StoredPrefix()
    for at in range(0, len(keys), batch):
        some = keys[at : at + batch]
        more = yield from found_of(at, some, UNKNOWN if found.is_cut else estimate)
        found = found.then(more)
        if more.blocks < len(some):
            break
    return found


def _is_worth_loading(tiers: bytes, estimate: Estimate) -> bool:
    """Returns whether all blocks in these tiers count: none must be loaded, or speed does not matter."""
    return not estimate.recompute_s or tiers.count(DRAM, estimate.have) >= len(tiers) - estimate.have


def _are_distinct(scope: Scope, keys: Sequence[Key], n: int) -> bool:
    """Returns whether none of the first n keys occurs twice, where a prefix would end at the second one."""
    return not scope.layout.independent or len(set(keys[:n])) == n


def lookup_all(
    exchange: Exchange,
    chains: Sequence[tuple[Scope, Sequence[Key], int | None, Estimate]],
    others: Sequence[tuple[Scope, Chain]],
    strict: bool,
) -> Flow[LookedUp]:
    """Looks up chains, and asks which keys others have, side by side. Refused ones have none unless `strict`.

    A chain has the arguments of `find_prefix`. Beside others, all keys of a chain are sent: theirs are too.
    """
    yield from map_tables(exchange, [chain[0] for chain in chains] + [other[0] for other in others])
    at_once = bool(others)
    flows: list[Flow[Any]] = [
        _unless_refused(find_prefix(exchange, *chain, at_once), StoredPrefix(), strict) for chain in chains
    ]
    if others:
        none = [np.zeros(len(chain), np.bool_) for _, chain in others]
        flows.append(_unless_refused(contains_all(exchange, others, strict), none, strict))
    results = yield from side_by_side(flows)
    return results[: len(chains)], results[-1] if others else []


def _unless_refused(flow: Flow[R], miss: R, strict: bool) -> Flow[R]:
    """Runs a flow. Returns `miss` if the daemon refuses, unless `strict`."""
    try:
        return (yield from flow)
    except DeniedError:
        if strict:
            raise
        return miss


def acquire(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    recompute_s: float = 0.0,
    gpu: Gpu | None = None,
    wait_s: float = 0.0,
    prompt: int | None = None,
) -> Flow[Lease]:
    """Leases the longest prefix that is ready in time. See `lease`."""
    requests = scope.prompts.of_acquire(scope.name, chain.keys, prompt)
    taken = yield from lease(exchange, scope, chain, requests, 0, recompute_s, gpu, wait_s)
    scope.prompts.end_acquire(requests)
    return taken


def lease(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    requests: PromptRequests,
    at: int,
    recompute_s: float,
    gpu: Gpu | None,
    wait_s: float = 0.0,
) -> Flow[Lease]:
    """Leases the longest prefix that is ready in time. `at`: its position among the keys of the call.

    Leaves out blocks that take longer to load than `recompute_s` each (0: none). With `gpu` the result is a
    `DeviceLease`. If not even the first block is stored, the daemon waits for it for up to `wait_s`.
    """
    chain, protocol = chain.part(0, exchange.protocol.batch_keys), exchange.protocol
    namespace, fingerprint = yield from open_namespace(exchange, scope)
    device = protocol.maps.pool_of(gpu)
    left_s, new_blocks, known = exchange.left_s(), requests.new_blocks, requests.known(at)
    wait_s = min(wait_s, left_s)
    answer = yield m.Acquire(
        0, namespace, chain.key_bytes, chain.joined, left_s, recompute_s, device, wait_s, new_blocks, known
    )
    _note(requests, at, answer)
    number, granted = checked(answer).lease, len(answer.slots) // SLOT_RECORD.itemsize
    requests.note_delivery(at, granted)
    if not number:
        none = no_lease(scope.layout.block_bytes, gpu)
        none.stored = answer.stored
        return none
    protocol.leases.add(number)
    keys, corrupt = chain.keys, set[Key]()

    def end() -> None:
        protocol.leases.discard(number)
        good = next((i for i in range(granted) if keys[i] in corrupt), granted) if corrupt else granted
        exchange.post(m.Release(number, granted - good, len(corrupt)))

    try:
        slots = yield from map_slots(exchange, answer, scope.layout, writable=False)
    except Exception as error:
        protocol.leases.discard(number)
        exchange.post(m.Release(number, unused=granted))
        if isinstance(error, DeniedError | TierError) and protocol.maps.leave_pool(gpu, error):
            return (yield from lease(exchange, scope, chain, requests, at, recompute_s, gpu, wait_s))
        raise

    def suspect(key: Key) -> None:
        corrupt.add(key)
        exchange.post(m.Suspect(0, namespace, len(key), key, device if slots.in_hbm else ""))

    kind = Lease if gpu is None else DeviceLease
    made = kind(slots, keys, fingerprint, end, suspect, exchange.connection.ended, gpu)
    made.stored = max(granted, answer.stored)
    return made


def no_lease(block_bytes: int, gpu: Gpu | None) -> Lease:
    """Returns the lease of a miss, on the host or of `gpu`."""
    return (Lease if gpu is None else DeviceLease)(Slots.none(block_bytes), gpu=gpu)


def get(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    out: Any,
    verify: bool,
    recompute_s: float = 0.0,
    gpu: Gpu | None = None,
    prompt: int | None = None,
) -> Flow[int]:
    """Copies the longest prefix into `out`, see `check_out`. Returns the number of good blocks.

    Blocks in DRAM that a presence table finds need no lease. Leases and copies the others, one batch after
    another. Requests a corrupt block once more after the daemon has
    quarantined it: another tier may have a good copy.
    """
    requests = scope.prompts.of_acquire(scope.name, chain.keys, prompt)
    batch, block_bytes = exchange.protocol.batch_keys, scope.layout.block_bytes
    at, bad, is_all = 0, -1, False
    if gpu is None:
        # Verified even if that is not asked for: without a lease, nothing else proves the blocks.
        at, is_all = yield from direct_reads.read(exchange, scope, chain, out, requests)
    while at < len(chain) and not is_all:
        part = chain.part(at, batch)
        try:
            held = yield from lease(exchange, scope, part, requests, at, recompute_s, gpu)
        except DeniedError:
            if not at:
                raise
            break
        good = granted = len(held)
        with held:
            if granted:
                rest = out[at : at + granted] if isinstance(out, list) else out[at * block_bytes :]
                good = yield Work(partial(_copy, held, rest, verify))
        at += good
        if good < granted:
            if at == bad:
                break
            bad = at
            namespace, _ = yield from open_namespace(exchange, scope)
            device = gpu.uuid if gpu is not None and held.in_hbm else ""
            yield m.Suspect(0, namespace, chain.key_bytes, chain.keys[at], device)
        elif good < len(part):
            break
    requests.note_delivery(at, 0)
    scope.prompts.end_acquire(requests)
    return at


def _copy(held: Lease, out: Any, verify: bool) -> int:
    """Copies the blocks of a lease into bytes for all, or into the buffer of each."""
    if isinstance(out, list):
        return held.scatter_all([[buffer] for buffer in out])
    return held.copy_into(out, verify)


def _found(answer: Any) -> StoredPrefix:
    """Returns what an answer to a lookup says. Raises DeniedError if the daemon refuses."""
    worth = value_of(answer)
    return StoredPrefix(max(worth, answer.stored), worth)


def _note(requests: PromptRequests, at: int, answer: Any) -> None:
    """Notes an answer for its prompt. A busy daemon has not counted the request."""
    if not isinstance(answer, m.Busy):
        requests.note_answer(at, getattr(answer, "stored", 0))
