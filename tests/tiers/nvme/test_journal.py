"""The journal: what it keeps, in which order it writes, and what it says when it cannot."""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

import kvstore
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.nvme import journal as journal_module
from kvstore.tiers.nvme.generations import History, resolve
from kvstore.tiers.nvme.journal import Blocks, Journal, Namespace, RecordBatch
from kvstore.tiers.nvme.records import PAGE_SLOTS
from kvstore.tiers.nvme.store import FORMAT, Changes, RecordStore
from tests.tiers.nvme.disks import KINDS, small_disk

WAIT_S = 30.0
MIB = 1 << 20
NOTHING_TO_SYNC = int  # any callable without arguments that succeeds


def places(*keys: bytes, ns: int = 1) -> Any:
    """A slot for each key: the same one each time, and another for each."""
    found = {(ns, key): SLOTS.setdefault((ns, key), 5 * len(SLOTS)) for key in keys}
    return np.array([3 << 32 | found[ns, key] for key in keys], np.uint64)


SLOTS: dict[tuple[int, bytes], int] = {}
ROOT = str(Path(kvstore.__file__).parents[1])
DIES_IN_A_COMMIT = """
import os, signal, sys
from pathlib import Path
from kvstore.tiers.nvme.store import RecordStore

def die(_=None):
    os.kill(os.getpid(), signal.SIGSEGV)

store = RecordStore(Path(sys.argv[1]), 1 << 20, 1 << 24)
store._transact(die if not sys.argv[2:] else lambda txn: None)
die()
"""


def batch(
    *keys: bytes, ns: int = 1, version: int = 1, stored_at: float = 0.0, parent: bytes = b""
) -> RecordBatch:
    n = len(keys)
    where = places(*keys, ns=ns)
    return RecordBatch(
        ns=[ns] * n,
        keys=list(keys),
        parents=[parent] * n,
        extent=(where >> np.uint64(32)).tolist(),
        index=where.astype(np.uint32).tolist(),
        version=[version] * n,
        length=[65536] * n,
        checksum=[(1 << 64) - 1 - version] * n,
        stored_at=[stored_at] * n,
    )


def keys_of(blocks: Blocks) -> list[bytes]:
    return [key[:n].tobytes() for key, n in zip(blocks.keys, blocks.key_bytes, strict=True)]


def stored(journal: Journal) -> set[bytes]:
    return set(keys_of(journal.load().blocks))


class Answers:
    """Completion callbacks that remember what they were told, and can be waited for."""

    def __init__(self) -> None:
        self.told: dict[str, Exception | None] = {}
        self._changed = threading.Condition()

    def named(self, name: str) -> Any:
        def done(error: Exception | None) -> None:
            with self._changed:
                assert name not in self.told, "told twice"
                self.told[name] = error
                self._changed.notify_all()

        return done

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(name in self.told for name in names), WAIT_S), self.told


class Gate:
    """A sync that holds the writer until opened, so that what is given meanwhile becomes one group."""

    def __init__(self, journal: Journal) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        journal.put(batch(b"gate"), self._sync, lambda _: None)
        assert self._reached.wait(WAIT_S)

    def _sync(self) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal.open(tmp_path / "tier", MIB)
    yield made
    made.close()


def sign(
    folder: Path, number: int, extents: dict[int, bytes] | None = None, generation: int | None = None
) -> None:
    """Makes it a folder of another format, with such values in its table of extents, and a generation."""
    with lmdb.open(str(folder / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
        txn.put(b"format", number.to_bytes(8, "little"), db=env.open_db(b"meta", txn))
        if generation is not None:
            txn.put(b"generation", generation.to_bytes(8, "little"), db=env.open_db(b"meta", txn))
        for extent, value in (extents or {}).items():
            txn.put(extent.to_bytes(4, "big"), value, db=env.open_db(b"extents", txn))


def signed(folder: Path) -> int:
    with lmdb.open(str(folder / "records"), max_dbs=5, readonly=True) as env, env.begin() as txn:
        return int.from_bytes(txn.get(b"format", db=env.open_db(b"meta", txn, create=False)), "little")


@pytest.fixture
def answers() -> Answers:
    return Answers()


class TestKeeping:
    def test_a_new_one_is_empty(self, journal: Journal) -> None:
        loaded = journal.load()
        assert (loaded.namespaces, loaded.extents, len(loaded.blocks)) == ({}, {}, 0)
        assert loaded.blocks.keys.shape == (0, 8)

    def test_everything_survives_a_reopen(self, tmp_path: Path, answers: Answers) -> None:
        namespace = Namespace("tenant", {"model": "m", "block_bytes": 65536}, bytes(range(16)))
        keys = [b"k", b"x" * 64, b"middle", bytes(8)]
        parents = [b"", b"p" * 64, b"k", b"\0"]
        records = RecordBatch(
            ns=[7, 7, 1 << 31, 7],
            keys=keys,
            parents=parents,
            extent=[0, 1, 2, (1 << 32) - 1],
            index=[9, 8, 7, (1 << 32) - 1],
            version=[1, 2, 3, (1 << 64) - 1],
            length=[4096, 1, 2, (1 << 32) - 1],
            checksum=[5, 6, 7, (1 << 64) - 1],
            stored_at=[4.5, 1.25, 3.0, 2.0],
        )
        first = Journal.open(tmp_path, MIB)
        first.put_namespace(7, namespace)
        first.put_extent(0, 65536, "default")
        first.put_extent(1, 1 << 33, "default")
        first.put_extent(5, 1, "default")
        first.delete_extent(5)
        first.put(records, NOTHING_TO_SYNC, answers.named("put"))
        first.close()
        assert answers.told == {"put": None}

        again = Journal.open(tmp_path, 2 * MIB)
        assert again.extent_bytes == MIB
        loaded = again.load()
        again.close()
        assert loaded.namespaces == {7: namespace}
        assert loaded.extents == {0: 65536, 1: 1 << 33}
        blocks, order = loaded.blocks, [0, 2, 3, 1]
        assert keys_of(blocks) == [keys[i] for i in order]
        assert [p[:n].tobytes() for p, n in zip(blocks.parents, blocks.parent_bytes, strict=True)] == [
            parents[i] for i in order
        ]
        assert not blocks.keys[0, 1:].any()
        for name in ("ns", "extent", "index", "version", "length", "checksum", "stored_at"):
            column = getattr(blocks, name)
            assert column.tolist() == [getattr(records, name)[i] for i in order], name
            assert column.dtype.isnative
            assert column.flags.c_contiguous

    def test_epochs_survive_a_reopen_and_older_daemons_read_the_namespaces(self, tmp_path: Path) -> None:
        layout = {"model": "m", "block_bytes": 65536}
        first = Namespace("one", layout, bytes(16), epoch=b"e" * 16)
        second = Namespace("one", layout, bytes(range(16)))
        journal = Journal.open(tmp_path, MIB)
        journal.put_namespace(1, replace(first, epoch=b"f" * 16))
        journal.put_namespace(2, first)
        journal.delete_namespace(1)
        journal.put_namespace(3, second)
        journal.drain()
        assert journal.load().namespaces == {2: first, 3: second}
        journal.renew(journal.load())
        journal.close()
        with lmdb.open(str(tmp_path / "records"), max_dbs=5, readonly=True) as env, env.begin() as txn:
            found = dict(txn.cursor(env.open_db(b"namespaces", txn, create=False)))
        assert [len(msgpack.unpackb(value)) for value in found.values()] == [6, 6], "they refuse a seventh"
        again = Journal.open(tmp_path, MIB)
        assert again.load().namespaces == {2: first, 3: second}
        again.put_namespace(4, replace(first, epoch=b""))
        again.delete_namespace(2)
        again.drain()
        assert again.load().namespaces == {4: replace(first, epoch=b""), 3: second}, "it is unknown again"
        again.close()

    def test_blocks_of_one_age_come_by_version(self, journal: Journal) -> None:
        for version in (3, 1, 2):
            journal.put(batch(b"%d" % version, version=version), NOTHING_TO_SYNC, lambda _: None)
        journal.drain()
        assert keys_of(journal.load().blocks) == [b"3", b"2", b"1"]

    def test_many_blocks_of_several_shapes(self, journal: Journal) -> None:
        n = 70_000
        rng = np.random.default_rng(1)
        keys = [rng.bytes(32 if i % 3 else 20) for i in range(n)]
        parents = [b"" if i % 5 == 0 else keys[i - 1] for i in range(n)]
        zeros = [0] * n
        numbers = list(range(n))
        records = RecordBatch(
            [2] * n, keys, parents, zeros, numbers, numbers, zeros, numbers, [float(-i) for i in numbers]
        )
        journal.put(records, NOTHING_TO_SYNC, lambda _: None)
        journal.drain()
        blocks = journal.load().blocks
        assert blocks.index.tolist() == numbers
        assert keys_of(blocks) == keys
        assert [p[:m].tobytes() for p, m in zip(blocks.parents, blocks.parent_bytes, strict=True)] == parents

    def test_a_later_record_of_a_key_replaces(self, journal: Journal) -> None:
        for version in (1, 2):
            journal.put(batch(b"a", version=version), NOTHING_TO_SYNC, lambda _: None)
            journal.drain()
        assert journal.load().blocks.version.tolist() == [2]

    def test_the_same_key_in_two_namespaces_is_two_blocks(self, journal: Journal) -> None:
        for ns in (1, 2):
            journal.put(batch(b"a", ns=ns), NOTHING_TO_SYNC, lambda _: None)
        journal.delete(places(b"a", b"unknown"))
        journal.drain()
        assert journal.load().blocks.ns.tolist() == [2]

    def test_the_map_grows(self, tmp_path: Path) -> None:
        for turn in range(2):
            small = Journal.open(tmp_path, MIB, map_bytes=128 << 10)
            keys = [b"%d %d" % (turn, i) for i in range(4000)]
            small.put(batch(*keys), NOTHING_TO_SYNC, lambda _: None)
            small.drain()
            assert len(stored(small)) == 4000 * (turn + 1)
            small.close()
        assert (tmp_path / "records" / "data.mdb").stat().st_size > 2 * (128 << 10)

    def test_commits_are_synchronous(self, tmp_path: Path) -> None:
        """Without, LMDB neither orders its own writes nor obeys a plain `env.sync()`."""
        store = RecordStore(tmp_path, MIB, MIB)
        flags = store._env.flags()
        assert (flags["sync"], flags["metasync"], flags["writemap"]) == (True, True, False)
        store.close()


class TestOrder:
    def test_data_first_then_the_record_then_the_answer(self, journal: Journal, answers: Answers) -> None:
        seen: list[set[bytes]] = []

        def done(error: Exception | None) -> None:
            seen.append(stored(journal))
            answers.named("put")(error)

        journal.put(batch(b"a"), lambda: seen.append(stored(journal)), done)
        answers.wait("put")
        assert seen == [set(), {b"a"}]

    def test_a_sync_that_fails_leaves_no_record(self, journal: Journal, answers: Answers) -> None:
        def fail() -> None:
            raise TierError("cannot sync")

        gate = Gate(journal)
        journal.put(batch(b"a", b"b"), fail, answers.named("failed"))
        journal.put(batch(b"c"), NOTHING_TO_SYNC, answers.named("good"))
        journal.put(batch(b"d"), fail, answers.named("failed too"))
        gate.open()
        journal.drain()
        assert str(answers.told["failed"]) == str(answers.told["failed too"]) == "cannot sync"
        assert answers.told["good"] is None
        assert stored(journal) == {b"gate", b"c"}

    def test_a_group_calls_each_sync_once_and_answers_in_order(
        self, journal: Journal, answers: Answers
    ) -> None:
        calls: list[str] = []
        one, two = lambda: calls.append("one"), lambda: calls.append("two")
        gate = Gate(journal)
        for i, sync in enumerate((one, two, one, one, two)):
            journal.put(batch(b"%d" % i), sync, answers.named(str(i)))
        gate.open()
        journal.drain()
        assert calls == ["one", "two"]
        assert list(answers.told) == ["0", "1", "2", "3", "4"]

    @pytest.mark.parametrize("ends", ["time", "many", "close"])
    def test_the_writer_rests_between_groups(
        self, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch, ends: str
    ) -> None:
        rest_s, most = 1.0 if ends == "time" else 1000.0, 4 if ends == "many" else 1000
        monkeypatch.setattr(journal_module, "_REST_S", rest_s)
        monkeypatch.setattr(journal_module, "_MOST_WAITING", most)
        syncs: list[float] = []
        sync = lambda: syncs.append(time.monotonic())  # noqa: E731
        journal = Journal.open(tmp_path / "tier", MIB)
        journal.put(batch(b"first"), sync, answers.named("first"))
        answers.wait("first")  # at once: there was nothing to rest from
        for i in range(4):
            journal.put(batch(b"%d" % i), sync, answers.named(str(i)))
        if ends == "close":
            journal.close()
        answers.wait("0", "1", "2", "3")
        assert len(syncs) == 2, "one group for all that came during the rest"
        assert (syncs[1] - syncs[0] >= 0.9) == (ends == "time")
        journal.close()

    @pytest.mark.parametrize("grouped", [True, False])
    def test_the_last_word_on_a_key_counts(self, journal: Journal, grouped: bool) -> None:
        gate = Gate(journal)
        step = (lambda: None) if grouped else journal.drain
        if not grouped:
            gate.open()
        journal.put(batch(b"deleted", b"twice", b"back"), NOTHING_TO_SYNC, lambda _: None)
        step()
        journal.delete(places(b"deleted", b"twice", b"back"))
        step()
        journal.put(batch(b"back", version=2), NOTHING_TO_SYNC, lambda _: None)
        journal.delete(places(b"twice"))
        gate.open()
        journal.drain()
        assert stored(journal) == {b"gate", b"back"}
        assert sorted(journal.load().blocks.version.tolist()) == [1, 2]

    def test_large_groups_are_cut(
        self, journal: Journal, answers: Answers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(journal_module, "GROUP_RECORDS", 4)
        calls: list[int] = []
        sync = lambda: calls.append(1)  # noqa: E731
        gate = Gate(journal)
        for i in range(12):
            journal.put(batch(b"%d" % i), sync, answers.named(str(i)))
        gate.open()
        journal.drain()
        assert len(calls) == 3
        assert len(answers.told) == 12


class TestFailing:
    def test_a_failed_commit_drops_its_puts_and_repeats_its_deletions(
        self, journal: Journal, answers: Answers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal.put(batch(b"old", b"older"), NOTHING_TO_SYNC, lambda _: None)
        journal.drain()

        def fail(*_: Any) -> None:
            raise lmdb.DiskError("No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(RecordStore, "commit", fail)
            gate = Gate(journal)
            journal.put(batch(b"new"), NOTHING_TO_SYNC, answers.named("new"))
            journal.delete(places(b"old"))
            journal.put_extent(4, 4096, "default")
            gate.open()
            with pytest.raises(TierError, match=r"cannot write records in .*/tier: .*No space left"):
                journal.drain()
            assert isinstance(answers.told["new"], TierError)
        assert stored(journal) == {b"old", b"older"}
        journal.put(batch(b"newer"), NOTHING_TO_SYNC, answers.named("newer"))
        journal.drain()
        assert answers.told["newer"] is None
        assert stored(journal) == {b"older", b"newer"}
        assert journal.load().extents == {4: 4096}

    def test_deletions_owed_at_the_end_are_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> None:
            raise lmdb.DiskError("no")

        journal = Journal.open(tmp_path, MIB)
        monkeypatch.setattr(RecordStore, "commit", fail)
        journal.delete(places(b"a"))
        with caplog.at_level(logging.ERROR):
            journal.close()
        assert "deletions were not written" in caplog.text

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_full_disk_refuses_commits_and_keeps_earlier_ones(
        self, tmp_path: Path, answers: Answers, kind: str
    ) -> None:
        kept: set[bytes] = set()
        with small_disk(kind, tmp_path / "disk", MIB):
            journal = Journal.open(tmp_path / "disk", MIB)
            for i in range(200):
                keys = [b"%d %d" % (i, k) for k in range(100)]
                journal.put(batch(*keys), NOTHING_TO_SYNC, answers.named(str(i)))
                answers.wait(str(i))
                if answers.told[str(i)] is not None:
                    break
                kept.update(keys)
            assert "is there room on the disk?" in str(answers.told[str(i)])
            assert len(kept) > 1000
            assert stored(journal) == kept
            journal.close()
            again = Journal.open(tmp_path / "disk", MIB)
            assert stored(again) == kept
            again.close()

    def test_records_that_cannot_be_packed_fail_alone(self, journal: Journal, answers: Answers) -> None:
        short = batch(b"a", b"b")
        object.__setattr__(short, "version", [1])
        huge = batch(b"c")
        object.__setattr__(huge, "extent", [1 << 32])
        gate = Gate(journal)
        bad = {
            "short": short,
            "huge": huge,
            "empty key": batch(b""),
            "long key": batch(b"x" * 65),
            "long parent": batch(b"d", parent=b"x" * 65),
        }
        for name, records in bad.items():
            journal.put(records, NOTHING_TO_SYNC, answers.named(name))
        journal.put(batch(b"good"), NOTHING_TO_SYNC, answers.named("good"))
        gate.open()
        journal.drain()
        assert answers.told.pop("good") is None
        assert all(isinstance(error, MisuseError) for error in answers.told.values()), answers.told
        assert stored(journal) == {b"gate", b"good"}

    def test_too_much_waiting_is_refused(
        self, journal: Journal, answers: Answers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(journal_module, "WAITING_RECORDS", 4)
        gate = Gate(journal)
        journal.put(batch(b"a", b"b", b"c"), NOTHING_TO_SYNC, answers.named("fits"))
        journal.put(batch(b"d", b"e"), NOTHING_TO_SYNC, answers.named("over"))
        journal.put(batch(b"f"), NOTHING_TO_SYNC, answers.named("still fits"))
        journal.delete(places(b"a"))
        gate.open()
        journal.drain()
        assert (answers.told["fits"], answers.told["still fits"]) == (None, None)
        assert "3 records wait for" in str(answers.told["over"])
        assert stored(journal) == {b"gate", b"b", b"c", b"f"}

    def test_a_raising_callback_affects_no_other(
        self, journal: Journal, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_: Exception | None) -> None:
            raise ZeroDivisionError("in the callback")

        with caplog.at_level(logging.CRITICAL + 1):
            journal.put(batch(b"a"), NOTHING_TO_SYNC, broken)
            journal.drain()
        assert stored(journal) == {b"a"}

    def test_after_close(self, journal: Journal) -> None:
        journal.close()
        with pytest.raises(TierError, match="closed"):
            journal.put(batch(b"a"), NOTHING_TO_SYNC, lambda _: None)
        with pytest.raises(TierError, match="closed"):
            journal.delete(places(b"a"))
        journal.close()


class TestOpening:
    def test_a_folder_has_one_daemon(self, journal: Journal, tmp_path: Path) -> None:
        words = f"folder {tmp_path}/tier is in use by pid {os.getpid()} .*another folder"
        with pytest.raises(TierError, match=words):
            Journal.open(tmp_path / "tier", MIB)
        journal.close()
        Journal.open(tmp_path / "tier", MIB).close()

    @pytest.mark.parametrize("where", ["file/tier", "/proc/tier"])
    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path, where: str) -> None:
        (tmp_path / "file").touch()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierError, match=f"cannot use folder {tmp_path / where}: .*may write"):
            Journal.open(tmp_path / where, MIB)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        Journal.open(tmp_path, MIB).close()
        with lmdb.open(str(tmp_path / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
            txn.put(b"format", (99).to_bytes(8, "little"), db=env.open_db(b"meta", txn))
        for _ in range(2):
            with pytest.raises(TierError, match=f"{tmp_path} holds format 99, this daemon reads 2 to 5"):
                Journal.open(tmp_path, MIB)

    @pytest.mark.parametrize("number", [1, 6])
    def test_formats_before_and_after_are_refused(self, tmp_path: Path, number: int) -> None:
        Journal.open(tmp_path, MIB).close()
        sign(tmp_path, number)
        with pytest.raises(TierError, match=f"holds format {number}, this daemon reads 2 to 5"):
            Journal.open(tmp_path, MIB)

    def test_format_2_is_read_as_the_default_tenants_and_signed_anew(self, tmp_path: Path) -> None:
        Journal.open(tmp_path, MIB).close()
        sign(tmp_path, 2, {4: (65536).to_bytes(8, "little")})
        for _ in range(2):
            journal = Journal.open(tmp_path, MIB)
            loaded = journal.load()
            assert (loaded.extents, loaded.owners) == ({4: 65536}, {4: "default"})
            journal.close()
            assert signed(tmp_path) == FORMAT

    def test_an_earlier_format_is_not_only_looked_at(self, tmp_path: Path) -> None:
        Journal.open(tmp_path, MIB).close()
        sign(tmp_path, 4)
        with pytest.raises(TierError, match=f"{tmp_path} holds format 4, not 5") as refused:
            RecordStore(tmp_path, None, MIB)
        assert refused.value.hint == "start the daemon once: it converts the records"
        assert signed(tmp_path) == 4

    def test_the_generation_of_an_earlier_format_is_taken_over_once(self, tmp_path: Path) -> None:
        older, newer = tmp_path / "older", tmp_path / "newer"
        for folder, generation in ((older, 2), (newer, 3)):
            Journal.open(folder, MIB).close()
            sign(folder, 3, generation=generation)
        found = []
        for _ in range(2):
            for folder, generation in ((older, 2), (newer, 3)):
                journal = Journal.open(folder, MIB)
                found.append(journal.history)
                journal.close()
                assert len(found[-1].committed) == generation
                assert signed(folder) == FORMAT, "an earlier daemon refuses it"
                with lmdb.open(str(folder / "records"), max_dbs=5) as env, env.begin() as txn:
                    assert txn.get(b"generation", db=env.open_db(b"meta", txn, create=False)) is None
        assert found[:2] == found[2:]
        assert resolve(found[:2], b"n" * 16).current == (False, True)
        assert resolve([found[1], History()], b"n" * 16).current == (True, False)

    def test_generations_survive_a_restart(self, tmp_path: Path) -> None:
        journal = Journal.open(tmp_path, MIB)
        assert journal.history == History()
        history = History((b"a" * 16, b"b" * 16), (b"c" * 16,))
        journal.put_generations(history)
        journal.close()
        journal = Journal.open(tmp_path, MIB)
        assert journal.history == history
        journal.close()

    def test_damaged_generations_are_refused(self, tmp_path: Path) -> None:
        Journal.open(tmp_path, MIB).close()
        with lmdb.open(str(tmp_path / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
            txn.put(b"generations", b"half a name", db=env.open_db(b"meta", txn))
        with pytest.raises(TierError, match=r"history of generations .* makes no sense") as refused:
            Journal.open(tmp_path, MIB)
        assert refused.value.hint == "move the folder away to start empty"

    def test_owners_of_extents_survive_a_restart(self, tmp_path: Path) -> None:
        journal = Journal.open(tmp_path, MIB)
        for extent, tenant in enumerate(["default", "team-ä", "x" * 200]):
            journal.put_extent(extent, 4096, tenant)
        journal.close()
        sign(tmp_path, FORMAT, {7: b"short", 8: (4096).to_bytes(8, "little") + b"\xff"})
        journal = Journal.open(tmp_path, MIB)
        loaded = journal.load()
        journal.close()
        assert loaded.owners == {0: "default", 1: "team-ä", 2: "x" * 200}, (
            "and what makes no sense is left out"
        )
        assert set(loaded.extents) == {0, 1, 2}

    @pytest.mark.parametrize("how", ["garbage", "cut", "odd"])
    def test_records_that_lmdb_cannot_read_are_moved_aside(
        self, tmp_path: Path, how: str, answers: Answers
    ) -> None:
        journal = Journal.open(tmp_path, MIB)
        journal.put(batch(*(b"%d" % i for i in range(2000))), NOTHING_TO_SYNC, answers.named("put"))
        journal.close()
        data = tmp_path / "records" / "data.mdb"
        nbytes = data.stat().st_size
        if how == "garbage":
            data.write_bytes(b"garbage!" * (nbytes // 8))
        else:
            os.truncate(data, nbytes // 2 if how == "cut" else nbytes // 4 + 5)
        again = Journal.open(tmp_path, MIB)
        [aside] = tmp_path.glob("records.corrupt-*")
        assert (aside / "data.mdb").exists()
        [problem] = again.problems
        assert f"were moved to {aside}: the NVMe tier starts empty" in problem
        assert len(again.load().blocks) == 0
        again.close()

    @pytest.mark.parametrize("what", ["no module", "no access", "no memory"])
    def test_records_that_cannot_be_tried_are_left_alone(
        self, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Journal.open(tmp_path, MIB).close()
        failing = {
            "no access": "open = lambda *_, **__: (_ for _ in ()).throw(Error('Permission denied'))",
            "no memory": "open = lambda *_, **__: (_ for _ in ()).throw(MemoryError('Cannot allocate'))",
        }
        library = tmp_path / "library"
        library.mkdir()
        names = ("MemoryError", "DiskError", "ReadonlyError", "LockError", "MapFullError", "NotFoundError")
        text = "class Error(Exception): pass\n" + "".join(f"class {n}(Error): pass\n" for n in names)
        (library / "lmdb.py").write_text("import nowhere" if what == "no module" else text + failing[what])
        monkeypatch.setattr(lmdb, "__file__", str(library / "lmdb" / "__init__.py"))
        with pytest.raises(TierError, match=f"cannot read the records in {tmp_path}: .*nothing was changed"):
            Journal.open(tmp_path, MIB)
        monkeypatch.undo()
        assert not list(tmp_path.glob("records.corrupt-*"))
        Journal.open(tmp_path, MIB).close()

    def test_records_that_fill_their_file_are_in_order(self, tmp_path: Path) -> None:
        """One transaction leaves no free page behind: there must be room to try whether one can write."""
        store = RecordStore(tmp_path, MIB, 64 << 20)
        store.commit(Changes(slots=[batch(*(b"%064d" % i for i in range(100_000))).pack()]))
        store.close()
        again = RecordStore(tmp_path, MIB, 64 << 20)
        assert again.problems == []
        assert len(again.load().blocks) == 100_000
        again.close()

    def test_invalid_records_are_recognized(self, tmp_path: Path, answers: Answers) -> None:
        journal = Journal.open(tmp_path, MIB)
        journal.put_namespace(1, Namespace("default", {"block_bytes": 4096}, bytes(16)))
        journal.put_extent(1, 4096, "default")
        journal.put(batch(b"good", b"flipped"), NOTHING_TO_SYNC, answers.named("put"))
        journal.close()
        with lmdb.open(str(tmp_path / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
            tables = {name: env.open_db(name, txn) for name in (b"slots", b"namespaces", b"extents")}
            bad = places(b"flipped")
            key = struct.pack(">II", 3, int(bad[0]) % (1 << 32) // PAGE_SLOTS)
            page = bytearray(txn.get(key, db=tables[b"slots"]))
            page[int(bad[0]) % PAGE_SLOTS * (len(page) // PAGE_SLOTS) + 5] ^= 1
            txn.put(key, bytes(page), db=tables[b"slots"])
            misplaced = struct.pack(">II", 4, 1 << 26)
            txn.put(misplaced, bytes(page), db=tables[b"slots"])
            txn.put(b"\0\0\0\1short", b"short", db=tables[b"slots"])
            txn.put(b"\0\0\0\2", b"\xc1", db=tables[b"namespaces"])
            txn.put(b"\0\0\0\2", b"odd", db=tables[b"extents"])
        journal = Journal.open(tmp_path, MIB)
        loaded = journal.load()
        assert keys_of(loaded.blocks) == [b"good"]
        assert loaded.damaged.pages == [b"\0\0\0\1short"]
        assert loaded.damaged.others == [b"\0\0\0\2", b"\0\0\0\2"], "of a namespace and an extent"
        found = set(loaded.damaged.places.tolist())
        assert int(bad[0]) in found
        assert all(place == bad[0] or place >> 32 == 4 for place in found), "a misplaced page is damaged"
        assert set(loaded.namespaces) == set(loaded.extents) == {1}
        before = (tmp_path / "records" / "data.mdb").stat().st_ino
        journal.renew(loaded)
        assert (tmp_path / "records" / "data.mdb").stat().st_ino != before, "LMDB changes no damaged file"
        assert len(journal.load().damaged) == 0
        assert keys_of(journal.load().blocks) == [b"good"]
        journal.put(batch(b"later"), NOTHING_TO_SYNC, answers.named("later"))
        journal.close()
        again = Journal.open(tmp_path, MIB)
        assert sorted(keys_of(again.load().blocks)) == [b"good", b"later"]
        assert set(again.load().namespaces) == set(again.load().extents) == {1}
        assert not (tmp_path / "records.new").exists()
        again.close()

    @pytest.mark.parametrize("left", [False, True])
    def test_records_renewed_keep_all_that_is_on_record(
        self, tmp_path: Path, left: bool, answers: Answers
    ) -> None:
        journal = Journal.open(tmp_path, MIB)
        keys = [b"%03d" % i for i in range(500)]
        space = Namespace("default", {"block_bytes": 65536}, bytes(16), readers=("other",), ttl_s=7.0)
        history = History((b"a" * 16,), (b"b" * 16,))
        journal.put_generations(history)
        journal.put_namespace(1, space)
        journal.put_extent(3, 65536, "default")
        journal.put(
            batch(*keys, version=5, stored_at=9.5, parent=b"above"), NOTHING_TO_SYNC, answers.named("")
        )
        journal.drain()
        before = journal.load()
        if left:
            (tmp_path / "records.new").mkdir()
            (tmp_path / "records.new" / "data.mdb").write_bytes(b"of a daemon that was killed")
        journal.renew(before)
        journal.close()
        again = Journal.open(tmp_path, 2 * MIB)
        after = again.load()
        again.close()
        assert (again.extent_bytes, again.history) == (MIB, history)
        assert (after.namespaces, after.extents, after.owners) == ({1: space}, {3: 65536}, {3: "default"})
        for column in ("keys", "parents", "places", "version", "stored_at", "checksum", "length", "ns"):
            assert np.array_equal(getattr(after.blocks, column), getattr(before.blocks, column)), column

    def test_without_room_for_a_new_file_the_old_one_stays(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        answers: Answers,
    ) -> None:
        journal = Journal.open(tmp_path, MIB)
        journal.put(batch(b"kept"), NOTHING_TO_SYNC, answers.named("put"))
        journal.drain()
        full = lmdb.DiskError("No space left on device")
        monkeypatch.setattr(RecordStore, "commit", lambda *_: (_ for _ in ()).throw(full))
        journal.renew(journal.load())
        monkeypatch.undo()
        assert "damaged records were not replaced" in caplog.text
        journal.put(batch(b"later"), NOTHING_TO_SYNC, answers.named("later"))
        journal.drain()
        assert sorted(keys_of(journal.load().blocks)) == [b"kept", b"later"]
        journal.close()

    def test_a_damaged_number_of_records_does_no_harm(self, tmp_path: Path, answers: Answers) -> None:
        journal = Journal.open(tmp_path, MIB)
        journal.put(batch(b"kept"), NOTHING_TO_SYNC, answers.named("put"))
        journal.close()
        data = tmp_path / "records" / "data.mdb"
        raw, name, entries = bytearray(data.read_bytes()), b"slots", 32
        at = raw.find(name)
        while at >= 0:
            raw[at + len(name) + entries + 6] ^= 1
            at = raw.find(name, at + 1)
        data.write_bytes(raw)
        with lmdb.open(str(tmp_path / "records"), max_dbs=5) as env, env.begin() as txn:
            assert txn.stat(env.open_db(name, txn))["entries"] > 1 << 40
        again = Journal.open(tmp_path, MIB)
        assert keys_of(again.load().blocks) == [b"kept"]
        again.close()

    def test_records_in_whose_commits_two_daemons_died_are_written_anew(
        self, tmp_path: Path, answers: Answers
    ) -> None:
        """LMDB crashes where it changes a damaged page: as a daemon that dies in a commit is killed there."""
        journal = Journal.open(tmp_path, MIB)
        journal.put(batch(b"kept"), NOTHING_TO_SYNC, answers.named("put"))
        journal.close()
        command = [sys.executable, "-c", DIES_IN_A_COMMIT, str(tmp_path)]
        for suspect in (False, True):
            died = subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT}, check=False)
            assert died.returncode == -signal.SIGSEGV
            journal = Journal.open(tmp_path, MIB)
            loaded = journal.load()
            assert loaded.suspect == suspect
            journal.put(batch(b"more"), NOTHING_TO_SYNC, answers.named("more"))
            journal.close()
        journal = Journal.open(tmp_path, MIB)
        before = (tmp_path / "records" / "data.mdb").stat().st_ino
        journal.renew(journal.load())
        assert (tmp_path / "records" / "data.mdb").stat().st_ino != before
        assert not journal.load().suspect
        assert sorted(keys_of(journal.load().blocks)) == [b"kept", b"more"]
        journal.close()
        again = RecordStore(tmp_path, MIB, 64 << 20)
        assert not again.load().suspect
        again.close()

    def test_a_kill_outside_of_commits_says_nothing_about_the_records(self, tmp_path: Path) -> None:
        for _ in range(3):
            command = [sys.executable, "-c", DIES_IN_A_COMMIT, str(tmp_path), "after it"]
            died = subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT}, check=False)
            assert died.returncode == -signal.SIGSEGV
        store = RecordStore(tmp_path, MIB, 64 << 20)
        assert not store.load().suspect
        store.close()

    @pytest.mark.parametrize("bit", [8 * 23 + 5, 8 * 141 + 3, 8 * 143])
    @pytest.mark.parametrize("page", [0, 1])
    def test_records_with_a_damaged_header_are_moved_aside(
        self, tmp_path: Path, page: int, bit: int, answers: Answers
    ) -> None:
        """A flipped bit of its version is no other version, and one of its size no lack of memory."""
        journal = Journal.open(tmp_path, MIB)
        journal.put(batch(b"lost"), NOTHING_TO_SYNC, answers.named("put"))
        journal.close()
        data = tmp_path / "records" / "data.mdb"
        raw = bytearray(data.read_bytes())
        raw[4096 * page + bit // 8] ^= 1 << bit % 8
        data.write_bytes(raw)
        again = Journal.open(tmp_path, MIB)
        [problem] = again.problems
        assert "corrupt records" in problem
        again.close()

    def test_records_whose_damage_shows_when_they_are_opened_are_moved_aside(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Journal.open(tmp_path, MIB).close()
        damage = iter([lmdb.PageNotFoundError("mdb_dbi_open: Requested page not found")])
        history = RecordStore._history

        def broken(store: RecordStore) -> History:
            for error in damage:
                raise error
            return history(store)

        monkeypatch.setattr(RecordStore, "_history", broken)
        again = Journal.open(tmp_path, 2 * MIB)
        [problem] = again.problems
        assert "corrupt records (PageNotFoundError: mdb_dbi_open" in problem
        assert again.extent_bytes == 2 * MIB
        again.close()

    @pytest.mark.parametrize("name", [b"format", b"extent_bytes"])
    def test_records_with_a_damaged_signature_are_moved_aside(self, tmp_path: Path, name: bytes) -> None:
        Journal.open(tmp_path, MIB).close()
        with lmdb.open(str(tmp_path / "records"), max_dbs=5) as env, env.begin(write=True) as txn:
            txn.put(name, b"short", db=env.open_db(b"meta", txn))
        with pytest.raises(TierError, match="cannot use the records"):
            RecordStore(tmp_path, None, 64 << 20)
        again = Journal.open(tmp_path, 2 * MIB)
        [problem] = again.problems
        assert "corrupt records (error: unpack requires a buffer of 8 bytes)" in problem
        assert again.extent_bytes == 2 * MIB
        again.close()


KILLED = """
import os, sys, threading
from pathlib import Path
from kvstore.tiers.nvme.journal import Journal, RecordBatch

journal, room = Journal.open(Path(sys.argv[1]), 1 << 20), threading.Semaphore(100)

def put(number):
    def done(error):
        os.write(1, b"%d %d\\n" % (number, error is None))
        room.release()

    n = 1 + number % 7
    keys = [b"%d/%d" % (number, i) for i in range(n)]
    same, checksums = [number] * n, [~number % 2**64] * n
    records = RecordBatch([1] * n, keys, [b""] * n, range(n), same, same, [1] * n, checksums, [0.0] * n)
    journal.put(records, int, done)

for number in range(int(sys.argv[2]), 1 << 31):
    room.acquire()
    put(number)
"""


def test_sigkill_loses_nothing_acknowledged_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(kvstore.__file__).parents[1])}
    acknowledged: set[int] = set()
    for turn in range(4):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(turn * 1_000_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            for _ in range(50 + 500 * turn):
                number, well = child.stdout.readline().split()
                assert well == b"1"
                acknowledged.add(int(number))
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().splitlines(keepends=True)
            acknowledged.update(int(line.split()[0]) for line in rest if line.endswith(b"\n"))
        journal = Journal.open(tmp_path, MIB)
        blocks = journal.load().blocks
        journal.close()
        numbers, counts = np.unique(blocks.version, return_counts=True)
        assert acknowledged <= set(numbers.tolist())
        assert counts.tolist() == [1 + number % 7 for number in numbers.tolist()]
        assert np.array_equal(blocks.checksum, ~blocks.version)
        assert np.array_equal(blocks.index, blocks.version)
        assert set(keys_of(blocks)) == {b"%d/%d" % (n, i) for n in numbers.tolist() for i in range(1 + n % 7)}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("../../other")])
def test_records_that_are_no_file_are_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "records").mkdir()
    make(tmp_path / "records" / "data.mdb")
    with pytest.raises(TierError, match=r"data\.mdb is no regular file"):
        Journal.open(tmp_path, MIB)


def test_a_lock_is_not_looked_for_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"somebody's")
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(TierError, match="cannot use folder"):
        Journal.open(tmp_path, MIB)
    assert (tmp_path / "other").read_bytes() == b"somebody's"


def test_a_folder_that_everybody_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    Journal.open(tmp_path, MIB).close()
    assert "may be written by everybody" in caplog.text
