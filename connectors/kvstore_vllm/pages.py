"""The paged KV memory of the engine as bytes, and the copies between pages and slots.

A stored block is a sequence of pages (vLLM's blocks). A page is the sequence of its layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Protocol

import numpy as np
import torch

from kvstore import DeviceBuffer, Lease, Reservation, on_device, why_no_gpu
from kvstore.errors import ConfigError


class Pages(Protocol):
    """Copies whole stored blocks. Several threads may call, for different pages."""

    block_bytes: int
    """The bytes of one page, all layers."""

    device: str | None
    """The GPU of reservations and leases; None: host memory."""

    at_once: int
    """The number of leased blocks to load in one call."""

    def save(self, reservation: Reservation, slot: int, block_ids: Sequence[int]) -> None:
        """Copies pages into a slot of a reservation."""

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int | None]]) -> int:
        """Copies leased blocks, from `first` on, into pages. None: skip this page.

        Returns the number of leading blocks that verified.
        """


def check_covered(kv_caches: Iterable[str], groups: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError if a layer with a KV cache is in no group, or a layer of a group has none."""
    layers = [name for group in groups for name in group]
    if alone := sorted(set(kv_caches).symmetric_difference(layers)):
        raise ConfigError(
            f"layer {alone[0]} has a KV cache without a group, or a group without a KV cache",
            "this kind of model is not served: leave out the connector",
        )


def pages_of(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> Pages:
    """Returns the pages of a group of layers with these caches, in an engine with `num_blocks` blocks.

    Raises ConfigError.
    """
    layers: dict[int, torch.Tensor] = {}
    for name in sorted(kv_caches):
        rows = _rows(name, kv_caches[name], num_blocks)
        layers.setdefault(rows.data_ptr(), rows)  # layers that share KV count once
    if not layers:
        raise ConfigError("the engine has no KV cache", "nothing is there to store")
    rows = list(layers.values())
    if all(each.device.type == "cpu" for each in rows):
        return HostPages(rows)
    if all(each.is_cuda for each in rows) and not why_no_gpu():
        return GpuPages([Layer.of(each) for each in rows])
    return DevicePages(rows)


def _rows(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns a view of a layer's cache as bytes, shape (num_blocks, bytes of a page)."""
    if not isinstance(cache, torch.Tensor):
        raise ConfigError(f"layer {name} keeps its state in several tensors", "use vLLM 0.32")
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    dense = 1
    for stride, size in inner:
        if size > 1 and stride != dense:
            raise ConfigError(
                f"layer {name}: an engine block is not one run of bytes", "use another KV layout"
            )
        dense *= size
    pieces, rest = divmod(cache.shape[0], num_blocks)
    row_bytes, step = prod(cache.shape[1:]) * cache.itemsize, cache.stride(0) * cache.itemsize
    if rest or (pieces > 1 and step != row_bytes):
        raise ConfigError(
            f"layer {name} has {cache.shape[0]} kernel blocks for {num_blocks} blocks",
            "use a block size that the attention backend takes as it is",
        )
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    start = cache.storage_offset() * cache.itemsize
    return raw.as_strided((num_blocks, pieces * row_bytes), (pieces * step, 1), start)


class HostPages:
    """KV in host memory: copied and verified in one pass between pages and slots."""

    device: str | None = None
    at_once = 1

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self._layers = [rows.numpy() for rows in layers]
        self._unwanted = [np.empty(rows.shape[1], np.uint8) for rows in self._layers]
        self.block_bytes = sum(rows.shape[1] for rows in self._layers)

    def save(self, reservation: Reservation, slot: int, block_ids: Sequence[int]) -> None:
        """See Pages."""
        reservation.gather(slot, self._parts(block_ids))

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int | None]]) -> int:
        """See Pages."""
        return lease.scatter_all([self._parts(ids) for ids in block_ids], first)

    def _parts(self, block_ids: Sequence[int | None]) -> list[np.ndarray]:
        parts: list[np.ndarray] = []
        for block_id in block_ids:
            parts += self._unwanted if block_id is None else [rows[block_id] for rows in self._layers]
        return parts


@dataclass(frozen=True, slots=True)
class Layer:
    """The cache of a layer in GPU memory. Page i has `row_bytes` bytes from `start` + i * `step` on."""

    memory: DeviceBuffer
    start: int
    step: int
    row_bytes: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> Layer:
        """Returns the layer of rows that `_rows` returned."""
        whole = torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.untyped_storage())
        return cls(on_device(whole), rows.storage_offset(), rows.stride(0), rows.shape[1])

    def row(self, block_id: int) -> DeviceBuffer:
        """Returns one page of the layer."""
        start = self.start + block_id * self.step
        return self.memory.part(start, start + self.row_bytes)


class GpuPages:
    """KV in GPU memory, copied by kvstore's kernels: one kernel scatters many blocks, one verifies them.

    The scheduler has seen the output of the step that computed a saved block, so a save needs no
    synchronization. A load has ended when `load` returns.
    """

    device: str | None
    at_once = 64

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers
        gpu = layers[0].memory.gpu
        self.device = gpu.uuid
        self._unwanted = gpu.allocate(max(layer.row_bytes for layer in layers))
        self.block_bytes = sum(layer.row_bytes for layer in layers)

    def save(self, reservation: Reservation, slot: int, block_ids: Sequence[int]) -> None:
        """See Pages."""
        reservation.gather(slot, self._parts(block_ids))

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int | None]]) -> int:
        """See Pages."""
        return lease.scatter_all([self._parts(ids) for ids in block_ids], first)

    def _parts(self, block_ids: Sequence[int | None]) -> list[DeviceBuffer]:
        return [
            self._unwanted.part(0, layer.row_bytes) if block_id is None else layer.row(block_id)
            for block_id in block_ids
            for layer in self._layers
        ]


class DevicePages:
    """KV in the memory of another device, copied through a host buffer, so that verified bytes are loaded.

    Each thread has its own stream and buffer. The scheduler has seen the output of the step that computed a
    saved block, so a save needs no synchronization. A load has ended when `load` returns.
    """

    device: str | None = None
    at_once = 1

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self._layers = layers
        self._device = layers[0].device
        self._sizes = [rows.shape[1] for rows in layers]
        self.block_bytes = sum(self._sizes)
        self._mine = threading.local()

    def save(self, reservation: Reservation, slot: int, block_ids: Sequence[int]) -> None:
        """See Pages."""
        buffer = self._buffer(len(block_ids))
        with self._stream():
            packed = torch.cat([rows[block_id] for block_id in block_ids for rows in self._layers])
            buffer.copy_(packed)
        reservation.gather(slot, [buffer.numpy()])

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int | None]]) -> int:
        """See Pages."""
        good = (self._load(lease, first + i, ids) for i, ids in enumerate(block_ids))
        return sum(takewhile(bool, good))

    def _load(self, lease: Lease, index: int, block_ids: Sequence[int | None]) -> bool:
        buffer = self._buffer(len(block_ids))
        if not lease.scatter(index, [buffer.numpy()]):
            return False
        with self._stream() as stream:
            parts = buffer.to(self._device).split(self._sizes * len(block_ids))
            targets = [None if b is None else rows[b] for b in block_ids for rows in self._layers]
            wanted = [(t, part) for t, part in zip(targets, parts, strict=True) if t is not None]
            torch._foreach_copy_([target for target, _ in wanted], [part for _, part in wanted])
            if stream is not None:
                stream.synchronize()
        return True

    def _stream(self) -> torch.cuda.StreamContext:
        if self._device.type == "cuda" and not hasattr(self._mine, "stream"):
            self._mine.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(getattr(self._mine, "stream", None))

    def _buffer(self, blocks: int) -> torch.Tensor:
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = torch.empty(
                blocks * self.block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        buffer: torch.Tensor = self._mine.buffer
        return buffer
