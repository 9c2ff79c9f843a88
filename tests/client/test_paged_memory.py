"""Pages of an engine's memory in host memory, to slots and back: every shape, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import Client, Layout, PagedLayer, PagedMemory
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import names

PAGES, ROW = 9, 100
Array = np.ndarray[Any, Any]


def two_layers() -> tuple[Array, PagedMemory]:
    """Random pages, (PAGES, 250): a layer has the first 100 bytes of each, another one the rest."""
    whole = np.random.default_rng(3).integers(0, 256, (PAGES, 250), np.uint8)
    layers = [PagedLayer(whole, 0, 250, ROW), PagedLayer(whole, ROW, 250, 150)]
    return whole, PagedMemory(layers, PAGES)


@pytest.fixture
def client() -> Iterator[Client]:
    daemon = LocalDaemon({"dram": {"limit": "16MiB"}, "scrub": {"rate": 0}})
    with daemon, Client(daemon.url, deadline_s=20, strict=True) as client:
        yield client


def namespace(client: Client, block_bytes: int) -> Any:
    return client.namespace(Layout(model="pages", block_bytes=block_bytes))


def test_pages_go_to_slots_and_back(client: Client) -> None:
    whole, memory = two_layers()
    assert (memory.page_bytes, memory.gpu) == (250, None)
    before, keys = whole.copy(), names(4)
    ns = namespace(client, 3 * 250)
    with ns.reserve(keys) as room:
        room.gather_all(memory.parts([[0, 1, 2]]))
        room.gather_all(memory.parts(np.array([[3, 4, 5], [8, 8, 0]], np.uint32)), 1)
        room.gather(3, [whole[[5, 6]].tobytes(), whole[7].tobytes()])
        room.gather_all(memory.parts([]))
        assert room.commit().stored == 4
    whole[:] = 0
    with ns.acquire(keys) as lease:
        assert lease.scatter_all(memory.parts([]), 4) == 0
        assert lease.scatter_all(memory.parts([[3, -1, 4], [-1, -1, 1], [2, -1, -1], [-1, 5, 6]])) == 4
    assert np.array_equal(whole[[3, 4, 1, 2, 5, 6]], before[[0, 2, 5, 8, 6, 7]])
    assert not whole[[0, 7, 8]].any()


def test_layers_with_memory_of_their_own(client: Client) -> None:
    layers = [np.random.default_rng(i).integers(0, 2**16, (PAGES, 2, 20), np.uint16) for i in range(5)]
    memory = PagedMemory([PagedLayer(layer, 0, 80, 80) for layer in layers], PAGES)
    keys, before = names(2), [layer.copy() for layer in layers]
    ns = namespace(client, 5 * 80)
    with ns.reserve(keys) as room:
        room.gather_all(memory.parts([[7], [2]]))
        assert room.commit().stored == 2
    out = np.empty((2, 400), np.uint8)
    assert ns.get(keys, out) == 2
    assert out[0].tobytes() == b"".join(layer[7].tobytes() for layer in layers)
    with ns.acquire(keys) as lease:
        assert lease.scatter_all(memory.parts([[0]]), 1) == 1
    for layer, was in zip(layers, before, strict=True):
        assert np.array_equal(layer[0], was[2])
        assert np.array_equal(layer[1:], was[1:])


def test_a_corrupt_block_ends_a_scatter(client: Client) -> None:
    _, memory = two_layers()
    keys = names(3)
    ns = namespace(client, 250)
    with ns.reserve(keys) as room:
        room.gather_all(memory.parts([[0], [1], [2]]))
        view = room._slots.view(1)
        room.commit()
        view[200] ^= 1
    with ns.acquire(keys) as lease:
        assert lease.scatter_all(memory.parts([[3], [4], [5]])) == 1
        assert lease.scatter_all(memory.parts([[5]]), 2) == 1


@pytest.mark.parametrize(
    ("page_ids", "why"),
    [
        ([[0], [PAGES]], "page 9 of 9, 0 to 8, or -1 to skip one"),
        ([[0, -2]], "page -2 of 9"),
        (np.array([[1 << 63]], np.uint64), "page 9223372036854775808 of 9"),
        ([[0, 1], [2]], "blocks of different numbers of pages"),
        ([0, 1], r"page ids of shape \(2,\) and type int64"),
        ([[0, None]], "page ids of shape .* and type object"),
        ([[0.0]], "page ids of shape .* and type float64"),
    ],
)
def test_pages_that_do_not_exist_are_refused(page_ids: Any, why: str) -> None:
    with pytest.raises(MisuseError, match=why.replace(", 0", ".*0")):
        two_layers()[1].parts(page_ids)


@pytest.mark.parametrize(
    ("layer", "pages", "why"),
    [
        (PagedLayer(bytearray(999), 0, 100, 100), 10, "rows in bytes 0 to 1000 of a buffer of 999 bytes"),
        (PagedLayer(bytearray(1000), 1, 100, 100), 10, "rows in bytes 1 to 1001 of a buffer of 1000"),
        (PagedLayer(bytearray(1000), -1, 100, 100), 2, "rows in bytes -1 to 199"),
        (PagedLayer(bytearray(1000), 0, 99, 100), 2, "2 rows of 100 bytes, one each 99 bytes"),
        (PagedLayer(bytearray(1000), 0, 100, 0), 2, "2 rows of 0 bytes"),
        (PagedLayer(np.zeros((20, 100), np.uint8)[:, :50], 0, 100, 50), 20, "C-contiguous"),
        (PagedLayer(object(), 0, 100, 50), 20, "bytes-like"),
    ],
)
def test_layers_without_room_for_their_rows_are_refused(layer: PagedLayer, pages: int, why: str) -> None:
    fine = PagedLayer(bytearray(4000), 0, 100, 100)
    with pytest.raises(MisuseError, match=f"layer 1.*{why}"):
        PagedMemory([fine, layer], pages)


def test_no_layers_and_no_pages_are_refused() -> None:
    with pytest.raises(MisuseError, match="without layers"):
        PagedMemory([], 1)
    with pytest.raises(MisuseError, match="layer 0 has 0 rows of 100 bytes"):
        PagedMemory([PagedLayer(bytearray(1000), 0, 100, 100)], 0)


def test_tables_that_do_not_suit_a_lease_are_refused(client: Client) -> None:
    whole, memory = two_layers()
    keys = names(3)
    ns = namespace(client, 500)
    with ns.reserve(keys) as room:
        with pytest.raises(MisuseError, match="block 1 has 250 bytes instead of 500"):
            room.gather_all(memory.parts([[1], [2]]), 1)
        with pytest.raises(MisuseError, match="block 0 has 0 bytes instead of 500"):
            room.gather_all([[], [bytes(500)]])
        with pytest.raises(MisuseError, match="block 1 has 0 bytes instead of 500"):
            room.gather_all([[bytes(500)], []])
        with pytest.raises(MisuseError, match="with a page of -1"):
            room.gather_all(memory.parts([[1, 2], [3, -1]]))
        with pytest.raises(MisuseError, match="blocks 2 to 4"):
            room.gather_all(memory.parts([[1, 2], [3, 4]]), 2)
        room.gather_all(memory.parts([[1, 2], [3, 4], [5, 6]]))
        assert room.commit().stored == 3
    before = whole.copy()
    locked = PagedMemory([PagedLayer(bytes(2500), 0, 250, 250)], 10)
    with ns.acquire(keys) as lease:
        with pytest.raises(MisuseError, match="block 2 is read-only"):
            lease.scatter_all(locked.parts([[1, 2]]), 2)
        with pytest.raises(MisuseError, match="block 1 is read-only"):
            lease.scatter_all([[bytearray(500)], [bytearray(100), bytes(400)]])
        with pytest.raises(MisuseError, match="block 0 has 750 bytes instead of 500"):
            lease.scatter_all(memory.parts([[1, 2, 3], [1, 2, 3]]))
        with pytest.raises(MisuseError, match="block -1"):
            lease.scatter_all(memory.parts([[1, 2]]), -1)
    assert np.array_equal(whole, before)
    with pytest.raises(MisuseError, match="has ended"):
        lease.scatter_all(memory.parts([[1, 2]]))
