"""Host memory for blocks that are promised to the engine. The ranks of an engine, on one node, share it.

The scheduler half fills rows. Each rank copies its part of a row into a page. The bytes are here, verified,
before the promise is made, so it does not depend on the daemon.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import ConfigError

logger = logging.getLogger("tensorrt_llm.kvstore")

_HEAD = 4096
_NONCE = 16
_PROGRESS = 64
"""Where the head has the number of the last step whose loads have ended: a u64 for each rank."""
MOST_RANKS = (_HEAD - _PROGRESS) // 8


@dataclass(frozen=True, slots=True)
class Place:
    """How other processes open the memory. `sizes`: bytes of a page of each rank."""

    path: str
    nonce: bytes
    rows: int
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the memory."""
        return _HEAD + self.rows * sum(self.sizes)


class Staging:
    """The memory, in the process that has made it or in another one. `place`: where it is."""

    def __init__(self, descriptor: int, place: Place, is_own: bool) -> None:
        self.place = place
        self._descriptor = descriptor if is_own else -1
        self._memory = mmap.mmap(descriptor, place.nbytes)
        whole = np.frombuffer(self._memory, np.uint8)
        self._progress = whole[_PROGRESS:_HEAD].view(np.uint64)[: len(place.sizes)]
        self._parts, start = list[npt.NDArray[np.uint8]](), _HEAD
        for size in place.sizes:
            self._parts.append(whole[start : start + place.rows * size].reshape(place.rows, size))
            start += place.rows * size

    @classmethod
    def make(cls, sizes: Sequence[int], nbytes: int) -> Staging:
        """Makes memory of at most `nbytes` for pages of these sizes. Raises ConfigError if none fits."""
        rows = nbytes // sum(sizes)
        if not rows:
            raise ConfigError(
                f"a block of all ranks has {sum(sizes)} bytes, and staging_mib has room for {nbytes}",
                "raise staging_mib, or lower kv_cache_config.tokens_per_block",
            )
        if len(sizes) > MOST_RANKS:
            raise ConfigError(f"the engine has {len(sizes)} ranks", f"served are up to {MOST_RANKS}")
        descriptor = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC)
        nonce = os.urandom(_NONCE)
        place = Place(f"/proc/{os.getpid()}/fd/{descriptor}", nonce, rows, tuple(sizes))
        os.ftruncate(descriptor, place.nbytes)
        os.pwrite(descriptor, nonce, 0)
        # The descriptor stays open: its path is how other processes open the memory.
        return cls(descriptor, place, is_own=True)

    @classmethod
    def open(cls, place: Place) -> Staging:
        """Opens the memory of another process. Raises ConfigError if it is not on this node."""
        hint = "all ranks run on one node, in one container, as one user"
        try:
            descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"a rank cannot open the memory of rank 0: {error}", hint) from error
        try:
            # On another node, the path may be another file.
            if os.fstat(descriptor).st_size != place.nbytes or os.pread(descriptor, _NONCE, 0) != place.nonce:
                raise ConfigError("a rank has found other memory than that of rank 0", hint)
            return cls(descriptor, place, is_own=False)
        finally:
            os.close(descriptor)

    def part(self, rank: int) -> npt.NDArray[np.uint8]:
        """Returns the pages of a rank, shape (rows, bytes of a page)."""
        return self._parts[rank]

    def tensor(self, rank: int, is_cuda: bool) -> torch.Tensor:
        """Returns the pages of a rank as a tensor. `is_cuda`: copies to a GPU are to be asynchronous."""
        tensor = torch.from_numpy(self._parts[rank])
        if is_cuda:
            failed = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            if int(failed):
                logger.warning("loads are slower: the memory for them cannot be page-locked (%s)", failed)
        return tensor

    def ended(self, rank: int, step: int) -> None:
        """Notes that the loads of a rank until this step have ended."""
        self._progress[rank] = step

    def close(self) -> None:
        """Closes the descriptor. The memory stays as long as it is in use."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def done(self) -> int:
        """The last step whose loads have ended on all ranks."""
        return int(self._progress.min())


class Rows:
    """Which rows of the memory are free. Not thread-safe: the scheduler half has it alone."""

    def __init__(self, count: int) -> None:
        self._is_free = np.ones(count, np.bool_)

    @property
    def free(self) -> int:
        """The number of free rows."""
        return int(self._is_free.sum())

    def take(self, count: int) -> range:
        """Returns consecutive free rows, at most `count`: as many as lie together."""
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        if not len(starts):
            return range(0)
        lengths = stops - starts
        fits = np.flatnonzero(lengths >= count)
        best = int(fits[0]) if len(fits) else int(lengths.argmax())
        rows = range(int(starts[best]), int(starts[best]) + min(count, int(lengths[best])))
        self._is_free[rows.start : rows.stop] = False
        return rows

    def give_back(self, rows: range) -> None:
        """Frees rows."""
        self._is_free[rows.start : rows.stop] = True
