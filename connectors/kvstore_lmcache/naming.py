"""Names LMCache's objects: the namespace of their form, and the keys of their blocks.

An object is one block, or several of one size if it is larger than `MOST_BLOCK_BYTES`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import lmcache
from blake3 import blake3

from kvstore import Layout

logger = logging.getLogger("lmcache.kvstore")

MOST_BLOCK_BYTES = 16 << 20
_MOST_PARTS = 4096
_KEY_HEAD = struct.Struct("<QII")


@dataclass(frozen=True, slots=True)
class Form:
    """The form of objects: shape and dtype of each tensor in them.

    `nbytes`: of an object. `parts`: the number of its blocks, all of one size; 0 if it cannot be cut.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    nbytes: int
    parts: int

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Form:
        """Returns the form of torch's shapes and dtypes. Equal ones have the same form."""
        return _form(tuple(shapes), tuple(dtypes))


@lru_cache(1024)
def _form(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Form:
    nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    least = max(1, -(-nbytes // MOST_BLOCK_BYTES))
    parts = next((n for n in range(least, _MOST_PARTS) if not nbytes % n), 0) if nbytes else 0
    return Form(tuple(map(tuple, shapes)), dtypes, nbytes, parts)


def form_of(thing: Any) -> Form | None:
    """Returns the form of LMCache's MemoryObj; None if its bytes are encoded or cannot be cut into blocks."""
    meta = thing.metadata
    form = Form.of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
    # A serializer narrows the object to the bytes that it has written.
    return form if form.parts and thing.get_size() == form.nbytes else None


def layout_of(model: str, revision: str, form: Form) -> Layout:
    """Returns the layout of the blocks of objects. Raises MisuseError for a name that is too long."""
    shapes = blake3(repr(form.shapes).encode()).hexdigest(16)
    return Layout(
        model=model,
        revision=revision,
        block_bytes=form.nbytes // form.parts,
        dtype=", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(form.dtypes)),
        kv_layout=f"lmcache {lmcache.__version__}; {form.parts} parts; shapes {shapes}",
        kind="independent",
    )


def keys_of(key: Any, parts: int) -> list[bytes]:
    """Returns the keys of the blocks of an object, by LMCache's ObjectKey."""
    head = _KEY_HEAD.pack(key.kv_rank, key.object_group_id, len(key.chunk_hash))
    digest = blake3(head + key.chunk_hash + key.cache_salt.encode()).digest()
    if parts == 1:
        return [digest]
    return [digest, *(blake3(digest + n.to_bytes(4, "little")).digest() for n in range(1, parts))]
