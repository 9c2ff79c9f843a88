"""The paged KV memory of the engine as bytes, and the copies between pages and slots.

A stored block is a sequence of pages (vLLM's blocks). A page is the sequence of its layers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import Any, Protocol

import torch

from kvstore import Lease, PagedLayer, PagedMemory, Reservation, why_no_gpu
from kvstore.errors import ConfigError

SKIPPED = -1


class Pages(Protocol):
    """Copies whole stored blocks. Several threads may call, for different pages."""

    block_bytes: int
    """The bytes of one page, all layers."""

    device: str | None
    """The GPU of reservations and leases; None: host memory."""

    at_once: int
    """The number of stored blocks to save or load in one call."""

    def save(self, reservation: Reservation, first: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Copies pages into slots of a reservation, from `first` on: `block_ids` has those of each slot."""

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int]]) -> int:
        """Copies leased blocks, from `first` on, into pages. `SKIPPED` stands for a page that is not wanted.

        Returns the number of leading blocks that verified.
        """


def check_covered(kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError if a layer with a KV cache is in no group, or a layer of a group has none.

    A layer that reads the cache of another layer has none of its own: vLLM lists the same tensor for both.
    """
    layers = {name for group in groups for name in group}
    stored = {id(kv_caches[name]) for name in layers & kv_caches.keys()}
    own = {name for name, cache in kv_caches.items() if name in layers or id(cache) not in stored}
    if alone := sorted(own ^ layers):
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
    if all(each.device.type == "cpu" for each in rows) or (
        all(each.is_cuda for each in rows) and not why_no_gpu()
    ):
        return DirectPages([_layer(each) for each in rows], num_blocks)
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


def _layer(rows: torch.Tensor) -> PagedLayer:
    """Returns the layer of rows that `_rows` returned."""
    whole = torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.untyped_storage())
    buffer = whole.numpy() if rows.device.type == "cpu" else whole
    return PagedLayer(buffer, rows.storage_offset(), rows.stride(0), rows.shape[1])


class DirectPages:
    """KV in memory from which kvstore itself copies: the host's, or a GPU's by kernels, one for many blocks.

    The scheduler has seen the output of the step that computed a saved block, so a save needs no
    synchronization. A load has ended when `load` returns.
    """

    device: str | None

    def __init__(self, layers: Sequence[PagedLayer], num_blocks: int) -> None:
        self._memory = PagedMemory(layers, num_blocks)
        self.block_bytes = self._memory.page_bytes
        gpu = self._memory.gpu
        # A call on the host delays a revoked transfer, one on a GPU waits for the device.
        self.device, self.at_once = (None, 16) if gpu is None else (gpu.uuid, 64)

    def save(self, reservation: Reservation, first: int, block_ids: Sequence[Sequence[int]]) -> None:
        """See Pages."""
        reservation.gather_all(self._memory.parts(block_ids), first)

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int]]) -> int:
        """See Pages."""
        return lease.scatter_all(self._memory.parts(block_ids), first)


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

    def save(self, reservation: Reservation, first: int, block_ids: Sequence[Sequence[int]]) -> None:
        """See Pages."""
        for slot, ids in enumerate(block_ids, first):
            buffer = self._buffer(len(ids))
            with self._stream():
                buffer.copy_(torch.cat([rows[block_id] for block_id in ids for rows in self._layers]))
            reservation.gather(slot, [buffer.numpy()])

    def load(self, lease: Lease, first: int, block_ids: Sequence[Sequence[int]]) -> int:
        """See Pages."""
        good = (self._load(lease, first + i, ids) for i, ids in enumerate(block_ids))
        return sum(takewhile(bool, good))

    def _load(self, lease: Lease, index: int, block_ids: Sequence[int]) -> bool:
        buffer = self._buffer(len(block_ids))
        if not lease.scatter(index, [buffer.numpy()]):
            return False
        with self._stream() as stream:
            parts = buffer.to(self._device).split(self._sizes * len(block_ids))
            rows = [(block_id, layer) for block_id in block_ids for layer in self._layers]
            wanted = [(layer[i], part) for (i, layer), part in zip(rows, parts, strict=True) if i != SKIPPED]
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
