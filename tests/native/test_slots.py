"""Blocks that `read_slots` copies from slots without a lease: proved ones, and no others."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvstore import arena
from kvstore.arena import HEADER
from kvstore.columns import zeros
from kvstore.types import LABEL_BYTES, Geometry

try:
    from kvstore.native._native import choose, read_slots
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

NAMESPACE = b"namespace 16 by."
SLOT_BYTES = 4096


@dataclass
class Slab:
    """An extent as the daemon writes it, in memory of this process."""

    number: int
    block_bytes: int
    slots: int = 16

    def __post_init__(self) -> None:
        offset = LABEL_BYTES + -(-self.slots * HEADER.itemsize // 4096) * 4096
        self.memory = zeros(offset + self.slots * SLOT_BYTES, np.uint8)
        self.table = self.memory[LABEL_BYTES:offset][: self.slots * HEADER.itemsize].view(HEADER)
        self.payload = self.memory[offset:].reshape(self.slots, SLOT_BYTES)
        self.known = (self.number, self.memory, offset, self.slots)

    def write(self, slot: int, key: bytes, data: bytes, version: int = 1) -> int:
        """Stores a block; returns its place."""
        assert len(data) == self.block_bytes
        self.table["version"][slot] = 0
        self.payload[slot, : len(data)] = np.frombuffer(data, np.uint8)
        self.table["checksum"][slot] = arena.checksum(data, arena.seed(NAMESPACE, key, len(data)))
        self.table["version"][slot] = version
        return self.number << 32 | slot


def key_of(i: int, size: int = 32) -> bytes:
    return random.Random(i).randbytes(size)


def data_of(i: int, nbytes: int) -> bytes:
    return random.Random(1000 + i).randbytes(nbytes)


def read(
    slabs: list[Slab], places: list[int], keys: list[bytes], block_bytes: int, out: Any = None
) -> tuple[int, bytes]:
    out = np.zeros(len(places) * block_bytes, np.uint8) if out is None else out
    raw = np.array(places, np.uint64).tobytes()
    n = read_slots(out, [slab.known for slab in slabs], raw, keys, NAMESPACE, block_bytes, SLOT_BYTES)
    return n, out[: n * block_bytes].tobytes()


@pytest.mark.parametrize("block_bytes", [0, 1, 8, 240, 241, 1024, 1025, 3000, 4095, 4096])
@pytest.mark.parametrize("key_bytes", [1, 16, 32, 64])
def test_blocks_of_every_size_come_from_their_slots(block_bytes: int, key_bytes: int) -> None:
    slabs = [Slab(3, block_bytes), Slab(70000, block_bytes)]
    places = [slabs[i % 2].write(i, key_of(i, key_bytes), data_of(i, block_bytes)) for i in range(9)]
    keys = [key_of(i, key_bytes) for i in range(9)]
    expected = b"".join(data_of(i, block_bytes) for i in range(9))
    for number in range(4):
        try:
            choose(number)
        except ValueError:
            break
        assert read(slabs, places, keys, block_bytes) == (9, expected)
    choose(0)


def test_blocks_come_into_a_buffer_each() -> None:
    slab = Slab(0, 1000)
    places = [slab.write(i, key_of(i), data_of(i, 1000)) for i in range(9)]
    slab.payload[7, 0] ^= 1
    room = np.zeros((9, 1010), np.uint8)
    raw, out = np.array(places, np.uint64).tobytes(), [room[8 - i, :1000] for i in range(9)]
    assert read_slots(out, [slab.known], raw, list(map(key_of, range(9))), NAMESPACE, 1000, SLOT_BYTES) == 7
    assert [each.tobytes() for each in out[:7]] == [data_of(i, 1000) for i in range(7)]
    assert not room[:, 1000:].any()


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize(
    "how", ["voided", "byte", "checksum", "another key", "no slot", "no extent", "moved"]
)
def test_a_block_that_is_not_proved_ends_the_prefix(bad: int, how: str) -> None:
    slab = Slab(0, 3000)
    places = [slab.write(2 * i, key_of(i), data_of(i, 3000)) for i in range(4)]
    keys = [key_of(i) for i in range(4)]
    slot = 2 * bad
    if how == "voided":
        slab.table["version"][slot] = 0
    elif how == "byte":
        slab.payload[slot, 2999] ^= 1
    elif how == "checksum":
        slab.table["checksum"][slot] ^= 1
    elif how == "another key":
        keys[bad] = key_of(99)
    elif how == "no slot":
        places[bad] = slab.slots
    elif how == "no extent":
        places[bad] |= 1 << 32
    else:
        slab.write(slot, key_of(50), data_of(50, 3000), version=2)
    expected = b"".join(data_of(i, 3000) for i in range(bad))
    assert read([slab], places, keys, 3000) == (bad, expected)


def test_only_the_namespace_of_a_block_gets_it() -> None:
    slab, out = Slab(0, 100), np.zeros(100, np.uint8)
    place = np.array([slab.write(0, key_of(0), data_of(0, 100))], np.uint64).tobytes()
    for namespace, n in ((NAMESPACE, 1), (b"another of 16 by", 0)):
        got = read_slots(out, [slab.known], place, [key_of(0)], namespace, 100, SLOT_BYTES)
        assert got == n


GOOD: dict[str, Any] = {
    "out": np.zeros(4096, np.uint8),
    "extents": None,
    "places": bytes(8),
    "keys": [b"k" * 32],
    "namespace": NAMESPACE,
    "block_bytes": 100,
    "slot_bytes": SLOT_BYTES,
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"out": bytes(4096)}, BufferError),
        ({"out": np.zeros(99, np.uint8)}, ValueError),
        ({"out": []}, IndexError),
        ({"out": [np.zeros(99, np.uint8)]}, ValueError),
        ({"out": [bytes(100)]}, BufferError),
        ({"out": ["text"]}, TypeError),
        ({"out": np.zeros(100, np.uint8), "places": bytes(16)}, ValueError),
        ({"keys": []}, IndexError),
        ({"keys": ["text"]}, TypeError),
        ({"keys": [b"k" * 65]}, ValueError),
        ({"keys": [b"k", b"kk"], "places": bytes(16)}, ValueError),
        ({"keys": (b"k" * 32,)}, TypeError),
        ({"namespace": b"short"}, ValueError),
        ({"block_bytes": 4097}, ValueError),
        ({"block_bytes": 0, "slot_bytes": 0}, ValueError),
        ({"slot_bytes": 1 << 62}, ValueError),
        ({"slot_bytes": SLOT_BYTES + 1}, ValueError),
        ({"extents": [(0, None, 8192, 1)]}, TypeError),
        ({"extents": [(0, bytes(8192), 4096, 1)]}, ValueError),
        ({"extents": [(0, bytes(8192), 1 << 63, 1)]}, ValueError),
        ({"extents": [(0, bytes(8192), 8192, 1)]}, ValueError),
        ({"extents": [(0, bytes(8192), 0, 0)]}, ValueError),
        ({"extents": 7}, TypeError),
        ({"extents": [7]}, TypeError),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], error: type) -> None:
    arguments = {**GOOD, "extents": [Slab(0, 100).known], **change}
    with pytest.raises(error):
        read_slots(*arguments.values())


def test_a_target_in_the_extent_is_refused() -> None:
    slab = Slab(0, 100)
    place = slab.write(0, key_of(0), data_of(0, 100))
    with pytest.raises(ValueError, match="overlap"):
        read([slab], [place], [key_of(0)], 100, out=slab.payload[1])
    other, raw = np.zeros(100, np.uint8), np.array([place, place], np.uint64).tobytes()
    with pytest.raises(ValueError, match="overlap"):
        read_slots([other, slab.payload[1]], [slab.known], raw, [key_of(0)] * 2, NAMESPACE, 100, SLOT_BYTES)


def test_readers_beside_a_writer_get_whole_blocks_or_none() -> None:
    slab, over = Slab(0, 4096), threading.Event()
    blocks = {key_of(i): data_of(i, 4096) for i in range(8)}
    keys = list(blocks)

    def write() -> None:
        dice, version = random.Random(1), 0
        while not over.is_set():
            version += 1
            key = dice.choice(keys)
            slab.write(0, key, blocks[key], version)
            time.sleep(dice.choice((0, 0.0001)))

    writer = threading.Thread(target=write)
    writer.start()
    counts, ends = [0, 0], time.monotonic() + 20
    try:
        while min(counts) < 200 and time.monotonic() < ends:
            key = keys[sum(counts) % 8]
            n, got = read([slab], [0], [key], 4096)
            assert got == (blocks[key] if n else b"")
            counts[n] += 1
    finally:
        over.set()
        writer.join()
    assert min(counts), counts


def test_the_layout_is_that_of_extents() -> None:
    geometry = Geometry(1 << 20, SLOT_BYTES, table=True)
    assert (HEADER.itemsize, HEADER.fields["version"][1], HEADER.fields["checksum"][1]) == (192, 8, 168)
    assert geometry.payload_offset >= LABEL_BYTES + geometry.slots * HEADER.itemsize
