"""The nodes of a Valkey cluster by slot. Pure functions on replies."""

from __future__ import annotations

import binascii

from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.resp import Refusal, Reply

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """Returns the slot of a key without braces."""
    return binascii.crc_hqx(key, 0) % SLOTS


def parse_slots(reply: Reply, asked: Address) -> list[Address | None] | None:
    """Returns the node of each slot from a reply to CLUSTER SLOTS of `asked`, None if it is malformed."""
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
    """Parses MOVED and ASK. Returns whether the redirection is permanent, the slot and the node."""
    match refusal.text.split():
        case ["MOVED" | "ASK" as word, slot, address] if slot.isdecimal() and int(slot) < SLOTS:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and 0 < int(port) < 1 << 16:
                return word == "MOVED", int(slot), _address(host.strip("[]"), int(port), asked)
    return None


def _address(host: str, port: int, asked: Address) -> Address:
    """Returns a node's address. A node that does not know its own host has the one it was asked at."""
    return Address(host if host not in ("", "?") else asked.host, port)
