"""The host pool of HiCache as pages of bytes: a stored block is one page.

A page has the keys of all its layers and tokens, then the values, in the order of the pool's layout; with
latent attention it has latents alone. Bytes go straight between the pool and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvstore import Layout, Lease, PagedLayer, PagedMemory, Reservation
from kvstore.errors import ConfigError, MisuseError

SERVED_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""The served values of --hicache-mem-layout."""


def check_layout(layout: str) -> None:
    """Raises ConfigError for a layout of the host pool that is not served."""
    if layout not in SERVED_LAYOUTS:
        raise ConfigError(f"--hicache-mem-layout is {layout}", f"served are {', '.join(SERVED_LAYOUTS)}")


def check_size(page_bytes: int) -> None:
    """Raises ConfigError for pages that are too large for a block."""
    try:
        Layout("any", page_bytes)
    except MisuseError as error:
        raise ConfigError(f"a page is too large for a block: {error}", "a smaller --page-size") from error


class HostPages:
    """Copies pages between a host pool and slots. Several threads may call, for different pages.

    `page_tokens`, `page_bytes`: of one page. `shape`: layers, heads and numbers a head, of one half of the
    pool if it has keys and values. `form`: the shape in words. Raises ConfigError for a pool that is not
    served.
    """

    def __init__(self, pool: Any) -> None:
        if type(pool) not in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
            raise ConfigError(
                f"the host pool is a {type(pool).__name__}",
                "models with full or latent attention are served, with as large values as keys: "
                "leave out --hicache-storage-backend",
            )
        check_layout(pool.layout)
        self.page_tokens = int(pool.page_size)
        self.layout = str(pool.layout)
        self.dtype = str(pool.dtype).removeprefix("torch.")
        if type(pool) is MLATokenToKVPoolHost:
            self.shape = (int(pool.layer_num), 1, int(pool.kv_cache_dim))
            self.form = f"{pool.layer_num} layers, latents of {pool.kv_lora_rank} + {pool.qk_rope_head_dim}"
            self._halves = 1
        else:
            self.shape = (int(pool.layer_num), int(pool.head_num), int(pool.head_dim))
            self.form = f"{pool.layer_num} layers, {pool.head_num} heads of {pool.head_dim}"
            self._halves = 2
        self._pages = int(pool.page_num)
        self._memory = PagedMemory(self._layers(pool.kv_buffer), self._pages)
        self.page_bytes = self._memory.page_bytes
        check_size(self.page_bytes)

    def save(self, reservation: Reservation, page_ids: npt.NDArray[np.int64]) -> None:
        """Fills all slots of a reservation from these pages."""
        reservation.gather_all(self._memory.parts(page_ids[:, None]))

    def load(self, lease: Lease, page_ids: npt.NDArray[np.int64]) -> int:
        """Fills these pages from a lease; returns the number of leading ones that are good."""
        return lease.scatter_all(self._memory.parts(page_ids[:, None]))

    def ids(self, host_indices: Any, pages: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of pages from the indices of their tokens. Raises ValueError for others."""
        indices = np.asarray(host_indices, np.int64)
        if indices.shape != (pages * self.page_tokens,):
            raise ValueError(f"{indices.shape} host indices for {pages} pages of {self.page_tokens} tokens")
        ids, within = np.divmod(indices[:: self.page_tokens], self.page_tokens)
        if within.any():
            raise ValueError("a page does not start at a multiple of the page size")
        return ids

    def _layers(self, pool: torch.Tensor) -> Sequence[PagedLayer]:
        """Returns where the pool has the rows of a page: keys in its first half, values in the second."""
        layers, heads, dim = self.shape
        row_bytes = self.page_tokens * heads * dim * pool.itemsize
        half = self._pages * layers * row_bytes
        if not pool.is_contiguous() or prod(pool.shape) * pool.itemsize != self._halves * half:
            raise ConfigError(f"the host pool has the shape {tuple(pool.shape)}", "use SGLang 0.5.23")
        buffer = pool.view(torch.uint8).reshape(-1).numpy()
        if self.layout != "layer_first":
            page = layers * row_bytes
            return [PagedLayer(buffer, start, page, page) for start in range(0, self._halves * half, half)]
        starts = range(0, self._halves * half, half // layers)
        return [PagedLayer(buffer, start, row_bytes, row_bytes) for start in starts]
