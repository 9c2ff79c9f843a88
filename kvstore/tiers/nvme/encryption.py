"""Encryption at rest: blocks of encrypted tenants are AES-256-GCM on NVMe, under a data key for each tenant.

    master key   32 bytes in a file or a systemd credential, never in the tier's folder
    data key     32 random bytes a tenant, wrapped by the master key (`key_files.py`)
    block key    derived from the data key and the block's name: nonces may repeat between blocks
    slot         ciphertext | tag 16 | nonce 12 | zeros up to the slot's end

The block's name, namespace fingerprint | length u32 | key, is the associated data too, so one block never
decrypts as another. DRAM stays plain, because engines read it in place. GPUDirect is excluded: bytes that go
from the device straight to a GPU pass no processor that could decrypt them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import TierError
from kvstore.tiers.job_thread import JobThread
from kvstore.tiers.nvme.key_files import KEY_BYTES, KeyFiles, MasterKey
from kvstore.types import ENCRYPTION_BYTES

_NONCE_BYTES = 12


class BlockCipher:
    """Encrypts and decrypts blocks of one namespace, payloads of `block_bytes`. Safe on any thread."""

    def __init__(self, data_key: bytes, fingerprint: bytes, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._data_key = data_key
        self._name = fingerprint + block_bytes.to_bytes(4, "little")

    def encrypt(self, key: bytes, payload: memoryview, slot: memoryview) -> None:
        """Fills `slot` with block `key`, encrypted. Uses the first `block_bytes` of `payload`."""
        name, nonce = self._name + key, os.urandom(_NONCE_BYTES)
        size, end = self.block_bytes, self.block_bytes + ENCRYPTION_BYTES
        tagged = end - _NONCE_BYTES
        self._cipher(name).encrypt_into(nonce, payload[:size], name, slot[:tagged])
        slot[tagged:end] = nonce
        slot[end:] = bytes(len(slot) - end)

    def decrypt(self, key: bytes, slot: memoryview, payload: memoryview) -> bool:
        """Fills `payload` from `slot`. Returns False, and `payload` is undefined, for another block."""
        name, end = self._name + key, self.block_bytes + ENCRYPTION_BYTES
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
    """The encrypted tenants of a folder and their data keys. Any thread may call; changes are slow."""

    def __init__(self, folder: Path, master: MasterKey | None, encrypt: Mapping[str, bool]) -> None:
        """Opens the data keys of the folder. Writes nothing.

        `encrypt` says which tenants to encrypt. A tenant that it omits is encrypted if it has a data key.
        TierError names a tenant whose key cannot be opened, or that needs one without a master key.
        """
        self._changing = threading.RLock()
        self._jobs = JobThread("kvstore-keys")
        self._files = KeyFiles(folder)
        self._master = master
        self._keys: dict[str, bytes] = {}
        for tenant, wrapped in self._files.load().items():
            self._keys[tenant] = self._unwrap(tenant, wrapped)
        self._encrypted = {tenant for tenant in self._keys if encrypt.get(tenant, True)}
        self._encrypted |= {tenant for tenant, wanted in encrypt.items() if wanted}
        self.changed = {t for t in encrypt if (t in self._encrypted) != (t in self._keys)}
        """Tenants with encryption newly turned on or off. Their stored blocks must be deleted, then `settle`
        called."""
        for tenant in sorted(self._encrypted):
            self._master_for(tenant)

    def settle(self) -> None:
        """Makes or erases the data keys of the changed tenants. Their old blocks must be durably deleted."""
        for tenant in sorted(self.changed):
            if tenant in self._encrypted:
                self.make(tenant)
            else:
                self.erase(tenant)
        self.changed = set()

    def encrypts(self, tenant: str) -> bool:
        """Returns whether a tenant is encrypted: its blocks need `ENCRYPTION_BYTES` more each."""
        return tenant in self._encrypted

    @property
    def encrypted(self) -> frozenset[str]:
        """The encrypted tenants."""
        return frozenset(self._encrypted)

    def encrypt(self, tenant: str) -> None:
        """Encrypts a tenant without stored blocks from now on. TierError without a master key."""
        self._master_for(tenant)
        self._encrypted.add(tenant)

    def has_key(self, tenant: str) -> bool:
        """Returns whether a tenant has a data key."""
        return tenant in self._keys

    def lacks_key(self, tenant: str) -> bool:
        """Returns whether an encrypted tenant still needs a data key."""
        return tenant in self._encrypted and tenant not in self._keys

    def cipher(self, tenant: str, fingerprint: bytes, block_bytes: int) -> BlockCipher:
        """Returns the cipher of a namespace. Makes the tenant's data key if absent. See `make`."""
        data_key = self._keys.get(tenant) or self.make(tenant)
        return BlockCipher(data_key, fingerprint, block_bytes)

    def make(self, tenant: str) -> bytes:
        """Returns the tenant's data key, durable; makes one if absent. TierError if it cannot be written."""
        with self._changing:
            if tenant not in self._keys:
                data_key = os.urandom(KEY_BYTES)
                self._files.put(tenant, self._master_for(tenant).wrap(tenant, data_key))
                self._keys[tenant] = data_key
            return self._keys[tenant]

    def erase(self, tenant: str) -> None:
        """Destroys the tenant's data key, if any: its blocks can never be decrypted again.

        Durable on return, as far as the device overwrites in place. TierError if the key may still exist.
        """
        with self._changing:
            self._files.erase(tenant)
            self._keys.pop(tenant, None)

    def change(
        self, change: Callable[[str], object], tenant: str, done: Callable[[Exception | None], None]
    ) -> None:
        """Runs `make` or `erase` on a thread. `done` gets the error, if any, on that thread."""

        def run() -> None:
            error = None
            try:
                change(tenant)
            except Exception as failure:
                error = failure
            done(error)

        if not self._jobs.submit(run):
            done(TierError(f"the key of tenant {tenant} cannot be changed: the device is being closed"))

    def close(self) -> None:
        """Returns when all changes have ended."""
        self._jobs.close()

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
