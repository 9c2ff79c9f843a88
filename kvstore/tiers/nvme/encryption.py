"""Encryption at rest: what a tenant that asks for it has on NVMe is AES-256-GCM under keys of its own.

    master key   32 bytes in a file or a systemd credential, never in the tier's folder
    data key     32 random bytes a tenant, wrapped by the master key (`keys.py`)
    block key    derived from the data key and the block's name: nonces need not differ between blocks
    slot         ciphertext | tag 16 | nonce 12 | zeros up to the slot's end

The block's name, namespace fingerprint | length u32 | key, is also the associated data, so what was sealed
as one block never opens as another. DRAM stays plain, so that engines read it in place. GPUDirect is
excluded: bytes that go from the device straight to a GPU pass no processor that could open them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import TierError
from kvstore.tiers.nvme.key_files import KEY_BYTES, KeyFiles, MasterKey
from kvstore.types import SEAL_BYTES

_NONCE_BYTES = 12


class BlockCipher:
    """Seals and opens the blocks of one namespace, payloads of `block_bytes`. Any thread, the GIL free."""

    def __init__(self, data_key: bytes, fingerprint: bytes, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._data_key = data_key
        self._name = fingerprint + block_bytes.to_bytes(4, "little")

    def seal(self, key: bytes, payload: memoryview, slot: memoryview) -> None:
        """Fills `slot` with the sealed form of block `key`; of `payload` only `block_bytes` count."""
        name, nonce = self._name + key, os.urandom(_NONCE_BYTES)
        size, end = self.block_bytes, self.block_bytes + SEAL_BYTES
        tagged = end - _NONCE_BYTES
        self._cipher(name).encrypt_into(nonce, payload[:size], name, slot[:tagged])
        slot[tagged:end] = nonce
        slot[end:] = bytes(len(slot) - end)

    def open(self, key: bytes, slot: memoryview, payload: memoryview) -> bool:
        """Whether `slot` holds block `key` as it was sealed; only then `payload` has its bytes."""
        name, end = self._name + key, self.block_bytes + SEAL_BYTES
        tagged = end - _NONCE_BYTES
        nonce = slot[tagged:end]
        try:
            self._cipher(name).decrypt_into(nonce, slot[:tagged], name, payload[: self.block_bytes])
        except InvalidTag:
            return False
        return True

    def _cipher(self, name: bytes) -> AESGCM:
        return AESGCM(blake3(name, key=self._data_key).digest())


class TenantKeys:
    """Which tenants of a folder are encrypted on NVMe, and their data keys.

    Any thread may call: who makes or destroys a key waits for the disk, and for others that do.
    """

    def __init__(self, folder: Path, master: MasterKey | None, encrypt: Mapping[str, bool]) -> None:
        """Opens the data keys that the folder has. Makes and destroys nothing.

        `encrypt` says of tenants whether they are to be encrypted; of those that it leaves out, those are
        that have a data key. TierError names the tenant whose key cannot be opened, or that wants one
        without a master key.
        """
        self._changing = threading.RLock()
        self._files = KeyFiles(folder)
        self._master = master
        self._keys: dict[str, bytes] = {}
        for tenant, wrapped in self._files.load().items():
            self._keys[tenant] = self._unwrap(tenant, wrapped)
        self._encrypted = {tenant for tenant in self._keys if encrypt.get(tenant, True)}
        self._encrypted |= {tenant for tenant, wanted in encrypt.items() if wanted}
        self.turned = {t for t in encrypt if (t in self._encrypted) != (t in self._keys)}
        """Tenants that were plain here and are to be encrypted, or the other way: nothing that the folder
        has of them may stay. See `settle`."""
        for tenant in sorted(self._encrypted):
            self._master_for(tenant)

    def settle(self) -> None:
        """What there was of the turned tenants is durably gone: they get their data keys, or lose them."""
        for tenant in sorted(self.turned):
            if tenant in self._encrypted:
                self.make(tenant)
            else:
                self.erase(tenant)
        self.turned = set()

    def encrypts(self, tenant: str) -> bool:
        """Whether what this tenant has on NVMe is sealed."""
        return tenant in self._encrypted

    @property
    def encrypted(self) -> frozenset[str]:
        """Those whose blocks are sealed."""
        return frozenset(self._encrypted)

    def add(self, tenant: str) -> None:
        """From now on a tenant is encrypted that has nothing on NVMe. TierError without a master key."""
        self._master_for(tenant)
        self._encrypted.add(tenant)

    def can_open(self, tenant: str) -> bool:
        """Whether the tenant has a data key."""
        return tenant in self._keys

    def seal(self, tenant: str, fingerprint: bytes, block_bytes: int) -> BlockCipher:
        """The seal of one namespace. A tenant without a data key gets one, which is durable then.

        TierError if it cannot be written.
        """
        data_key = self._keys.get(tenant) or self.make(tenant)
        return BlockCipher(data_key, fingerprint, block_bytes)

    def make(self, tenant: str) -> bytes:
        """The tenant's data key, durable; a new one if it has none. TierError if it cannot be written."""
        with self._changing:
            if tenant not in self._keys:
                data_key = os.urandom(KEY_BYTES)
                self._files.put(tenant, self._master_for(tenant).wrap(tenant, data_key))
                self._keys[tenant] = data_key
            return self._keys[tenant]

    def erase(self, tenant: str) -> None:
        """Destroys the tenant's data key: what it sealed is noise from then on, copies of slabs included.

        Durable on return, as far as the device overwrites in place. TierError if it may still be there.
        """
        with self._changing:
            self._files.erase(tenant)
            self._keys.pop(tenant, None)

    def _master_for(self, tenant: str) -> MasterKey:
        if self._master is None:
            raise TierError(
                f"tenant {tenant} is to be encrypted and there is no master key",
                "set encryption.key_file, or give the systemd credential kvstore-key",
            )
        return self._master

    def _unwrap(self, tenant: str, wrapped: bytes) -> bytes:
        if self._master is None:
            raise TierError(
                f"blocks of tenant {tenant} in {self._files.folder} are encrypted and there is no master key",
                "set encryption.key_file to the one they were stored with, or move the folder away to start "
                "empty: nothing was changed",
            )
        data_key = self._master.unwrap(tenant, wrapped)
        if data_key is None:
            raise TierError(
                f"{self._master.source} does not open the data key of tenant {tenant} "
                f"in {self._files.folder}",
                "give the master key that it was stored with, or move the folder away to start empty: "
                "nothing was changed",
            )
        return data_key
