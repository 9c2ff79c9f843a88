"""Parses capacities: `5%` of a trace's unique blocks, `64GiB`, or `5%+1TiB` for DRAM and NVMe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore.config import format_size, parse_size
from kvstore.core.queues.device_queue import TierSpec
from kvstore.errors import MisuseError
from kvstore.types import Geometry, Tier, extent_bytes, slot_bytes

TIERS = (Tier.DRAM, Tier.NVME)
_HINT = "a share of the trace's unique blocks such as 5%, or a size such as 64GiB; DRAM+NVMe: 5%+1TiB"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of one tier: exactly `slots` blocks, or as many as a daemon fits into `limit_bytes`."""

    tier: Tier
    slots: int = 0
    limit_bytes: int = 0

    def spec(self, block_bytes: int) -> TierSpec:
        """Returns the tier's specification for the core."""
        if self.limit_bytes:
            size = extent_bytes(self.limit_bytes)
            return TierSpec(self.tier, self.limit_bytes, size, table=self.tier == Tier.DRAM)
        size = self.slots * slot_bytes(block_bytes)
        return TierSpec(self.tier, size, size, table=False)

    def blocks(self, block_bytes: int) -> int:
        """Returns how many blocks of `block_bytes` fit."""
        spec = self.spec(block_bytes)
        geometry = Geometry(spec.extent_bytes, slot_bytes(block_bytes), spec.table)
        return spec.limit_bytes // spec.extent_bytes * geometry.slots

    def nbytes(self, block_bytes: int) -> int:
        """Returns the limit in bytes, or the size of the slots."""
        return self.spec(block_bytes).limit_bytes


Capacities = tuple[Capacity, ...]
"""The tiers of one node, DRAM first."""


def parse_capacities(text: str, unique_blocks: int, block_bytes: int) -> Capacities:
    """Parses `5%`, `64GiB` or `5%+1TiB`. Raises MisuseError for other texts and for too small sizes."""
    parts = text.split("+")
    if len(parts) > len(TIERS):
        raise MisuseError(f"{text!r:.80} names {len(parts)} tiers", "there are two: DRAM+NVMe")
    return tuple(
        parse_tier(part.strip(), tier, unique_blocks, block_bytes)
        for part, tier in zip(parts, TIERS, strict=False)
    )


def parse_tier(text: str, tier: Tier, unique_blocks: int, block_bytes: int) -> Capacity:
    """Parses the capacity of one tier: `5%` or `64GiB`. Raises MisuseError."""
    if m := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%", text):
        percent = float(m[1])
        if not 0 < percent <= 100:
            raise MisuseError(f"{text} is out of range", "more than 0 %, at most 100 %")
        capacity = Capacity(tier, slots=int(unique_blocks * percent / 100))
        if not capacity.slots:
            raise MisuseError(
                f"{text} of {unique_blocks} unique blocks is less than one block", "a larger share"
            )
        return capacity
    if text.isdecimal():
        raise MisuseError(f"{text} may mean blocks or bytes", _HINT)
    try:
        capacity = Capacity(tier, limit_bytes=parse_size(text))
    except MisuseError:
        raise MisuseError(f"{text!r:.80} is not a capacity", _HINT) from None
    if not capacity.limit_bytes or not capacity.blocks(block_bytes):
        raise MisuseError(
            f"{text} holds no block of {format_size(block_bytes)} in {tier.name}",
            f"a daemon cuts it into extents of {format_size(extent_bytes(capacity.limit_bytes))}: "
            "more room, or a smaller --block-bytes",
        )
    return capacity
