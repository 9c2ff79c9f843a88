"""What an NVMe folder holds, read from its files."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstore.tiers.nvme.records import unpack
from kvstore.tiers.nvme.store import TABLES
from kvstore.types import slot_bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A block on record: who it is, and where its payload lies in the slab of its extent."""

    key: bytes
    extent: int
    offset: int
    length: int


def records(folder: Path) -> list[Record]:
    """All records of an NVMe folder, oldest first. Nobody may be writing them."""
    file = folder / "records"
    if not (file / "data.mdb").exists():
        return []
    with lmdb.open(str(file), max_dbs=len(TABLES) + 1, readonly=True, lock=False) as env, env.begin() as txn:
        try:
            table = env.open_db(b"slots", txn, create=False)
        except lmdb.NotFoundError:
            return []
        blocks, damaged = unpack(txn.cursor(table))
    assert not len(damaged), f"{len(damaged)} records in {folder} do not match their checks"
    return [
        Record(key.tobytes()[:key_bytes], extent, index * slot_bytes(length), length)
        for key, key_bytes, extent, index, length in zip(
            blocks.keys,
            blocks.key_bytes.tolist(),
            blocks.extent.tolist(),
            blocks.index.tolist(),
            blocks.length.tolist(),
            strict=True,
        )
    ][::-1]


def used_bytes(found: list[Record]) -> int:
    """What these records take on NVMe."""
    return sum(slot_bytes(record.length) for record in found)


def slab(folder: Path, extent: int) -> Path:
    """The file of an extent."""
    return folder / "slabs" / f"{extent:06d}.slab"


def slab_bytes(folder: Path) -> int:
    """The size of all slab files."""
    return sum(file.stat().st_size for file in (folder / "slabs").glob("*.slab"))


def flip_bit(file: Path, dice: random.Random, start: int, nbytes: int) -> None:
    """Turns over one bit, somewhere in `nbytes` from `start`."""
    at = start + dice.randrange(nbytes)
    with file.open("r+b") as opened:
        opened.seek(at)
        [old] = opened.read(1)
        opened.seek(at)
        opened.write(bytes([old ^ 1 << dice.randrange(8)]))
