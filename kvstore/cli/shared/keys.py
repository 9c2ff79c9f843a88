"""Keys as people give them: in hex, or in files with one a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import MisuseError
from kvstore.types import MAX_KEY_BYTES

_MOST_FILE_BYTES = 64 << 20
_AT_ONCE = 1024
_HEX_HINT = f"keys are 1 to {MAX_KEY_BYTES} bytes in hex, with or without 0x; a file has one a line"
_HEX_KEY = re.compile(rf"(?:0[xX])?((?:[0-9a-fA-F]{{2}}){{1,{MAX_KEY_BYTES}}})")


def keys_of(what: str) -> list[bytes]:
    """The key that is given, or those in the file of this name. Raises MisuseError for what is neither."""
    key = _parsed(what)
    if key is not None:
        return [key]
    path = Path(what)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise MisuseError(f"{path} is over {_MOST_FILE_BYTES} bytes", _HEX_HINT)
        lines = path.read_text("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        raise MisuseError(f"{what!r:.160} is neither a key nor a file", _HEX_HINT) from None
    except (OSError, ValueError) as error:
        raise MisuseError(f"cannot read {what!r:.160}: {error}", _HEX_HINT) from None
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            key = _parsed(line.strip())
            if key is None:
                raise MisuseError(f"{path} line {number} is no key: {line.strip()!r:.80}", _HEX_HINT)
            keys.append(key)
    if not keys:
        raise MisuseError(f"{path} holds no keys", _HEX_HINT)
    return keys


def batches(what: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """All keys that are meant, as runs of bytes of one size each, and that size. Raises MisuseError."""
    keys = [key for each in what for key in keys_of(each)]
    size = len(keys[0])
    odd = next((key for key in keys if len(key) != size), None)
    if odd is not None:
        raise MisuseError(f"keys of {size} and of {len(odd)} bytes in one call", "give those of one length")
    for start in range(0, len(keys), _AT_ONCE):
        yield b"".join(keys[start : start + _AT_ONCE]), size


def _parsed(text: str) -> bytes | None:
    """The key that a text is in hex, None if it is none."""
    found = _HEX_KEY.fullmatch(text)
    return bytes.fromhex(found[1]) if found else None
