"""llama-server's slot files as bytes: the tokens of a slot, and the state of its sequence.

    file    magic u32 (ggsq), version u32 (3), words u32; the words; caches, as in `state`
    words   -1 i32, version u32 (1), tokens u32, the tokens i32, media u32 (0)

The cells of a file name the number of their slot. llama-server reads any number there. Not covered: words of
older versions, which are the tokens alone, and tokens of images.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_llamacpp.state import Bytes, State, StateError

SERVED_VERSIONS = (3, 1)
"""Versions of the file and of the words that this module reads and writes."""

_MAGIC = 0x67677371
_HEAD = struct.Struct("<III")
_WORDS = struct.Struct("<iII")
_MEDIA = struct.Struct("<I")
_WORD_BYTES = 4

Tokens = npt.NDArray[np.int32]


def head_of(tokens: Sequence[int] | Tokens) -> bytes:
    """Returns the bytes of a file before its caches."""
    words = (_WORDS.size + _MEDIA.size) // _WORD_BYTES + len(tokens)
    return b"".join(
        (
            _HEAD.pack(_MAGIC, SERVED_VERSIONS[0], words),
            _WORDS.pack(-1, SERVED_VERSIONS[1], len(tokens)),
            np.asarray(tokens, "<i4").tobytes(),
            _MEDIA.pack(0),
        )
    )


def read(raw: Bytes, slot: int) -> tuple[Tokens, State]:
    """Returns the tokens of a slot's file, and the state of these tokens.

    Raises StateError unless `raw` is a file that is served, in full, with one cell for each token.
    """
    n, start = _tokens_of(raw)
    first = _HEAD.size + _WORDS.size
    tokens = raw[first : first + n * _WORD_BYTES].view("<i4")
    if n and int(tokens.min()) < 0:
        raise StateError("a slot file has tokens of images")
    state = State(raw[start:], raw[:start].tobytes(), slot)
    if len(state.form.caches) != 1:
        raise StateError("a slot file has two caches: the model has sliding windows")
    if state.n_tokens != n:
        raise StateError(f"a slot file has {n} tokens, and the state of the first {state.n_tokens} of them")
    return tokens, state


def _tokens_of(raw: Bytes) -> tuple[int, int]:
    """Returns the number of tokens, and where the caches begin."""
    if len(raw) < _HEAD.size + _WORDS.size:
        raise StateError(f"a slot file has {len(raw)} bytes")
    magic, version, words = _HEAD.unpack(raw[: _HEAD.size].tobytes())
    if magic != _MAGIC:
        raise StateError(f"a slot file begins with {magic:#010x}, not with {_MAGIC:#010x} (ggsq)")
    marker, words_version, n = _WORDS.unpack(raw[_HEAD.size : _HEAD.size + _WORDS.size].tobytes())
    if marker != -1 or (version, words_version) != SERVED_VERSIONS:
        found = f"{version} with tokens of version {words_version if marker == -1 else 0}"
        raise StateError(
            f"a slot file has version {found}, served are {SERVED_VERSIONS[0]} and {SERVED_VERSIONS[1]}"
        )
    start = _HEAD.size + words * _WORD_BYTES
    if start > len(raw) or words * _WORD_BYTES != _WORDS.size + n * _WORD_BYTES + _MEDIA.size:
        raise StateError(f"a slot file has {n} tokens in {words} words")
    if raw[start - _MEDIA.size : start].any():
        raise StateError("a slot file has tokens of images")
    return n, start
