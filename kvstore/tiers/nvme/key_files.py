"""Key files: the master key, from outside, and a file for each tenant's data key, wrapped by the master key.

    `folder`/keys/TENANT.key    nonce 12 | wrapped data key 32 | tag 16; the tenant's name is authenticated

The keys are not in LMDB, which copies a page to change it and leaves the old page: a deleted key could be
recovered. Not covered here: the use of keys (`encryption.py`).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import ConfigError, TierError
from kvstore.tiers.nvme.slabs import sync_folder

KEY_BYTES = 32
CREDENTIAL = "kvstore-key"
_NONCE_BYTES, _TAG_BYTES = 12, 16
_WRAPPED_BYTES = _NONCE_BYTES + KEY_BYTES + _TAG_BYTES
_ERASED = bytes(_WRAPPED_BYTES)
_SUFFIX = ".key"
_PURPOSE = b"kvstore-data-key-1:"


@dataclass(frozen=True, slots=True)
class MasterKey:
    """Wraps data keys. `source` names its origin."""

    source: str
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, key_file: Path | None) -> MasterKey | None:
        """Returns the key in a file of 64 hex digits, without a file the systemd credential, or None.

        ConfigError names a file that is unreadable, invalid, or accessible to other users: a reader of the
        key can read every block. The mode of a credential is not checked, because systemd controls its
        access.
        """
        if key_file is not None:
            return cls(str(key_file), _digits(key_file, private=True))
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        path = Path(folder) / CREDENTIAL if folder else None
        if path is None or not path.exists():
            return None
        return cls(f"the systemd credential {CREDENTIAL}", _digits(path, private=False))

    def wrap(self, tenant: str, data_key: bytes) -> bytes:
        """Returns a tenant's data key as stored on disk."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self.key).encrypt(nonce, data_key, _PURPOSE + tenant.encode())

    def unwrap(self, tenant: str, wrapped: bytes) -> bytes | None:
        """Returns the data key, None if it was not wrapped by this master key for this tenant."""
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            return AESGCM(self.key).decrypt(nonce, sealed, _PURPOSE + tenant.encode())
        except (InvalidTag, ValueError):
            return None


def _digits(path: Path, private: bool) -> bytes:
    """Returns the 32 bytes of a file of hex digits."""
    hint = "make one: (umask 077; openssl rand -hex 32 > FILE)"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mode = os.fstat(fd).st_mode
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read the master key {path}: {error.strerror}", hint) from error
    if private and mode & 0o077:
        raise ConfigError(
            f"the master key {path} has mode {stat.S_IMODE(mode):04o}: others than its owner may reach it",
            f"chown it to the daemon's user and chmod 600 {path}, or give it as a systemd credential",
        )
    digits = text.strip()
    if not re.fullmatch(rb"[0-9a-fA-F]{64}", digits):
        raise ConfigError(f"{path} holds no key: 64 hex digits are wanted, {len(digits)} bytes found", hint)
    return bytes.fromhex(digits.decode())


class KeyFiles:
    """The wrapped data keys in a tier's folder, by tenant. After a crash a key is whole or absent."""

    def __init__(self, folder: Path) -> None:
        """Makes nothing before the first `put`."""
        self.folder = folder / "keys"

    def load(self) -> dict[str, bytes]:
        """Returns all wrapped keys. TierError names an unreadable or invalid file."""
        found = {}
        try:
            names = os.listdir(self.folder) if self.folder.exists() else []
            for path in (self.folder / name for name in sorted(names) if name.endswith(_SUFFIX)):
                wrapped = path.read_bytes()
                if wrapped == _ERASED:  # a crash before the file was removed
                    continue
                if len(wrapped) != _WRAPPED_BYTES:
                    raise TierError(
                        f"{path} has {len(wrapped)} bytes and should have {_WRAPPED_BYTES}",
                        "bring it back from a copy, or remove it: the tenant's blocks on NVMe are lost then",
                    )
                found[unquote(path.name.removesuffix(_SUFFIX))] = wrapped
        except OSError as error:
            raise _failed("read", self.folder, error) from error
        return found

    def put(self, tenant: str, wrapped: bytes) -> None:
        """Stores a wrapped key, durable on return."""
        path = self._path(tenant)
        new = path.with_suffix(".new")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _write(new, wrapped, os.O_CREAT | os.O_TRUNC)
            new.replace(path)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        except OSError as error:
            raise _failed("write", path, error) from error

    def erase(self, tenant: str) -> None:
        """Overwrites a wrapped key in place, then removes it. Durable on return. Ignores an absent key."""
        path = self._path(tenant)
        try:
            if path.exists():
                _write(path, _ERASED, 0)
                path.unlink()
                sync_folder(self.folder)
        except OSError as error:
            raise _failed("erase", path, error) from error

    def _path(self, tenant: str) -> Path:
        return self.folder / f"{quote(tenant, safe='')}{_SUFFIX}"


def _write(path: Path, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(what: str, path: Path, error: OSError) -> TierError:
    return TierError(f"cannot {what} {path}: {error.strerror}", "is the folder writable, and its disk well?")
