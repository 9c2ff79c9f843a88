"""core: block operations per second of `Placement` alone, compared with plain Python dictionaries.

The requests are for chains of 32 blocks with a skewed distribution; both tiers together hold only a part of
the chains. Missing blocks are put, so promotions, write-backs and evictions occur on both tiers all the time.
The reference keeps one object per block and one OrderedDict per tier, applies the same rules to the same
requests, and records the same actions.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.harness import Bench, NotDone, Result, expect
from bench.node import Node
from kvstore.core.blocks.key_batch import Keys

CHAIN = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of each tier, number of chains, and requests per sample."""

    dram_blocks: int = 30_000
    nvme_blocks: int = 120_000
    chains: int = 16_000
    requests: int = 64


SMOKE = Sizes(4096, 8192, 1000, 16)
_ALIKE = 0.05
"""Largest allowed difference of the two hit ratios. Both sides apply the same rules."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row."""
    bench.doing("filling")
    rng = np.random.default_rng(1)
    z = bench.pick(Sizes(), SMOKE)
    chains = [[os.urandom(32) for _ in range(CHAIN)] for _ in range(z.chains)]
    weights = 1.0 / np.arange(1, z.chains + 1)
    picks = rng.choice(z.chains, 1 << 17, p=weights / weights.sum())
    node = Node(z.dram_blocks, z.nvme_blocks, 1 << 20)
    plain = Plain(*node.slots)
    ours, reference = _Ours(node), _Reference(plain)
    for n in range(2 * z.nvme_blocks // CHAIN // z.requests):
        prompt = [chains[i] for i in rng.permutation(z.chains)[: z.requests]]
        for side in (ours, reference):
            side.serve(prompt)
        bench.doing("filling", n * z.requests * CHAIN / 2 / z.nvme_blocks)

    def prompts(n: int) -> list[list[bytes]]:
        return [chains[picks[(n * z.requests + i) % len(picks)]] for i in range(z.requests)]

    def timed(side: _Ours | _Reference, n: int) -> float:
        before, start = side.operations, time.perf_counter()
        side.serve(prompts(n))
        return (side.operations - before) / (time.perf_counter() - start)

    ours.found = reference.found = ours.asked = reference.asked = 0
    rounds = bench.interleave("core", (lambda n: timed(ours, n), lambda n: timed(reference, n)))
    ratios = ours.found / ours.asked, reference.found / reference.asked
    if abs(ratios[0] - ratios[1]) > _ALIKE or not all(ratios):
        raise NotDone(f"hit ratio {ratios[0]:.3f}, the reference has {ratios[1]:.3f}")
    yield rounds.result("core", "block operations/s", hit_ratio=ratios[0], reference_hit_ratio=ratios[1])


class _Side(ABC):
    """Serves prompts. Each block of an acquire, release, reserve or commit counts as one operation."""

    def __init__(self) -> None:
        self.operations = self.asked = self.found = 0

    def serve(self, prompts: list[list[bytes]]) -> None:
        """Gets each prompt's stored prefix and puts the rest."""
        for keys in prompts:
            found, stored = self._serve(keys)
            expect(found + stored, len(keys), "blocks found and stored")
            self.operations += len(keys) + found + 2 * stored
            self.asked += len(keys)
            self.found += found

    @abstractmethod
    def _serve(self, keys: list[bytes]) -> tuple[int, int]:
        """Gets the stored prefix of a prompt and puts the rest. Returns the found and stored blocks."""


class _Ours(_Side):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def _serve(self, keys: list[bytes]) -> tuple[int, int]:
        lease, found = self._node.acquire(Keys(b"".join(keys), 32))
        stored = 0
        if found < len(keys):
            parent = keys[found - 1] if found else b""
            stored = self._node.put(Keys(b"".join(keys[found:]), 32), parent)
        if lease:
            self._node.release(lease)
        return found, stored


class _Reference(_Side):
    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self._plain = plain

    def _serve(self, keys: list[bytes]) -> tuple[int, int]:
        blocks = self._plain.acquire(keys)
        found, stored = len(blocks), 0
        if found < len(keys):
            room = self._plain.reserve(keys[found:], blocks[-1] if blocks else None)
            stored = self._plain.commit(room)
        self._plain.release(blocks)
        self._plain.actions.clear()
        return found, stored


@dataclass(slots=True, eq=False)
class Block:
    """A block of the reference. A slot of -1 means that the tier has no copy."""

    key: bytes
    parent: Block | None
    dram: int = -1
    nvme: int = -1
    refs: int = 0
    children: int = 0
    checksum: int = 0


class Plain:
    """Two tiers in dictionaries: write-through, LRU eviction with leaves first."""

    def __init__(self, dram_slots: int, nvme_slots: int) -> None:
        self.blocks: dict[bytes, Block] = {}
        self._dram: OrderedDict[bytes, Block] = OrderedDict()
        self._nvme: OrderedDict[bytes, Block] = OrderedDict()
        self._dram_free = list(range(dram_slots))
        self._nvme_free = list(range(nvme_slots))
        self.actions: list[tuple[str, bytes, int, int]] = []

    def acquire(self, keys: list[bytes]) -> list[Block]:
        """Promotes and leases the stored prefix. Returns its blocks."""
        blocks = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                break
            block.refs += 1
            blocks.append(block)
        for block in reversed(blocks):
            if block.dram < 0:
                self._enter_dram(block)
            else:
                self._dram.move_to_end(block.key)
            if block.nvme >= 0:
                self._nvme.move_to_end(block.key)
        return blocks

    def release(self, blocks: list[Block]) -> None:
        """Releases the blocks of an acquire."""
        for block in blocks:
            block.refs -= 1

    def reserve(self, keys: list[bytes], parent: Block | None) -> list[Block]:
        """Returns slots for a new chain."""
        room = []
        for key in keys:
            if not self._dram_free:
                self._evict_from_dram()
            parent = Block(key, parent, dram=self._dram_free.pop(), refs=1)
            room.append(parent)
        return room

    def commit(self, room: list[Block]) -> int:
        """Makes the chain readable and writes it to NVMe. Returns its number of blocks."""
        for block in room:
            self.blocks[block.key] = block
            if block.parent is not None:
                block.parent.children += 1
        for block in reversed(room):
            self._dram[block.key] = block
            if not self._nvme_free:
                self._evict_from_nvme()
            block.nvme = self._nvme_free.pop()
            self._nvme[block.key] = block
            self.actions.append(("write", block.key, block.dram, block.nvme))
            block.refs -= 1
        return len(room)

    def _enter_dram(self, block: Block) -> None:
        if not self._dram_free:
            self._evict_from_dram()
        block.dram = self._dram_free.pop()
        self._dram[block.key] = block
        self.actions.append(("promote", block.key, block.nvme, block.dram))

    def _evict_from_dram(self) -> None:
        """Evicts the least recently used idle copy that NVMe also holds or that has no children."""
        for block in self._dram.values():
            if not block.refs and (block.nvme >= 0 or not block.children):
                break
        else:
            raise AssertionError("everything in DRAM is in use")
        del self._dram[block.key]
        self._dram_free.append(block.dram)
        self.actions.append(("drop", block.key, 0, block.dram))
        block.dram = -1
        if block.nvme < 0:
            self._forget(block)

    def _evict_from_nvme(self) -> None:
        for block in self._nvme.values():
            if not block.refs and (block.dram >= 0 or not block.children):
                break
        else:
            raise AssertionError("everything on NVMe is in use")
        del self._nvme[block.key]
        self._nvme_free.append(block.nvme)
        self.actions.append(("drop", block.key, 1, block.nvme))
        block.nvme = -1
        if block.dram < 0:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        del self.blocks[block.key]
        if block.parent is not None:
            block.parent.children -= 1
