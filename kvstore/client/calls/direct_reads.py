"""Reads without a request: the leading blocks of a prompt that a presence table finds in DRAM.

No lease holds their slots, so a slot may get another block while it is read. The checksum of the copied bytes
shows that: its seed names the block. Blocks that are not proved, or not in DRAM, are read under a lease. The
daemon learns from a report that blocks were used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import native
from kvstore.client.calls.call import Exchange, Flow, Work
from kvstore.client.calls.presence import current_table, map_tables
from kvstore.client.calls.scope import Chain, Scope, map_extents, open_namespace
from kvstore.client.prompts import PromptRequests
from kvstore.errors import DeniedError, TierError

_DRAM = b"\0"


def read(
    exchange: Exchange, scope: Scope, chain: Chain, out: Any, requests: PromptRequests
) -> Flow[tuple[int, bool]]:
    """Copies leading blocks into `out`. Returns how many are good, and whether no others can be had."""
    yield from map_tables(exchange, (scope,))
    part = chain.part(0, exchange.protocol.batch_keys)
    namespace, fingerprint = yield from open_namespace(exchange, scope)
    table = None if exchange.connection.lags else current_table(exchange, fingerprint)
    found = table.places(part.keys) if table is not None else None
    if table is None or found is None or (scope.layout.independent and len(set(part.keys)) < len(part)):
        return 0, False
    tiers, places = found
    n = len(tiers) - len(tiers.lstrip(_DRAM))
    good = 0
    if n:
        good = yield from _copy(exchange, scope, part, out, fingerprint, places[: 8 * n], table.slot_bytes)
    is_all = good == len(tiers) and (good < len(part) or len(part) == len(chain))
    is_all &= good == len(chain) or not table.network
    if good or is_all:
        exchange.connection.report(namespace, requests.new_blocks, tiers[requests.known() : good])
        requests.note_answer(0, good)
    if good:
        exchange.connection.report_read(namespace, part.keys[:good], part.key_bytes)
        requests.note_delivery(0, good)
    return good, is_all


def _copy(
    exchange: Exchange,
    scope: Scope,
    chain: Chain,
    out: Any,
    fingerprint: bytes,
    places: bytes,
    slot_bytes: int,
) -> Flow[int]:
    """Copies blocks from these places into `out`. Returns how many leading ones are good."""
    # The upper half of a place.
    numbers = set(np.frombuffer(places, "<u4")[1::2].tolist())
    try:
        extents = yield from map_extents(exchange, numbers, writable=False)
    except (DeniedError, TierError):
        return 0
    memory = [(number, *extent.slots(slot_bytes)) for number, extent in extents.items()]
    read_slots, size = native.read_slots, scope.layout.block_bytes
    assert read_slots is not None
    good: int = yield Work(
        lambda: read_slots(out, memory, places, list(chain.keys), fingerprint, size, slot_bytes)
    )
    return good
