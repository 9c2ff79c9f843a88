"""Records as earlier formats had them: one value a block."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import numpy as np

from kvstore.native.portable_records import CHECKED, record_checks
from kvstore.tiers.nvme.records import ID, Blocks, unpack


def pairs_of(blocks: Blocks) -> list[tuple[bytes, bytes]]:
    """Key and value of each record in formats 2 to 4."""
    check = record_checks(blocks.keys, blocks.parents, [getattr(blocks, name) for name in CHECKED])
    numbers = (blocks.extent, blocks.index, blocks.version, blocks.length, blocks.checksum, blocks.stored_at)
    rows = zip(*(column.tolist() for column in (*numbers, check)), strict=True)
    parents = [parent.tobytes()[:n] for parent, n in zip(blocks.parents, blocks.parent_bytes, strict=True)]
    return [
        (ID.pack(int(blocks.ns[i])) + blocks.key(i), struct.pack("<IIQIQdQ", *row) + parents[i])
        for i, row in enumerate(rows)
    ]


def to_format_4(folder: Path) -> None:
    """Rewrites the records of a folder as daemons did that knew format 4."""
    with lmdb.open(str(folder / "records"), max_dbs=8) as env, env.begin(write=True) as txn:
        slots, old = env.open_db(b"slots", txn), env.open_db(b"blocks", txn)
        blocks, damaged = unpack(txn.cursor(slots))
        assert not len(damaged)
        for key, value in pairs_of(blocks):
            txn.put(key, value, db=old)
        txn.drop(slots)
        txn.put(b"format", np.uint64(4).tobytes(), db=env.open_db(b"meta", txn))
