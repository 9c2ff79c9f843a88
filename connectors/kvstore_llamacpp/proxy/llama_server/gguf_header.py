"""Reads the architecture of a model from the head of its GGUF file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from kvstore.errors import ConfigError

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of values, by GGUF's number."""
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 1 << 16
_LONGEST = 1 << 20


def architecture_of(path: Path) -> str:
    """Returns `general.architecture`. Raises ConfigError for a file that is no GGUF or has none."""
    try:
        with path.open("rb") as file:
            return _Header(file).find("general.architecture")
    except OSError as error:
        raise ConfigError(
            f"cannot read the model {path}: {error.strerror}", "check the path behind -m"
        ) from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no GGUF file that can be read: {error}", "take another file") from error


class _Header:
    """Reads keys and values in their order. Raises ValueError for bytes that are none."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, _, self._keys = struct.unpack("<IQQ", self._take(20))
        if not 2 <= version <= 3 or self._keys > _MOST_KEYS:
            raise ValueError(f"version {version} with {self._keys} keys")

    def find(self, wanted: str) -> str:
        for _ in range(self._keys):
            key, kind = self._string(), self._u32()
            if key == wanted and kind == _STRING:
                return self._string()
            self._skip(kind)
        raise ValueError(f"it has no {wanted}")

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = struct.unpack("<IQ", self._take(12))
            if inner in _SIZES:
                self._file.seek(_SIZES[inner] * count, 1)
            elif inner == _STRING:
                for _ in range(count):
                    self._string()
            else:
                raise ValueError(f"a list has values of type {inner}")
        elif kind in _SIZES:
            self._take(_SIZES[kind])
        else:
            raise ValueError(f"a value has type {kind}")

    def _string(self) -> str:
        [length] = struct.unpack("<Q", self._take(8))
        if length > _LONGEST:
            raise ValueError(f"a text of {length} bytes")
        return self._take(length).decode()

    def _u32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _take(self, nbytes: int) -> bytes:
        raw = self._file.read(nbytes)
        if len(raw) < nbytes:
            raise ValueError("it ends in its header")
        return raw
