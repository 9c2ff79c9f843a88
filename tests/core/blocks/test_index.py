"""The index against a dictionary, with tables so small and hashes so bad that everything collides."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import native
from kvstore.core.blocks import index as module
from kvstore.core.blocks.block_table import LIVE, Blocks
from kvstore.core.blocks.index import Index
from kvstore.core.blocks.key_batch import Keys
from kvstore.native import WHY_NOT, portable_index

NONE = np.empty(0, np.int64)


class BadIndex(Index):
    """Its hashes have two bits: the same buckets and the same fingerprints for many keys."""

    @staticmethod
    def _factors_of(seed: int) -> list[int]:
        return [1 << 62] * 9 + [0]


class SameIndex(Index):
    """Every key has one and the same hash."""

    @staticmethod
    def _factors_of(seed: int) -> list[int]:
        return [0] * 10


@pytest.fixture(params=["native", "portable"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of the tables."""
    if request.param == "portable":
        for name in ("index_add", "index_find", "index_remove"):
            monkeypatch.setattr(module, name, getattr(portable_index, name))
    elif WHY_NOT:
        pytest.skip(f"no C extension: {WHY_NOT}")
    return str(request.param)


class Pair:
    """An index and the dictionary that it should equal."""

    def __init__(self, kind: type[Index] = Index, capacity: int = 1 << 16, buckets: int = 2) -> None:
        self.blocks = Blocks(capacity, 1)
        self.index = kind(self.blocks, 0x1234_5678_9ABC_DEF0, buckets)
        self.rows: dict[tuple[int, bytes], int] = {}

    def add(self, namespace: int, keys: list[bytes]) -> None:
        rows = self.blocks.take(namespace, joined(keys), np.arange(len(keys)))
        self.blocks.state[rows] = LIVE
        self.index.add(rows)
        self.rows.update({(namespace, key): row for key, row in zip(keys, rows.tolist(), strict=True)})

    def remove(self, namespace: int, keys: list[bytes]) -> None:
        rows = np.array([self.rows.pop((namespace, key)) for key in keys], np.int64)
        self.index.remove(rows)
        self.blocks.give_back(rows)

    def check(self, namespace: int, keys: list[bytes]) -> None:
        want = [self.rows.get((namespace, key), -1) for key in keys]
        assert self.index.find(namespace, joined(keys)).tolist() == want
        assert [self.index.find_one(namespace, key) for key in keys[:40]] == want[:40]

    def check_all(self) -> None:
        assert self.index.count == len(self.rows)
        by_size: dict[tuple[int, int], list[bytes]] = {}
        for namespace, key in self.rows:
            by_size.setdefault((namespace, len(key)), []).append(key)
        for (namespace, _), keys in by_size.items():
            for start in range(0, len(keys), 4096):
                self.check(namespace, keys[start : start + 4096])
            self.check(namespace + 100, keys[:50])


def joined(keys: list[bytes]) -> Keys:
    return Keys(b"".join(keys), len(keys[0]) if keys else 1)


def numbered(n: int, start: int = 0, size: int = 8) -> list[bytes]:
    return [i.to_bytes(size, "big") for i in range(start, start + n)]


def test_an_empty_index_finds_nothing() -> None:
    pair = Pair()
    pair.check(1, numbered(3))
    pair.check(1, numbered(100))
    assert pair.index.find(1, Keys(b"", 1)).tolist() == []
    assert pair.index.find_one(1, b"x") == -1


@pytest.mark.parametrize("batch", [1, 11, 12, 700, 5000])
def test_grows_through_many_doublings(batch: int) -> None:
    pair = Pair(buckets=1 if batch < 5000 else 1024)
    for start in range(0, 20_000 if batch > 100 else 3000, batch):
        keys = numbered(batch, start)
        pair.add(1, keys)
        pair.check(1, keys)
        pair.check(1, numbered(20, max(0, start - 10)))
    pair.check_all()
    assert len(pair.index._table.cells) > 256


def test_a_removed_key_can_be_added_again() -> None:
    pair = Pair()
    keys = numbered(4000)
    pair.add(1, keys)
    pair.remove(1, keys[::2])
    pair.check(1, keys)
    pair.check_all()
    pair.add(1, keys[:1000:2])
    pair.check(1, keys)
    pair.remove(1, [k for k in keys if (1, k) in pair.rows])
    assert pair.index.count == 0
    pair.check(1, keys)


def test_grows_and_shrinks_at_the_same_time() -> None:
    pair = Pair(buckets=1)
    for step in range(120):
        pair.add(1, numbered(60, 60 * step))
        if step % 3:
            pair.remove(1, numbered(30, 60 * (step - 1)))
        pair.check(1, numbered(90, 60 * step - 30) if step else numbered(60))
    pair.check_all()


@pytest.mark.parametrize("kind", [BadIndex, SameIndex])
@pytest.mark.parametrize("batch", [5, 40])
def test_keys_with_equal_fingerprints_are_distinguished(kind: type[Index], batch: int) -> None:
    pair = Pair(kind)
    for start in range(0, 400, batch):
        pair.add(1, numbered(batch, start))
        pair.check(1, numbered(40, max(0, start - 20)))
    assert pair.index._overflow
    pair.check_all()
    pair.check(1, numbered(200, 10_000))
    pair.remove(1, numbered(200, 100))
    pair.check_all()
    pair.check(1, numbered(400))
    pair.add(1, numbered(100, 150))
    pair.check(1, numbered(400))
    pair.remove(1, [key for _, key in pair.rows])
    assert not pair.index._overflow


def test_overflow_settles_when_the_table_has_grown() -> None:
    pair = Pair(buckets=1)
    pair.add(1, numbered(100))
    for start in range(100, 9000, 100):
        pair.add(1, numbered(100, start))
    assert len(pair.index._overflow) < 10
    pair.check_all()


def test_a_batch_much_larger_than_the_table_finds_its_place() -> None:
    pair = Pair(buckets=64)
    keys = numbered(40_000)
    pair.add(1, keys)
    assert len(pair.index._overflow) < 400
    pair.check(1, keys[::-7])


def test_both_implementations_use_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in range(1, 65):
        pair = Pair()
        pair.add(1, [bytes([255 - i]) * size for i in range(30)])
        for kind in (portable_index, native):
            monkeypatch.setattr(module, "index_find", kind.index_find)
            pair.check_all()


@pytest.mark.parametrize("many", [False, True])
def test_keys_of_all_lengths_and_their_zero_padded_twins(many: bool) -> None:
    pair = Pair()
    keys = [b"a" + bytes(n) for n in range(64)] + [bytes(n) for n in range(1, 65)]
    for key in keys:
        pair.check(1, [key])
        pair.add(1, [key])
    for key in keys:
        batch = [key] + [bytes([i + 2]) * len(key) for i in range(30 if many else 3)]
        pair.check(1, batch)
    for key in keys[::2]:
        pair.remove(1, [key])
    for key in keys:
        pair.check(1, [key])


def test_a_chain_that_lies_in_a_row_is_found_whole_and_in_part() -> None:
    pair = Pair()
    keys = numbered(64)
    pair.add(1, keys)
    pair.check(1, keys)
    pair.check(1, keys[10:40])
    pair.check(1, [*keys[10:40], b"unknown!"])
    pair.check(1, keys[::-1])
    pair.check(2, keys)
    pair.remove(1, keys[30:31])
    pair.check(1, keys)
    pair.add(1, [b"interval"])
    pair.check(1, keys)
    pair.add(1, keys[30:31])
    pair.check(1, keys)


def test_a_key_stored_again_is_found_where_it_is_now() -> None:
    pair = Pair()
    keys = numbered(40)
    pair.add(1, keys)
    pair.remove(1, keys[20:22])
    pair.add(1, [b"new-one!", keys[21]])
    pair.check(1, keys)
    pair.add(1, [keys[20]])
    pair.check(1, keys)
    assert pair.rows[1, keys[20]] != 20


def test_rows_beyond_the_last_one_are_no_run() -> None:
    pair = Pair(capacity=16)
    keys = numbered(16)
    pair.add(1, keys)
    pair.check(1, keys[8:] + numbered(8, 100))


def test_seeds_namespaces_and_lengths_are_part_of_the_hash() -> None:
    places = set()
    for seed in (1, 2):
        for namespace in range(20):
            for key in (b"a", b"a\0", b"a\0\0"):
                pair = Pair(capacity=16, buckets=1 << 12)
                pair.index = Index(pair.blocks, seed, 1 << 12)
                pair.add(namespace, [key])
                places.add(tuple(np.argwhere(pair.index._table.cells)[0].tolist()))
    assert len(places) > 100


@given(
    kind=st.sampled_from([Index, BadIndex, SameIndex]),
    steps=st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 80), st.integers(1, 40), st.sampled_from([1, 2, 9])),
        max_size=30,
    ),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_a_dictionary(kind: type[Index], steps: list[tuple[int, int, int, int]]) -> None:
    pair = Pair(kind, capacity=1 << 10, buckets=1)
    for namespace, start, n, size in steps:
        keys = numbered(n, start, size)
        present = [k for k in keys if (namespace, k) in pair.rows]
        if len(present) > n // 2:
            pair.remove(namespace, present)
        else:
            pair.add(namespace, [k for k in keys if (namespace, k) not in pair.rows])
        pair.check(namespace, keys)
    pair.check_all()


def test_grows_a_little_with_every_insertion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOVE_BUCKETS", 2)
    monkeypatch.setattr(module, "_ADD_ROWS", 4)
    pair = Pair(buckets=16)
    moving = 0
    for start in range(0, 3000, 7):
        pair.add(1, numbered(7, start))
        moving += pair.index._old is not None
        pair.check(1, numbered(40, max(0, start - 40)))
        if start % 5 == 0:
            pair.remove(1, numbered(3, start))
    assert moving > 20
    pair.check_all()


def test_growth_is_spread_over_insertions_down_to_the_pages_of_memory() -> None:
    pair, faults, grown = Pair(buckets=1 << 12), [], 0
    for start in range(0, 60_000, 256):
        rows = pair.blocks.take(1, joined(numbered(256, start)), np.arange(256))
        before, buckets = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt, len(pair.index._table.cells)
        pair.index.add(rows)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        grown += len(pair.index._table.cells) > buckets
    assert grown == 2
    # Each of 256 rows lands on another page of a table of 512 pages or more.
    assert max(faults[1:]) < 100
