"""The pages of records: against a dictionary of slots, damaged, and converted from earlier formats."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.tiers.nvme.journal import Journal
from kvstore.tiers.nvme.records import (
    PAGE_SLOTS,
    Blocks,
    RecordBatch,
    deletions,
    merged,
    rewritten,
    unpack,
)
from kvstore.tiers.nvme.store import FORMAT, RecordStore
from tests.tiers.nvme.old_format import pairs_of

MIB = 1 << 20
Record = tuple[int, bytes, bytes, int, int, int, float]
"""Namespace, key, parent, version, length, checksum, time."""
Slots = dict[int, Record]


def batch(slots: Slots) -> RecordBatch:
    ns, keys, parents, version, length, checksum, stored_at = zip(*slots.values(), strict=True)
    extent, index = [place >> 32 for place in slots], [place & 0xFFFFFFFF for place in slots]
    return RecordBatch(ns, keys, parents, extent, index, version, length, checksum, stored_at)


def slots_of(blocks: Blocks) -> Slots:
    parents = [p.tobytes()[:n] for p, n in zip(blocks.parents, blocks.parent_bytes, strict=True)]
    numbers = (blocks.version, blocks.length, blocks.checksum, blocks.stored_at)
    rows = zip(blocks.ns.tolist(), parents, *(column.tolist() for column in numbers), strict=True)
    return {
        place: (ns, blocks.key(i), parent, *rest)
        for i, (place, (ns, parent, *rest)) in enumerate(zip(blocks.places.tolist(), rows, strict=True))
    }


def record(dice: random.Random, sizes: Sequence[int] = (1, 7, 8, 20, 32, 33, 64)) -> Record:
    key = dice.randbytes(dice.choice(sizes))
    parent = dice.choice((b"", dice.randbytes(32), dice.randbytes(64)))
    return dice.randrange(1, 4), key, parent, dice.getrandbits(64), 4096, dice.getrandbits(64), dice.random()


def places(dice: random.Random, n: int) -> list[int]:
    return [dice.randrange(3) << 32 | dice.randrange(200) for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_pages_hold_the_last_record_of_each_slot(seed: int) -> None:
    dice, pages, slots = random.Random(seed), dict[bytes, bytes](), Slots()
    for _ in range(60):
        changes = []
        for _ in range(dice.randrange(4)):
            where = places(dice, dice.randrange(1, 50))
            if dice.random() < 0.4:
                changes.append(deletions(np.array(where, np.uint64)))
                slots = {place: each for place, each in slots.items() if place not in where}
            else:
                new = {place: record(dice) for place in where}
                changes.append(batch(new).pack())
                slots |= new
        for key, page in rewritten(pages.get, changes):
            if page is None:
                pages.pop(key, None)
            else:
                pages[key] = page
        blocks, damaged = unpack(pages.items())
        assert len(damaged) == 0
        assert slots_of(blocks) == slots
    assert len(pages) == len({place // PAGE_SLOTS for place in slots})


def test_a_run_of_slots_is_few_pages() -> None:
    dice = random.Random(1)
    run = {5 << 32 | 100 + i: (1, dice.randbytes(32), b"", 1, 4096, 0, 0.0) for i in range(128)}
    pages = rewritten(lambda key: None, [batch(run).pack()])
    assert len(pages) == 128 // PAGE_SLOTS + 1
    assert all(page is not None and len(page) <= 4080 for _, page in pages), "each fits a page of LMDB"


def test_a_page_of_which_all_slots_change_is_not_read() -> None:
    dice, read = random.Random(1), list[bytes]()
    run = {i: record(dice) for i in range(20, 70)}
    gone = deletions(np.arange(96, 128, dtype=np.uint64))
    pages = rewritten(read.append, [batch(run).pack(), gone])
    assert [key for key, _ in pages] == [struct.pack(">II", 0, page) for page in range(4)]
    assert read == [pages[0][0], pages[2][0]]
    assert pages[3][1] is None


@pytest.mark.parametrize("bit", [0, 6])
@pytest.mark.parametrize("at", range(0, 112))
def test_each_byte_of_a_record_is_checked(at: int, bit: int) -> None:
    slots = {7: (1, b"k" * 32, b"p" * 32, 3, 4096, 5, 6.0), 9: (1, b"other", b"", 3, 4096, 5, 6.0)}
    [(key, page)] = rewritten(lambda key: None, [batch(slots).pack()])
    assert page is not None
    bad = bytearray(page)
    bad[7 * 112 + at] ^= 1 << bit
    blocks, damaged = unpack([(key, bytes(bad))])
    unused = range(42, 48)
    assert damaged.places.tolist() == ([] if at in unused else [7])
    assert set(slots_of(blocks)) == ({7, 9} if at in unused else {9})
    # A later record replaces it, and no other changes.
    [(_, mended)] = rewritten({key: bytes(bad)}.get, [batch({7: slots[7]}).pack()])
    assert mended == page


@pytest.mark.parametrize("key", [b"", b"short", bytes(9), struct.pack(">II", 1, 1 << 28)])
def test_a_page_with_an_impossible_key_is_damaged(key: bytes) -> None:
    [(_, page)] = rewritten(lambda key: None, [batch({7: (1, b"k", b"", 3, 4096, 5, 6.0)}).pack()])
    assert page is not None
    blocks, damaged = unpack([(key, page)])
    assert (len(blocks), damaged.pages) == (0, [key])


def test_a_damaged_page_is_replaced() -> None:
    slots = {7: (1, b"k", b"", 3, 4096, 5, 6.0)}
    [(key, page)] = rewritten(lambda key: b"no page", [batch(slots).pack()])
    assert page is not None
    assert slots_of(unpack([(key, page)])[0]) == slots


def test_the_last_of_many_changes_counts() -> None:
    first, second = record(random.Random(1)), record(random.Random(2))
    last = merged([batch({3: first, 1: first}).pack(), deletions(np.array([1], np.uint64))])
    assert last.places.tolist() == [1, 3]
    assert last.rows["key_bytes"].tolist() == [0, len(first[1])]
    last = merged([last, batch({1: second}).pack()])
    assert last.rows["key_bytes"].tolist() == [len(second[1]), len(first[1])]


def test_of_two_records_of_a_block_the_earlier_is_superseded() -> None:
    slots = {place: (1, b"block", b"", 1, 4096, 5, float(place)) for place in (3, 20, 11)}
    slots |= {40: (2, b"block", b"", 1, 4096, 5, 0.0), 41: (1, b"bloc", b"", 1, 4096, 5, 0.0)}
    pages = rewritten(lambda key: None, [batch(slots).pack()])
    blocks, _ = unpack([(key, page) for key, page in pages if page is not None])
    everything = np.ones(len(blocks), np.bool_)
    assert set(blocks.places[blocks.superseded(everything)].tolist()) == {3, 11}
    assert set(blocks.places[blocks.superseded(blocks.places != 20)].tolist()) == {3}


# -- earlier formats


def old_pairs(slots: Slots) -> list[tuple[bytes, bytes]]:
    pages = rewritten(lambda key: None, [batch(slots).pack()])
    return pairs_of(unpack([(key, page) for key, page in pages if page is not None])[0])


def old_folder(folder: Path, pairs: Sequence[tuple[bytes, bytes]], number: int = 4) -> None:
    Journal.open(folder, MIB).close()
    with lmdb.open(str(folder / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
        txn.drop(env.open_db(b"slots", txn))
        txn.put(b"format", number.to_bytes(8, "little"), db=env.open_db(b"meta", txn))
        table = env.open_db(b"blocks", txn)
        for key, value in pairs:
            txn.put(key, value, db=table)


def format_of(folder: Path) -> int:
    with lmdb.open(str(folder / "records"), max_dbs=5) as env, env.begin() as txn:
        return int.from_bytes(txn.get(b"format", db=env.open_db(b"meta", txn, create=False)), "little")


def old_records_in(folder: Path) -> int:
    with lmdb.open(str(folder / "records"), max_dbs=5) as env, env.begin() as txn:
        return int(txn.stat(env.open_db(b"blocks", txn, create=False))["entries"])


@pytest.mark.parametrize("number", [2, 3, 4])
def test_records_of_earlier_formats_are_converted(tmp_path: Path, number: int) -> None:
    dice = random.Random(number)
    slots = {place: record(dice, (8, 32, 64)) for place in places(dice, 500)}
    old_folder(tmp_path, old_pairs(slots), number)
    for _ in range(2):
        journal = Journal.open(tmp_path, MIB)
        assert slots_of(journal.load().blocks) == slots
        journal.close()
        assert (old_records_in(tmp_path), format_of(tmp_path)) == (0, FORMAT)


def test_damaged_records_of_an_earlier_format_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = {n: record(random.Random(n)) for n in (1, 2)}, {3: record(random.Random(3))}
    pairs, [(key, value)] = old_pairs(good), old_pairs(bad)
    pairs.append((key, value[:-1] + bytes([value[-1] ^ 1])))
    old_folder(tmp_path, [*pairs, (b"\0\0\0\1short", b"short"), (b"\0\0\0\1", pairs[0][1])])
    journal = Journal.open(tmp_path, MIB)
    assert slots_of(journal.load().blocks) == good
    journal.close()
    assert "3 records are damaged" in caplog.text


def test_of_two_old_records_for_a_slot_the_later_counts(tmp_path: Path) -> None:
    early, late = (1, b"early", b"", 1, 4096, 5, 1.0), (1, b"late", b"", 1, 4096, 5, 2.0)
    old_folder(tmp_path, [*old_pairs({7: late}), *old_pairs({7: early})])
    journal = Journal.open(tmp_path, MIB)
    assert slots_of(journal.load().blocks) == {7: late}
    journal.close()


@pytest.mark.parametrize("commits", range(3))
def test_a_conversion_that_was_cut_short_is_repeated(
    tmp_path: Path, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(commits)
    slots = {place: record(dice, (8, 32, 64)) for place in places(dice, 300)}
    old_folder(tmp_path, old_pairs(slots))
    monkeypatch.setattr("kvstore.tiers.nvme.store._COMMITTED_AT_ONCE", 100)
    commit, left = RecordStore.commit, iter(range(commits))

    def cut(self: RecordStore, changes: object) -> None:
        if next(left, None) is None:
            raise lmdb.DiskError("cut")
        commit(self, changes)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(RecordStore, "commit", cut)
        with pytest.raises(Exception, match="the disk is full"):
            Journal.open(tmp_path, MIB)
    assert format_of(tmp_path) == 4
    journal = Journal.open(tmp_path, MIB)
    assert slots_of(journal.load().blocks) == slots
    journal.close()
    assert format_of(tmp_path) == FORMAT


def test_the_map_grows_during_a_conversion(tmp_path: Path) -> None:
    """Whatever fills the map first: pages, or the list of the old pages that become free."""
    dice = random.Random(1)
    slots = {place: record(dice, (32,)) for place in range(400)}
    old_folder(tmp_path / "old", old_pairs(slots))
    first = (tmp_path / "old" / "records" / "data.mdb").stat().st_size
    for nbytes in range(first, 2 * first + 1, 4096):
        shutil.copytree(tmp_path / "old", tmp_path / str(nbytes))
        with closing(RecordStore(tmp_path / str(nbytes), MIB, nbytes)) as store:
            assert slots_of(store.load().blocks) == slots
        assert format_of(tmp_path / str(nbytes)) == FORMAT
