"""How much a tier holds, and sizes as text: for the commands of connectors.

Not a part of `import kvstore`, which engines load: it needs the packages of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvstore.config.units import format_size, parse_size
from kvstore.types import Geometry, extent_bytes, slot_bytes

__all__ = ["format_size", "how_often", "parse_size"]


def how_often(blocks: Mapping[int, int], limit_bytes: int, memory: bool) -> int:
    """Returns how often a tier of `limit_bytes` bytes of one tenant holds a set of blocks.

    `blocks`: the number of blocks by their bytes. `memory`: the tier has headers in its extents, as DRAM has;
    otherwise it is an NVMe folder without encryption. Blocks of another size are in other extents, which this
    takes to be full.
    """
    extent = extent_bytes(limit_bytes)
    extents = Fraction(0)
    for block_bytes, count in blocks.items():
        slots = Geometry(extent, slot_bytes(block_bytes), memory).slots
        if not slots:
            return 0
        extents += Fraction(count, slots)
    return int(limit_bytes // extent / extents)
