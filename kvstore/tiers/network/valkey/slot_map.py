"""Which node of a Valkey cluster has which key. Pure: what nodes say comes in, addresses go out."""

from __future__ import annotations

import binascii

from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.resp import Refusal, Reply

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """The slot of a key that has no braces."""
    return binascii.crc_hqx(key, 0) % SLOTS


def parse_slots(reply: Reply, asked: Address) -> list[Address | None] | None:
    """Who has each slot, by the answer to CLUSTER SLOTS of `asked`; None where that is none."""
    if not isinstance(reply, list):
        return None
    slots: list[Address | None] = [None] * SLOTS
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                name = host.decode() if isinstance(host, bytes) else ""
                slots[first : last + 1] = [_address(name, port, asked)] * (last + 1 - first)
            case _:
                return None
    return slots


def redirection(refusal: Refusal, asked: Address) -> tuple[bool, int, Address] | None:
    """Where a MOVED or an ASK sends us: whether it is so from now on, the slot, the node."""
    match refusal.text.split():
        case ["MOVED" | "ASK" as word, slot, place] if slot.isdecimal() and int(slot) < SLOTS:
            host, _, port = place.rpartition(":")
            if port.isdecimal() and 0 < int(port) < 1 << 16:
                return word == "MOVED", int(slot), _address(host.strip("[]"), int(port), asked)
    return None


def _address(host: str, port: int, asked: Address) -> Address:
    """A node that does not know its own name is where we found it."""
    return Address(host if host not in ("", "?") else asked.host, port)
