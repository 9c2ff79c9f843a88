"""The paged KV memory of an engine: tables of the pieces of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.client.parts import Buffer, Parts, check_place, flat, gpu_of
from kvstore.cuda.device import Memory
from kvstore.errors import MisuseError


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """The cache of one layer: its row of page i is `row_bytes` of a buffer from `start` + i * `step` on.

    `buffer` is a C-contiguous buffer or a device array; several layers may share one.
    """

    buffer: Buffer
    start: int
    step: int
    row_bytes: int


class PagedMemory:
    """The paged KV memory of an engine, on the host or on a GPU: `gpu`, None for the host.

    A page is the sequence of its rows, one in each layer: `page_bytes`.
    """

    def __init__(self, layers: Sequence[PagedLayer], pages: int) -> None:
        """`pages`: their number. The memory is kept alive. Raises MisuseError for a layer that does not have
        room for so many rows, or whose rows overlap, and for layers in several places.
        """
        if not layers:
            raise MisuseError("a paged memory without layers", "at least one layer")
        self.pages = pages
        self.page_bytes = sum(layer.row_bytes for layer in layers)
        buffers: list[Memory] = []
        for i, layer in enumerate(layers):
            buffers.append(flat(layer.buffer, f"layer {i}"))
            check_place(gpu_of(buffers[i]), gpu_of(buffers[0]))
            _check_rows(f"layer {i}", layer, pages, buffers[i].nbytes)
        self.gpu = gpu_of(buffers[0])
        # What pages that are not wanted bring is written here.
        scratch_bytes = max(layer.row_bytes for layer in layers)
        scratch = self.gpu.allocate(scratch_bytes) if self.gpu else memoryview(bytearray(scratch_bytes))
        self._buffers = [*buffers, scratch]
        self._starts = np.array([layer.start for layer in layers], np.int64)
        self._steps = np.array([layer.step for layer in layers], np.int64)
        self._row_bytes = np.array([layer.row_bytes for layer in layers], np.uint64)

    def parts(self, page_ids: npt.ArrayLike) -> Parts:
        """Returns blocks for `Lease.scatter_all` and `Reservation.gather_all`.

        `page_ids`: shape (blocks, pages of a block). -1 skips a page; only a scatter may do this. Raises
        MisuseError for a page that does not exist.
        """
        ids = self._checked(page_ids)
        blocks, pages = ids.shape
        layers = len(self._starts)
        offsets = (ids[:, :, None] * self._steps + self._starts).reshape(-1)
        numbers = np.tile(np.arange(layers, dtype=np.uint32), blocks * pages)
        skipped = np.repeat(ids.reshape(-1) < 0, layers)
        is_partial = bool(skipped.any())
        if is_partial:
            numbers[skipped], offsets[skipped] = layers, 0
        lengths = np.tile(self._row_bytes, blocks * pages)
        ends = np.arange(1, blocks + 1) * (pages * layers) - 1
        return Parts(self._buffers, numbers, offsets.view(np.uint64), lengths, ends, is_partial)

    def _checked(self, page_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        try:
            ids = np.asarray(page_ids)
        except ValueError:
            raise MisuseError("blocks of different numbers of pages", "one row of page ids a block") from None
        if not ids.size:
            return np.zeros((len(ids), 0), np.int64)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise MisuseError(
                f"page ids of shape {ids.shape} and type {ids.dtype}", "integers (blocks, pages of a block)"
            )
        if ids.min() < -1 or ids.max() >= self.pages:
            bad = ids[(ids < -1) | (ids >= self.pages)][0]
            raise MisuseError(f"page {bad} of {self.pages}", f"0 to {self.pages - 1}, or -1 to skip one")
        return ids.astype(np.int64, copy=False)


def _check_rows(name: str, layer: PagedLayer, pages: int, nbytes: int) -> None:
    """Raises MisuseError unless `pages` rows of a layer lie apart from each other in `nbytes`."""
    if pages < 1 or layer.row_bytes < 1 or (pages > 1 and layer.step < layer.row_bytes):
        raise MisuseError(
            f"{name} has {pages} rows of {layer.row_bytes} bytes, one each {layer.step} bytes",
            "at least one row of at least one byte, and rows that do not overlap",
        )
    stop = layer.start + (pages - 1) * layer.step + layer.row_bytes
    if layer.start < 0 or stop > nbytes:
        raise MisuseError(
            f"{name} has {pages} rows in bytes {layer.start} to {stop} of a buffer of {nbytes} bytes",
            "rows lie within the buffer",
        )
