"""Namespaces: the layout and the owner of blocks, and the slot pools that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.columns import distinct
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.capacity.quotas import SlotPool


@dataclass(slots=True)
class Namespace:
    """A namespace with payloads of `block_bytes`. `pools` has its slot pool in each tier, by tier number.

    `relocated`: blocks may still lie in the pool of an earlier domain. `ttl_s`: time to live of blocks that
    are stored from now on, 0: unlimited. `has_ttl`: some blocks may expire. `closed`: the namespace is being
    deleted, and its blocks are misses. `block_tokens`: tokens a block, 0: unknown. `independent`: all blocks
    are roots.
    """

    number: int
    block_bytes: int
    pools: tuple[SlotPool, ...]
    ttl_s: float = 0.0
    has_ttl: bool = False
    relocated: bool = False
    closed: bool = False
    block_tokens: int = 0
    independent: bool = False

    @property
    def tenant(self) -> int:
        """The number of the tenant that owns the namespace."""
        return self.pools[0].tenant


class Namespaces(dict[int, Namespace]):
    """The open namespaces by number, in the order in which they were opened."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks

    def split(self, rows: Rows) -> Iterator[tuple[Namespace, Rows]]:
        """Yields the namespaces of rows, mostly one, each with its rows."""
        numbers = self._blocks.namespace[rows]
        raw = numbers.tobytes()
        # Comparing bytes costs a fraction of comparing arrays of this size.
        if raw and raw == raw[:2] * len(rows):
            yield self[int(numbers[0])], rows
            return
        for number in distinct(numbers):
            yield self[number], rows[numbers == number]
