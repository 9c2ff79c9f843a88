"""Shared-memory extents: rights, headers, checksums, and views that outlive what they were made from."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import stat
from collections.abc import Iterator

import numpy as np
import pytest
from xxhash import xxh3_64

from kvstore import arena
from kvstore.arena import HEADER, Extent, Mapping, checksum, copy, copy_digest, seed
from kvstore.errors import TierError
from kvstore.types import HEADER_BYTES, LABEL_BYTES, Geometry

MIB = 1 << 20
NBYTES = 4 * MIB
GEOMETRY = Geometry(extent_bytes=NBYTES, slot_bytes=64 << 10, table=True)
NS = bytes(range(16))


@pytest.fixture
def extent() -> Iterator[Extent]:
    made = Extent.create("kvstore-test", NBYTES)
    yield made
    made.close()


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


def mapped_ranges() -> list[str]:
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:kvstore-test" in line]


def copy_and_digest(target: bytearray | memoryview, source: bytes) -> int:
    digest = xxh3_64(seed=99)
    copy_digest(target, source, digest)
    return digest.intdigest()


class TestHeader:
    def test_fills_its_place_in_the_table(self) -> None:
        assert HEADER.itemsize == HEADER_BYTES

    def test_every_8_byte_field_is_8_aligned(self) -> None:
        assert HEADER.fields is not None
        for name, (dtype, offset, *_) in HEADER.fields.items():
            if dtype == np.dtype("<u8"):
                assert offset % 8 == 0, name

    def test_no_two_fields_overlap(self) -> None:
        assert HEADER.fields is not None
        spans = sorted((entry[1], entry[1] + entry[0].itemsize) for entry in HEADER.fields.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def test_both_sides_see_one_table(self, extent: Extent) -> None:
        mapping = Mapping(extent.fd, NBYTES, writable=True)
        table = mapping.headers(GEOMETRY)
        assert table.shape == (GEOMETRY.slots,)
        table[3]["key"][:5] = list(b"abcde")
        table[3]["version"] = 1 << 63
        theirs = extent.headers(GEOMETRY)
        assert bytes(theirs[3]["key"][:5]) == b"abcde"
        assert theirs["version"].tolist() == [0, 0, 0, 1 << 63] + [0] * (GEOMETRY.slots - 4)
        assert bytes(extent.view[LABEL_BYTES + 3 * HEADER_BYTES + 32 :][:5]) == b"abcde"

    def test_readers_cannot_store_into_the_table(self, extent: Extent) -> None:
        table = Mapping(extent.fd, NBYTES, writable=False).headers(GEOMETRY)
        with pytest.raises(ValueError, match="read-only"):
            table[0]["version"] = 1


class TestChecksum:
    def test_names_the_bytes_their_owner_and_their_length(self) -> None:
        payload = noise(4096)
        sums = {
            checksum(payload, seed(NS, b"key", 4096)),
            checksum(payload, seed(NS, b"kez", 4096)),
            checksum(payload, seed(bytes(16), b"key", 4096)),
            checksum(payload, seed(NS, b"key", 4095)),
            checksum(payload[:-1], seed(NS, b"key", 4096)),
            checksum(payload[:-1] + b"\0", seed(NS, b"key", 4096)),
        }
        assert len(sums) == 6
        assert all(0 <= value < 1 << 64 for value in sums)

    def test_is_the_same_for_every_kind_of_buffer(self) -> None:
        payload = noise(300_000)
        assert checksum(payload, 7) == checksum(bytearray(payload), 7) == checksum(memoryview(payload), 7)

    def test_checksums_have_fixed_values(self) -> None:
        """Records on disk hold these numbers: another hash is another format."""
        assert seed(NS, b"key", 3) == 0x13D7ED404712886A
        assert checksum(b"abc", 1) == 0x6B4467B443C76228

    @pytest.mark.parametrize(
        "nbytes", [0, 1, 4095, 64 << 10, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 2 * MIB, 2 * MIB + 7]
    )
    def test_a_digest_of_a_copy_is_that_of_the_source(self, nbytes: int) -> None:
        source = noise(nbytes)
        target = bytearray(nbytes)
        assert copy_and_digest(target, source) == checksum(source, 99)
        assert target == source

    @pytest.mark.parametrize("move", [copy, copy_and_digest])
    @pytest.mark.parametrize("nbytes", [1, 4096, MIB])
    def test_sizes_that_differ_are_refused(self, move, nbytes: int) -> None:
        """A source of one byte must not be spread over the whole target."""
        target = bytearray(nbytes)
        with pytest.raises(ValueError, match="bytes, source"):
            move(target, b"x" * (nbytes + 1))
        if nbytes > 1:
            with pytest.raises(ValueError, match="bytes, source"):
                move(target, b"x")
        assert target == bytes(nbytes)

    def test_copy_refuses_a_read_only_target(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            copy(memoryview(bytes(8)), b"12345678")


class TestRights:
    def test_mode_and_seals(self, extent: Extent) -> None:
        assert stat.S_IMODE(os.fstat(extent.fd).st_mode) == 0o600
        with pytest.raises(PermissionError):
            os.ftruncate(extent.fd, NBYTES - 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(extent.fd, NBYTES + 4096)
        assert not fcntl.fcntl(extent.fd, fcntl.F_GET_SEALS) & 0x10  # writers must still be able to map it

    def test_a_read_only_descriptor_grants_no_writable_map(self, extent: Extent) -> None:
        fd = extent.readonly_fd()
        try:
            with pytest.raises(
                TierError, match=r"cannot map 4194304 bytes writable: Permission denied \(the desc"
            ):
                Mapping(fd, NBYTES, writable=True)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, NBYTES)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
            reader = Mapping(fd, NBYTES, writable=False)
        finally:
            os.close(fd)
        assert reader.view.readonly
        extent.view[-1] = 7
        assert reader.view[-1] == 7

    def test_a_writer_maps_and_may_close_its_descriptor(self, extent: Extent) -> None:
        fd = os.dup(extent.fd)
        before = len(os.listdir("/proc/self/fd"))
        writer = Mapping(fd, NBYTES, writable=True)
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(fd)
        writer.view[:4] = b"kept"
        assert bytes(extent.view[:4]) == b"kept"

    def test_a_descriptor_smaller_than_announced_is_refused(self, extent: Extent) -> None:
        with pytest.raises(TierError, match="4194304 bytes, 8388608 were announced"):
            Mapping(extent.fd, 2 * NBYTES, writable=False)


class TestExtent:
    @pytest.mark.parametrize("nbytes", [4096, MIB, 2 * MIB, 3 * MIB, 33 * MIB])
    @pytest.mark.parametrize("huge", [False, True])
    def test_populate_keeps_bytes_and_takes_all_memory(self, nbytes: int, huge: bool) -> None:
        extent = Extent.create("kvstore-test", nbytes)
        extent.view[-3:] = b"end"
        got = extent.populate(huge)
        assert got is False if not huge else isinstance(got, bool)
        assert bytes(extent.view[-3:]) == b"end"
        assert os.fstat(extent.fd).st_blocks * 512 >= nbytes
        extent.close()

    def test_a_kernel_without_huge_pages_is_a_value(
        self, extent: Extent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arena, "_MADV_COLLAPSE", 9999)
        assert extent.populate(huge=True) is False
        monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)
        assert extent.populate(huge=True) is False

    def test_populate_stops_when_the_extent_is_closed(self) -> None:
        extent = Extent.create("kvstore-test", NBYTES)
        extent.close()
        assert extent.populate(huge=True) is False

    @pytest.mark.parametrize("huge", [False, True])
    def test_punch_leaves_zeros_on_all_sides_and_no_memory(self, extent: Extent, huge: bool) -> None:
        reader = Mapping(extent.fd, NBYTES, writable=False)
        extent.populate(huge)
        extent.view[:] = b"x" * NBYTES
        extent.punch()
        assert os.fstat(extent.fd).st_blocks == 0
        assert os.fstat(extent.fd).st_size == NBYTES
        assert bytes(reader.view) == bytes(extent.view) == bytes(NBYTES)
        extent.view[-1] = 1
        assert reader.view[-1] == 1

    def test_a_kernel_that_cannot_punch_raises_an_error(self, extent: Extent) -> None:
        sealed = Extent.create("kvstore-test", NBYTES)
        fd = sealed.readonly_fd()
        os.close(sealed.fd)
        sealed.fd = fd
        with pytest.raises(TierError, match="cannot empty an extent of 4194304 bytes: Bad file"):
            sealed.punch()
        sealed.close()

    def test_maps_at_a_huge_page_boundary(self, extent: Extent) -> None:
        for view in (extent.view, Mapping(extent.fd, NBYTES, writable=False).view):
            assert np.frombuffer(view, np.uint8).ctypes.data % (2 * MIB) == 0

    def test_no_room_names_bytes_and_a_hint(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            TierError, match=r"an extent of 4611686018427387904 bytes: .*memory \(give the tier"
        ):
            Extent.create("kvstore-test", 1 << 62)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_is_taken_back_by_its_descriptor(self, extent: Extent) -> None:
        extent.view[:5] = b"still"
        again = Extent(os.dup(extent.fd), NBYTES)
        assert bytes(again.view[:5]) == b"still"
        again.close()

    def test_close_twice(self) -> None:
        extent = Extent.create("kvstore-test", NBYTES)
        extent.close()
        extent.close()


class TestLifetime:
    def test_close_unmaps_and_closes(self) -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        assert mapped_ranges() == []
        extent = Extent.create("kvstore-test", NBYTES)
        mapping = Mapping(extent.fd, NBYTES, writable=True)
        assert len(mapped_ranges()) == 2
        mapping.close()
        assert len(mapped_ranges()) == 1
        extent.close()
        assert mapped_ranges() == []
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("side", ["extent", "mapping"])
    def test_views_outlive_close(self, side: str) -> None:
        extent = Extent.create("kvstore-test", NBYTES)
        mapping = Mapping(extent.fd, NBYTES, writable=False)
        extent.view[NBYTES - 4 :] = b"tail"
        owner: Extent | Mapping = extent if side == "extent" else mapping
        view = owner.view[NBYTES - 4 :]
        array = np.frombuffer(owner.view, np.uint8)[-4:]
        table = owner.headers(GEOMETRY)
        mapping.close()
        extent.close()
        del owner
        gc.collect()
        assert bytes(view) == array.tobytes() == b"tail"
        assert table[0]["version"] == 0
        assert len(mapped_ranges()) == 1
        del view, array, table
        assert mapped_ranges() == []

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_child_reads_and_lets_go(self, extent: Extent) -> None:
        payload = noise(64 << 10)
        mapping = Mapping(extent.fd, NBYTES, writable=False)
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(ready, 1)
            same = bytes(mapping.view[4096 : 4096 + len(payload)]) == payload
            mapping.close()
            os._exit(0 if same and len(mapped_ranges()) == 1 else 1)
        extent.view[4096 : 4096 + len(payload)] = payload
        os.write(go, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(mapping.view[4096:4100]) == payload[:4]
        os.close(ready)
        os.close(go)


def test_reserved_addresses_are_given_back() -> None:
    def size_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE

    Extent.create("kvstore-test", NBYTES).close()
    before = size_bytes()
    for _ in range(20):
        Extent.create("kvstore-test", NBYTES + 4096).close()
    assert size_bytes() - before < 2 * MIB
