"""Maps slots of a folder to file offsets and picks the transform of each block's I/O."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.core.actions import BlockIds, Where
from kvstore.core.blocks.block_table import Rows
from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import TierError
from kvstore.tiers.base import BlockIO, IOEngine, Memory
from kvstore.tiers.nvme.encryption import BlockCipher, TenantKeys
from kvstore.tiers.nvme.io.transforms import DeviceIO, EncryptedIO
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.store import Namespace
from kvstore.tiers.results import verify
from kvstore.tiers.slot_views import SlotViews


class SlotMap:
    """Slot sizes of extents in `slot_bytes`, and the ciphers of encrypted namespaces."""

    def __init__(self, slabs: Slabs, engine: IOEngine) -> None:
        self.slot_bytes: dict[int, int] = {}
        self._slabs = slabs
        self._engine = engine
        self._ciphers: dict[int, BlockCipher] = {}

    def set_namespace(self, number: int, namespace: Namespace, keys: TenantKeys) -> None:
        """Uses the cipher of a namespace from now on. TierError if its data key cannot be written."""
        self._ciphers.pop(number, None)
        if namespace.encrypted:
            length = int(namespace.layout["block_bytes"])
            self._ciphers[number] = keys.cipher(namespace.tenant, namespace.fingerprint, length)

    def forget_namespace(self, number: int) -> None:
        """Forgets the cipher of a namespace."""
        self._ciphers.pop(number, None)

    def ios(
        self,
        identity: BlockIds,
        where: Where,
        buffers: Sequence[Any],
        write: bool,
        lengths: dict[int, int],
        fingerprints: dict[int, bytes] | None = None,
    ) -> list[BlockIO]:
        """Returns one I/O a run of neighbours. `buffers` are all host memory or all memory of one GPU.

        With `fingerprints`, reads for a GPU are verified in host memory if they pass through it. Encrypted
        blocks, and those of other buffers than `SlotViews`, have an I/O each.
        """
        if isinstance(buffers, SlotViews) and self._ciphers.keys().isdisjoint(identity.namespace.tolist()):
            return self._run_ios(identity, where, buffers, write)
        ios: list[BlockIO] = []
        to_gpu = in_gpu(buffers)
        places = zip(identity.namespace.tolist(), where.extent.tolist(), where.index.tolist(), strict=True)
        for i, (number, extent, index) in enumerate(places):
            size, cipher, check = self.slot_bytes[extent], self._ciphers.get(number), None
            fd, offset = self._slabs.fd(extent), index * size
            if to_gpu and fingerprints is not None:
                check = partial(_is_block, identity, i, fingerprints[number], lengths[number])
            if cipher is not None:
                key = identity.key(i)
                ios.append(EncryptedIO(fd, offset, buffers[i], write, cipher, key, size, check))
            elif not to_gpu or (self._engine.device_memory and buffers[i].nbytes == size):
                ios.append(BlockIO(fd, offset, buffers[i], write))
            else:
                ios.append(DeviceIO(fd, offset, buffers[i], write, size, lengths[number], check))
        return ios

    def _run_ios(self, identity: BlockIds, where: Where, buffers: SlotViews, write: bool) -> list[BlockIO]:
        starts = _runs(identity, where, buffers.where)
        counts = np.diff(starts, append=len(where)).tolist()
        ios: list[BlockIO] = []
        for first, count in zip(starts.tolist(), counts, strict=True):
            extent, index = divmod(int(where.place[first]), 1 << 32)
            fd, offset = self._slabs.fd(extent), index * self.slot_bytes[extent]
            ios.append(BlockIO(fd, offset, buffers.run(first, count), write, blocks=count))
        return ios


def _runs(identity: BlockIds, *wheres: Where) -> Rows:
    """Returns the first block of each run: blocks of one namespace whose slots are neighbours everywhere."""
    breaks = identity.namespace[1:] != identity.namespace[:-1]
    for where in wheres:
        breaks |= where.place[1:] != where.place[:-1] + np.uint64(1)
    starts: Rows = np.append(0, np.flatnonzero(breaks) + 1) if len(identity) else np.empty(0, np.int64)
    return starts


def submit_blocks(
    engine: IOEngine,
    ios: Sequence[BlockIO],
    done: Callable[[list[OSError | None]], None],
    urgent: bool = False,
) -> None:
    """Submits I/Os of one or more blocks each. `done` gets one outcome a block.

    The blocks of a run that fails are moved again one by one, so that only the bad ones fail.
    """

    def ended(errors: list[OSError | None]) -> None:
        outcomes = [error for io, error in zip(ios, errors, strict=True) for _ in range(io.blocks)]
        again = [
            io.split() if io.blocks > 1 and error is not None and error.errno != errno.EAGAIN else []
            for io, error in zip(ios, errors, strict=True)
        ]
        if not any(again):
            return done(outcomes)
        firsts = np.cumsum([0, *(io.blocks for io in ios[:-1])]).tolist()
        which = [first + i for first, parts in zip(firsts, again, strict=True) for i in range(len(parts))]

        def ended_again(errors: list[OSError | None]) -> None:
            for i, error in zip(which, errors, strict=True):
                outcomes[i] = error
            done(outcomes)

        try:
            engine.submit([part for parts in again for part in parts], ended_again, urgent)
        except TierError:  # closed meanwhile
            done(outcomes)

    engine.submit(ios, ended, urgent)


def in_gpu(buffers: Sequence[Memory]) -> bool:
    """Returns whether buffers are memory of a GPU."""
    return bool(buffers) and isinstance(buffers[0], DeviceBuffer)


def _is_block(identity: BlockIds, i: int, fingerprint: bytes, length: int, slot: memoryview) -> bool:
    return verify(identity, i, slot, fingerprint, length)
