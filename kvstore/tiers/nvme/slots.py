"""Maps slots of a folder to file offsets and picks the transform of each block's I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvstore.core.actions import BlockIds, Where
from kvstore.cuda.device import DeviceBuffer
from kvstore.tiers.base import BlockIO, IOEngine, Memory
from kvstore.tiers.nvme.encryption import BlockCipher, TenantKeys
from kvstore.tiers.nvme.io.transforms import DeviceIO, EncryptedIO
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.store import Namespace
from kvstore.tiers.results import verify


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
        """Returns one I/O a block. `buffers` are all host memory or all memory of one GPU.

        With `fingerprints`, reads for a GPU are verified in host memory if they pass through it.
        """
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


def in_gpu(buffers: Sequence[Memory]) -> bool:
    """Returns whether buffers are memory of a GPU."""
    return bool(buffers) and isinstance(buffers[0], DeviceBuffer)


def _is_block(identity: BlockIds, i: int, fingerprint: bytes, length: int, slot: memoryview) -> bool:
    return verify(identity, i, slot, fingerprint, length)
