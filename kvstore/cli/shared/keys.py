"""Parses keys given in hex, or in files with one key per line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import MisuseError
from kvstore.types import MAX_KEY_BYTES

_MOST_FILE_BYTES = 64 << 20
_BATCH_KEYS = 1024
_HEX_HINT = f"keys are 1 to {MAX_KEY_BYTES} bytes in hex, with or without 0x; a file has one key per line"
_HEX_KEY = re.compile(rf"(?:0[xX])?((?:[0-9a-fA-F]{{2}}){{1,{MAX_KEY_BYTES}}})")


def keys_of(text: str) -> list[bytes]:
    """Returns the key in `text`, or the keys in the file of this name. Raises MisuseError for other texts."""
    key = _parsed(text)
    if key is not None:
        return [key]
    path = Path(text)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise MisuseError(f"{path} is larger than {_MOST_FILE_BYTES} bytes", _HEX_HINT)
        lines = path.read_text("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        raise MisuseError(f"{text!r:.160} is neither a key nor a file", _HEX_HINT) from None
    except (OSError, ValueError) as error:
        raise MisuseError(f"cannot read {text!r:.160}: {error}", _HEX_HINT) from None
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            key = _parsed(line.strip())
            if key is None:
                raise MisuseError(f"{path} line {number} is not a key: {line.strip()!r:.80}", _HEX_HINT)
            keys.append(key)
    if not keys:
        raise MisuseError(f"{path} contains no keys", _HEX_HINT)
    return keys


def batches(texts: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """Yields all keys as batches of concatenated keys with the key size in bytes. Raises MisuseError."""
    keys = [key for text in texts for key in keys_of(text)]
    size = len(keys[0])
    odd = next((key for key in keys if len(key) != size), None)
    if odd is not None:
        raise MisuseError(f"keys of {size} and of {len(odd)} bytes in one call", "use keys of one length")
    for start in range(0, len(keys), _BATCH_KEYS):
        yield b"".join(keys[start : start + _BATCH_KEYS]), size


def _parsed(text: str) -> bytes | None:
    """Returns the key of a hex text, None if it is not one."""
    found = _HEX_KEY.fullmatch(text)
    return bytes.fromhex(found[1]) if found else None
