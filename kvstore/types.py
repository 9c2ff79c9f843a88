"""Layouts, namespaces, keys and tiers: names and hashes without other behaviour.

A block is identified by namespace and key. Blocks with different bytes differ in one of these: the layout of
a namespace covers model, weights and shape, the key covers the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import msgpack
import numpy as np
from blake3 import blake3

from kvstore.errors import MisuseError

Key: TypeAlias = bytes
"""Opaque bytes that identify a block's tokens and all earlier tokens, 1 to `MAX_KEY_BYTES` long."""

MAX_KEY_BYTES = 64
MOST_TIERS = 16
"""Tier instances in one run of a daemon, including removed devices."""
MAX_BLOCK_BYTES = 64 << 20
ALIGN = 4096
"""Slots start and end at multiples of this, as direct I/O and GPU copies require."""


EXPLAIN_KEYS = 8
"""The most keys of one explain request, which blocks the daemon's event loop."""


class Tier(IntEnum):
    """The kinds of tiers. The number identifies a kind on the wire and in records, and says nothing else."""

    HBM = 0
    DRAM = 1
    NVME = 2
    NETWORK = 3

    @property
    def rank(self) -> int:
        """The place in the order of speed. The fastest kind has rank 0."""
        return _RANK[self]

    @property
    def persistent(self) -> bool:
        """Whether blocks in this kind of tier outlive the machine's power."""
        return self in _PERSISTENT

    @property
    def keeps_pins(self) -> bool:
        """Whether pins protect copies in this kind of tier. Pools of GPU memory hold second copies only."""
        return self is not Tier.HBM


_RANK = {tier: rank for rank, tier in enumerate((Tier.HBM, Tier.DRAM, Tier.NVME, Tier.NETWORK))}
_PERSISTENT = frozenset((Tier.NVME, Tier.NETWORK))


CHAIN, INDEPENDENT = "chain", "independent"
"""The kinds of namespaces."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a namespace's blocks. Layouts that differ in any field never share a block.

    `revision` names the weights; `block_bytes` is one block's payload in bytes, of one shard;
    `kv_layout` is free text for other properties of the bytes (order of axes, instruction set). `kind` is
    "chain" if a block is of use only behind the block before it in its prompt, as attention over all tokens
    needs them; "independent" if each block is of use without others: no block has a parent.
    """

    model: str
    block_bytes: int
    revision: str = ""
    dtype: str = ""
    block_tokens: int = 0
    shard: str = "0/1"
    kv_layout: str = ""
    kind: str = CHAIN

    def __post_init__(self) -> None:
        for name in ("model", "revision", "dtype", "shard", "kv_layout"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > 1024:
                raise MisuseError(f"layout.{name} is {value!r:.80}", "a string of at most 1024 characters")
        for name in ("block_bytes", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise MisuseError(f"layout.{name} is {value!r:.80}", "a whole number, not negative")
        if not self.model:
            raise MisuseError(
                "layout.model is empty", "name the model, so that two models never share blocks"
            )
        if not 1 <= self.block_bytes <= MAX_BLOCK_BYTES:
            raise MisuseError(f"layout.block_bytes is {self.block_bytes}", f"1 to {MAX_BLOCK_BYTES} bytes")
        if self.block_tokens > MAX_BLOCK_BYTES:
            raise MisuseError(f"layout.block_tokens is {self.block_tokens}", f"at most {MAX_BLOCK_BYTES}")
        if self.kind not in (CHAIN, INDEPENDENT):
            raise MisuseError(f"layout.kind is {self.kind!r:.80}", f'"{CHAIN}" or "{INDEPENDENT}"')

    @property
    def independent(self) -> bool:
        """Whether no block has a parent."""
        return self.kind == INDEPENDENT

    def to_map(self) -> dict[str, Any]:
        """Returns the fields as plain values, for the wire and for records.

        Leaves the kind of a chain out, as before there were kinds: its fingerprint and records stay the same.
        """
        fields = asdict(self)
        if not self.independent:
            del fields["kind"]
        return fields

    def fingerprint(self, tenant: str = "default") -> bytes:
        """Returns 16 bytes that identify this layout of a tenant in slot headers and checksums."""
        canonical = msgpack.packb(["kvstore-namespace-1", tenant, sorted(self.to_map().items())])
        return blake3(canonical).digest(length=16)


TENANT_PATTERN = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}"


def check_tenant(name: object) -> str:
    """Returns a valid name of a tenant. Raises MisuseError for an invalid one."""
    if not isinstance(name, str) or not re.fullmatch(TENANT_PATTERN, name):
        raise MisuseError(
            f"{name!r:.80} can't be a tenant's name",
            "1 to 64 letters of a to z, digits, '-', '_' and '.', not starting with a dot",
        )
    return name


def slot_bytes(block_bytes: int) -> int:
    """Returns the bytes of a payload's slot: `block_bytes` rounded up to `ALIGN`."""
    return -(-block_bytes // ALIGN) * ALIGN


ENCRYPTION_BYTES = 28
"""Bytes that encryption adds to a block on NVMe: a tag of 16 bytes and a nonce of 12."""


def check_keys(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """Joins the keys of one call. Returns all keys in one bytes object, and the bytes a key.

    Raises MisuseError for an empty or overlong key, and for keys of different lengths: the keys of one call
    are one array.
    """
    if not keys:
        return b"", 1
    try:
        joined = b"".join(keys)
    except TypeError:
        bad = next(k for k in keys if not isinstance(k, bytes | bytearray | memoryview))
        raise MisuseError(f"a key is a {type(bad).__name__}", "keys are bytes") from None
    length = len(keys[0])
    if not 1 <= length <= MAX_KEY_BYTES:
        raise MisuseError(f"a key of {length} bytes", f"keys have 1 to {MAX_KEY_BYTES} bytes")
    if len(joined) != length * len(keys) or set(map(len, keys)) != {length}:
        raise MisuseError(
            "keys of one call differ in length", f"the first has {length} bytes: pad or hash them"
        )
    return joined, length


def chain_keys(tokens: Any, block_tokens: int, salt: bytes = b"") -> list[Key]:
    """Returns the keys of all full blocks of a prompt: blake3 of parent's key and own tokens, 32 bytes.

    `tokens` is a sequence of token ids (0 to 2**32 - 1). A last partial block gets no key. Prompts with
    different `salt` (LoRA, cache salt) share no keys.
    """
    if block_tokens < 1:
        raise MisuseError(f"block_tokens is {block_tokens}", "at least 1 token a block")
    raw = as_tokens(tokens)
    parent = blake3(b"kvstore-chain-1" + salt).digest()
    keys = []
    step = 4 * block_tokens
    for end in range(step, len(raw) + 1, step):
        parent = blake3(parent + raw[end - step : end]).digest()
        keys.append(parent)
    return keys


def as_tokens(tokens: Any) -> bytes:
    """Returns token ids as u32, little-endian. MisuseError unless a flat sequence of these."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise MisuseError("tokens are not a flat sequence of integers", "pass one prompt's token ids")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
        raise MisuseError("a token id is outside 0 to 2**32 - 1")
    return ids.astype("<u4").tobytes() if ids.size else b""


SLOT_RECORD = np.dtype([("place", "<u8"), ("checksum", "<u8"), ("version", "<u4"), ("tier", "<u4")])
"""A slot grant on the wire: extent << 32 | index, checksum and version of the block, and its tier."""

HBM_EXTENTS = 1 << 24
"""DRAM extents have lower numbers. Extents of the n-th GPU pool start at n times this."""

HEADER_BYTES = 192
"""One slot header in the table of a shared-memory extent."""

LABEL_BYTES = 4096
"""The label of an extent, before that table."""


PRESENCE_NOT_READY, PRESENCE_READY, PRESENCE_RETIRED = range(3)
"""States of a presence table, in its first word: cannot answer now; answers; is not updated any more."""

PRESENCE_TIER, PRESENCE_HIDDEN = 0x0F, 0x10
"""Bits of a cell of a presence table: the number of the tier; other tenants may not map the block yet."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How an extent is cut: label and table of headers (memory tiers only), then equal slots, each `ALIGN`ed.

    `table` says whether the extent starts with its label and one `HEADER_BYTES` header a slot.
    """

    extent_bytes: int
    slot_bytes: int
    table: bool

    @property
    def slots(self) -> int:
        """The number of slots, 0 if none fits."""
        if not self.table:
            return self.extent_bytes // self.slot_bytes
        n = max(0, self.extent_bytes - LABEL_BYTES) // (self.slot_bytes + HEADER_BYTES)
        while n and _head_bytes(n) + n * self.slot_bytes > self.extent_bytes:
            n -= 1
        return n

    @property
    def payload_offset(self) -> int:
        """The offset of slot 0 in bytes. Slot i is i * slot_bytes later."""
        return _head_bytes(self.slots) if self.table else 0


def _head_bytes(slots: int) -> int:
    """Returns the bytes of label and table for a number of slots."""
    return LABEL_BYTES + -(-slots * HEADER_BYTES // ALIGN) * ALIGN


def extent_bytes(limit_bytes: int, tenants: int = 1) -> int:
    """Returns the extent size of a tier: whole huge pages, at most 1 GiB; at least 8 extents, 2 a tenant."""
    huge = 2 << 20
    target = min(max(limit_bytes // 16, 128 << 20), 1 << 30)
    parts = max(8, 2 * tenants + 6, -(-limit_bytes // target))
    return max(huge, limit_bytes // parts // huge * huge)
