"""The KV pool of a rank as pages of bytes, and the copies between pages and host memory.

A page is one block of TensorRT-LLM: keys and values of all layers of the rank, one run of bytes. Copies are
enqueued on the stream of the forward pass. So a load has ended before the pass reads the page, and a save has
read the page before anything later writes it, also after the request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvstore import Layout
from kvstore.errors import ConfigError, MisuseError
from kvstore_trtllm.settings import RELEASE, Model

SERVED_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a rank's pages: `tokens` of `layers`, with `heads` KV heads of `dim` values."""

    page_bytes: int
    dtype: str
    tokens: int
    layers: int
    heads: int
    dim: int
    device: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream. `event`: None if everything before it has ended."""

    event: Any = None

    def passed(self) -> bool:
        """Returns whether everything before it has ended."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Waits until everything before it has ended."""
        if self.event is not None:
            self.event.synchronize()


class Pages:
    """The pages of a pool. Raises ConfigError for a pool that is not served. Not thread-safe.

    `model`, `tokens`: of the engine. `ranks`: the number of its ranks. `count`: the number of pages.
    """

    def __init__(self, pool: Any, model: Model, tokens: int, ranks: int) -> None:
        dtype = str(getattr(pool, "dtype", type(pool).__name__)).removeprefix("torch.")
        if dtype not in SERVED_DTYPES:
            raise ConfigError(
                f"the KV pool has the type {dtype}",
                f"served are {', '.join(SERVED_DTYPES)}: leave out kv_cache_config.dtype",
            )
        heads = max(1, model.heads // ranks)
        expected = (model.layers, 2, tokens * heads * model.dim)
        if pool.dim() != 4 or tuple(pool.shape[1:]) != expected or not pool.shape[0]:
            raise ConfigError(
                f"the KV pool has the shape {tuple(pool.shape)}, not (blocks, {str(expected)[1:]}",
                "one pool with keys and values of all layers is served: leave out kv_connector_config",
            )
        if not pool.is_contiguous():
            raise ConfigError("the KV pool is not one run of bytes", f"use TensorRT-LLM {RELEASE}")
        self._rows = pool.view(torch.uint8).view(pool.shape[0], -1)
        self.is_cuda = bool(pool.is_cuda)
        self.count = int(pool.shape[0])
        self.shape = Shape(
            self._rows.shape[1], dtype, tokens, model.layers, heads, model.dim, _name_of(pool.device)
        )
        try:
            Layout("any", self.shape.page_bytes)
        except MisuseError as error:
            raise ConfigError(
                f"a page is too large for a block: {error}", "a smaller kv_cache_config.tokens_per_block"
            ) from error

    def host_memory(self, pages: int) -> torch.Tensor:
        """Returns host memory for so many pages, shape (pages, bytes of a page), page-locked beside a GPU."""
        return torch.empty(pages, self.shape.page_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def load(self, rows: Sequence[torch.Tensor], block_ids: Sequence[int], stream: Any) -> Mark:
        """Enqueues copies of rows of host memory into pages. They must stay as they are until the mark."""
        self._check(block_ids)
        with self._on(stream):
            for row, block_id in zip(rows, block_ids, strict=True):
                self._rows[block_id].copy_(row, non_blocking=True)
            return self._mark(stream)

    def save(self, rows: Sequence[torch.Tensor], block_ids: Sequence[int], stream: Any) -> Mark:
        """Enqueues copies of pages into rows of host memory, which are complete from the mark on."""
        self._check(block_ids)
        with self._on(stream):
            for row, block_id in zip(rows, block_ids, strict=True):
                row.copy_(self._rows[block_id], non_blocking=True)
            return self._mark(stream)

    def _check(self, block_ids: Sequence[int]) -> None:
        """Raises IndexError for numbers that are no pages. -1 would be the page of another request."""
        for block_id in block_ids:
            if not 0 <= block_id < self.count:
                raise IndexError(f"the KV pool has {self.count} pages, and no page {block_id}")

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.is_cuda else nullcontext()

    def _mark(self, stream: Any) -> Mark:
        if not self.is_cuda:
            return Mark()
        event = torch.cuda.Event()
        event.record(stream)
        return Mark(event)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"
