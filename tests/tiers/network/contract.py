"""What every backend owes the daemon. A backend gets a class of a few lines, and what it adds besides."""

from __future__ import annotations

import mmap
import random
import threading
import time

import pytest

from kvstore.arena import checksum, seed
from kvstore.tiers.network.base import Backend, Name, NetworkError, Object, Outcome
from kvstore.types import ALIGN, MAX_KEY_BYTES, slot_bytes

WAIT_S = 20.0
SPACE = bytes(range(16))
OTHER = bytes(range(16, 32))


def ends(within_s: float = WAIT_S) -> float:
    return time.monotonic() + within_s


def memory(nbytes: int) -> memoryview:
    """Memory as slots have it: page-aligned, whole pages."""
    return memoryview(mmap.mmap(-1, slot_bytes(nbytes)))


def block(key: bytes, nbytes: int = 70_000, space: bytes = SPACE, parent: bytes = b"") -> Object:
    """A block with bytes of its own, as the daemon would put it."""
    room = memory(nbytes)
    room[:nbytes] = random.Random(space + key + nbytes.to_bytes(8, "little")).randbytes(nbytes)
    name = Name(space, key)
    return Object(name, nbytes, room, checksum(room[:nbytes], seed(space, key, nbytes)), parent)


def wanted(of: Object) -> Object:
    """The same block as a reader asks for it."""
    return Object(of.name, of.length, memory(of.length))


def payload(thing: Object) -> bytes:
    return bytes(thing.memory[: thing.length])


class Contract:
    """Tests of a `backend` fixture, fresh and empty each time.

    Override `alter`: it changes the object at a name, in place, behind the backend's back. `change` is given
    its raw bytes, and what that returns is stored instead. `lists` is False of a system that can't list,
    `replaces_at_once` of one in which an object is absent for a moment while it is put again.
    """

    lists = True
    replaces_at_once = True

    def check_list(self, backend: Backend, namespace: bytes | None, names: list[Name]) -> None:
        """Exactly these are listed, or the backend says that it can't."""
        if not self.lists:
            with pytest.raises(NetworkError, match="list"):
                backend.list(namespace, ends())
            return
        found = [listed.name for listed in backend.list(namespace, ends())]
        assert sorted(found, key=repr) == sorted(names, key=repr)

    def alter(self, backend: Backend, name: Name, change) -> None:
        raise NotImplementedError

    def test_a_written_object_is_read(self, backend: Backend) -> None:
        blocks = [block(bytes([i]) * 32, parent=bytes([i - 1]) * 32 if i else b"") for i in range(9)]
        assert backend.write(blocks, ends()) == [Outcome.OK] * 9
        got = [wanted(b) for b in blocks]
        assert backend.read(got, ends()) == [Outcome.OK] * 9
        assert [payload(g) for g in got] == [payload(b) for b in blocks]
        assert [(g.checksum, g.parent) for g in got] == [(b.checksum, b.parent) for b in blocks]

    def test_a_checksum_is_seeded_with_the_fingerprint(self, backend: Backend) -> None:
        put = block(b"k")
        put.fingerprint = OTHER
        put.checksum = checksum(put.memory[: put.length], seed(OTHER, b"k", put.length))
        assert backend.write([put], ends()) == [Outcome.OK]
        assert backend.read([wanted(put)], ends()) == [Outcome.TORN]
        got = wanted(put)
        got.fingerprint = OTHER
        assert backend.read([got], ends()) == [Outcome.OK]
        assert (payload(got), got.checksum) == (payload(put), put.checksum)

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, (4 << 20) + 1])
    def test_any_size(self, backend: Backend, nbytes: int) -> None:
        put = block(b"k", nbytes)
        assert backend.write([put], ends()) == [Outcome.OK]
        got = wanted(put)
        assert backend.read([got], ends()) == [Outcome.OK]
        assert payload(got) == payload(put)

    @pytest.mark.parametrize("key", [b"\0", b"/../../x", b"A" * MAX_KEY_BYTES, b"\xff" * 3, b"a", b"{x}*? "])
    def test_any_key(self, backend: Backend, key: bytes) -> None:
        put = block(key, 5000)
        assert backend.write([put], ends()) == [Outcome.OK]
        got = wanted(put)
        assert backend.read([got], ends()) == [Outcome.OK]
        self.check_list(backend, SPACE, [put.name])

    def test_names_that_differ_in_case_alone_are_two(self, backend: Backend) -> None:
        small, large = block(b"key", 5000), block(b"KEY", 5000)
        assert backend.write([small, large], ends()) == [Outcome.OK] * 2
        got = [wanted(small), wanted(large)]
        assert backend.read(got, ends()) == [Outcome.OK] * 2
        assert [payload(g) for g in got] == [payload(small), payload(large)]

    def test_an_absent_object_is_missing(self, backend: Backend) -> None:
        there, absent = block(b"there"), block(b"absent")
        backend.write([there], ends())
        names = [absent.name, there.name, absent.name]
        assert backend.probe(names, ends()) == [Outcome.MISSING, Outcome.OK, Outcome.MISSING]
        got = [wanted(absent), wanted(there)]
        assert backend.read(got, ends()) == [Outcome.MISSING, Outcome.OK]
        assert payload(got[1]) == payload(there)

    def test_namespaces_are_apart(self, backend: Backend) -> None:
        mine, others = block(b"k"), block(b"k", space=OTHER)
        backend.write([mine], ends())
        assert backend.read([wanted(others)], ends()) == [Outcome.MISSING]
        backend.write([others], ends())
        got = [wanted(mine), wanted(others)]
        assert backend.read(got, ends()) == [Outcome.OK] * 2
        assert [payload(g) for g in got] == [payload(mine), payload(others)]
        self.check_list(backend, OTHER, [others.name])
        self.check_list(backend, None, [mine.name, others.name])

    def test_putting_again_changes_nothing(self, backend: Backend) -> None:
        put = block(b"k")
        assert backend.write([put], ends()) == [Outcome.OK]
        assert backend.write([put], ends()) == [Outcome.OK]
        got = wanted(put)
        assert backend.read([got], ends()) == [Outcome.OK]
        assert payload(got) == payload(put)

    def test_a_deleted_object_is_missing(self, backend: Backend) -> None:
        first, second = block(b"first"), block(b"second")
        backend.write([first, second], ends())
        assert backend.delete([first.name, Name(SPACE, b"never")], ends()) == [Outcome.OK] * 2
        assert backend.probe([first.name, second.name], ends()) == [Outcome.MISSING, Outcome.OK]
        assert backend.read([wanted(first)], ends()) == [Outcome.MISSING]
        self.check_list(backend, SPACE, [second.name])

    def test_a_list_tells_sizes_and_ages(self, backend: Backend) -> None:
        put = block(b"k", 70_000)
        backend.write([put], ends())
        self.check_list(backend, SPACE, [put.name])
        if not self.lists:
            return
        [listed] = backend.list(SPACE, ends())
        assert 70_000 < listed.nbytes < 70_000 + 3 * ALIGN
        assert -2 < listed.age_s < 60

    def test_nothing_is_nothing(self, backend: Backend) -> None:
        assert backend.write([], ends()) == backend.read([], ends()) == []
        assert backend.probe([], ends()) == backend.delete([], ends()) == []
        self.check_list(backend, None, [])

    def test_another_length_is_torn(self, backend: Backend) -> None:
        backend.write([block(b"k", 70_000)], ends())
        for other in (60_000, 80_000):
            assert backend.read([wanted(block(b"k", other))], ends()) == [Outcome.TORN]

    @pytest.mark.parametrize(
        "change",
        [
            lambda raw: raw[:-1000],
            lambda raw: raw[:100],
            lambda raw: b"",
            lambda raw: raw[:40_000] + bytes([raw[40_000] ^ 1]) + raw[40_001:],
            lambda raw: raw[:9] + bytes([raw[9] ^ 1]) + raw[10:],
            lambda raw: raw[:170] + bytes([raw[170] ^ 1]) + raw[171:],
            lambda raw: b"foreign" * 100,
            lambda raw: bytes(len(raw)),
        ],
        ids=["cut", "header cut", "empty", "bit", "format", "checksum", "foreign", "zeros"],
    )
    def test_an_altered_object_is_torn(self, backend: Backend, change) -> None:
        put, good = block(b"k", 70_000), block(b"good", 70_000)
        backend.write([put, good], ends())
        self.alter(backend, put.name, change)
        got = [wanted(put), wanted(good)]
        assert backend.read(got, ends()) == [Outcome.TORN, Outcome.OK]
        assert payload(got[1]) == payload(good)

    def test_a_swapped_object_is_torn(self, backend: Backend) -> None:
        put, other = block(b"k", 70_000), block(b"other", 70_000)
        backend.write([put, other], ends())
        kept: list[bytes] = []
        self.alter(backend, other.name, lambda raw: kept.append(raw) or raw)
        self.alter(backend, put.name, lambda raw: kept[0])
        assert backend.read([wanted(put), wanted(other)], ends()) == [Outcome.TORN, Outcome.OK]

    def test_a_torn_object_can_be_written_again(self, backend: Backend) -> None:
        put = block(b"k")
        backend.write([put], ends())
        self.alter(backend, put.name, lambda raw: raw[:-1000])
        backend.delete([put.name], ends())
        assert backend.write([put], ends()) == [Outcome.OK]
        assert backend.read([wanted(put)], ends()) == [Outcome.OK]

    def test_from_many_threads(self, backend: Backend) -> None:
        wrong: list[str] = []

        def work(who: int) -> None:
            for turn in range(6):
                blocks = [block(f"{who} {turn} {i}".encode(), 40_000) for i in range(5)]
                shared = block(b"shared", 40_000)
                if backend.write([*blocks, shared], ends()) != [Outcome.OK] * 6:
                    wrong.append("write")
                put = [*blocks, shared]
                got = [wanted(b) for b in put]
                outcomes = backend.read(got, ends())
                if outcomes[-1] is Outcome.MISSING and not self.replaces_at_once:
                    put, got = put[:-1], got[:-1]
                if outcomes[: len(put)] != [Outcome.OK] * len(put):
                    wrong.append(f"read: {outcomes}")
                if [payload(g) for g in got] != [payload(b) for b in put]:
                    wrong.append("bytes")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S * 2)
        assert not wrong, wrong

    def test_time_that_is_up_is_failed(self, backend: Backend) -> None:
        put = block(b"k")
        past = time.monotonic() - 1
        assert backend.write([put], past) == [Outcome.FAILED]
        assert backend.read([wanted(put)], past) == [Outcome.FAILED]
        assert backend.probe([put.name], past) == [Outcome.FAILED]

    def test_health(self, backend: Backend) -> None:
        backend.health(ends())
        self.check_list(backend, None, [])

    def test_closing_twice(self, backend: Backend) -> None:
        backend.close()
        backend.close()
        assert backend.read([wanted(block(b"k"))], ends(1)) == [Outcome.FAILED]
