"""Batches of blocks by a C extension, or by numpy and xxhash where there is none: copies, sums, index, I/O.

A batch is a table of `PIECE`: consecutive pieces whose bytes make up one block, and a checksum for each
block. Both implementations give the same bytes, sums and errors (`tests/native`). Copies in C read each
byte once and keep the GIL released over a whole batch. `KVSTORE_NATIVE=0` in the environment turns it off.
Not covered here: what is copied, and which sum it must have (`kvstore.arena`, `kvstore.client`).
"""

from __future__ import annotations

import os

from kvstore.native import (
    portable,
    portable_chains,
    portable_files,
    portable_ghosts,
    portable_index,
    portable_presence,
    portable_records,
)
from kvstore.native.mixing import splitmix
from kvstore.native.pieces import PIECE, pieces, whole
from kvstore.native.portable import copied
from kvstore.native.portable_files import END_OF_FILE, FilePiece
from kvstore.native.portable_presence import presence_hash
from kvstore.native.portable_queue import Outcome, PortableQueue

IOQueue: type[PortableQueue]

try:
    if os.environ.get("KVSTORE_NATIVE") == "0":
        raise ImportError("KVSTORE_NATIVE=0")
    from kvstore.native import _native
except ImportError as error:
    IMPLEMENTATION, WHY_NOT = "numpy and xxhash", str(error)
    copy, copy_in, copy_out = portable.copy, portable.copy_in, portable.copy_out
    sums, checksum = portable.sums, portable.checksum
    move_files, why_no_io_uring = portable_files.move_files, portable_files.why_no_io_uring
    IOQueue = PortableQueue
    chain_above, chain_root = portable_chains.chain_above, portable_chains.chain_root
    ghosts_find, ghosts_put = portable_ghosts.ghosts_find, portable_ghosts.ghosts_put
    index_add, index_find = portable_index.index_add, portable_index.index_find
    index_remove = portable_index.index_remove
    presence_set = portable_presence.presence_set
    records_find, records_take = portable_records.records_find, portable_records.records_take
    records_pack, records_pages = portable_records.records_pack, portable_records.records_pages
    presence = places = read_slots = None
else:
    IMPLEMENTATION, WHY_NOT = f"native, {_native.instruction_set()}", ""
    copy, sums, checksum = _native.copy, _native.sums, _native.checksum
    move_files, why_no_io_uring = _native.move_files, _native.why_no_io_uring
    IOQueue = _native.IOQueue
    chain_above, chain_root = _native.chain_above, _native.chain_root
    ghosts_find, ghosts_put = _native.ghosts_find, _native.ghosts_put
    index_add, index_find, index_remove = _native.index_add, _native.index_find, _native.index_remove
    presence_set = _native.presence_set
    records_find, records_take = _native.records_find, _native.records_take
    records_pack, records_pages = _native.records_pack, _native.records_pages
    presence, places, read_slots = _native.presence, _native.places, _native.read_slots
    # Its sum is that of both sides: each byte is read once.
    copy_in = copy_out = _native.copy_and_sum

__all__ = [
    "END_OF_FILE",
    "IMPLEMENTATION",
    "PIECE",
    "WHY_NOT",
    "FilePiece",
    "IOQueue",
    "Outcome",
    "PortableQueue",
    "chain_above",
    "chain_root",
    "checksum",
    "copied",
    "copy",
    "copy_in",
    "copy_out",
    "ghosts_find",
    "ghosts_put",
    "index_add",
    "index_find",
    "index_remove",
    "move_files",
    "pieces",
    "places",
    "presence",
    "presence_hash",
    "presence_set",
    "read_slots",
    "records_find",
    "records_pack",
    "records_pages",
    "records_take",
    "splitmix",
    "sums",
    "whole",
    "why_no_io_uring",
]
