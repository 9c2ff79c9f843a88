"""A daemon with pools of GPU memory and its clients: real processes, a fake cupy (for control flow only)."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, Client, Layout, PagedLayer, PagedMemory, errors
from kvstore.client.gpu import DeviceLease, DeviceReservation
from kvstore.cuda.device import DeviceBuffer, Gpu, uuids
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import HBM_EXTENTS, SLOT_RECORD, Tier
from kvstore.wire import messages as m
from tests.cuda.faking import fake_cuda
from tests.daemons import (
    BLOCK,
    WITH_NVME,
    Peer,
    check_limits,
    eventually,
    got,
    greeted,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
    tier,
)
from tests.tenants import NOBODY, Member, needs_root

POOL = {**WITH_NVME, "hbm": {"limit": "16MiB"}}
HBM, DRAM, NVME = bytes([Tier.HBM]), bytes([Tier.DRAM]), bytes([Tier.NVME])


@pytest.fixture
def control() -> Iterator[Any]:
    with fake_cuda() as control:
        yield control


@contextmanager
def serving(settings: Any = POOL, **more: Any) -> Iterator[tuple[LocalDaemon, Client]]:
    with LocalDaemon(settings, **more) as daemon, Client(daemon.url, deadline_s=20, strict=True) as client:
        eventually(lambda: complete(client))
        yield daemon, client


def complete(client: Client) -> bool:
    """Whether all extents are there that will be."""
    tiers = client.status()["tiers"]
    return all(t["capacity_bytes"] > 0 for t in tiers)


def who_reads(daemon: LocalDaemon, token: str) -> Client:
    """A client of another user: root and the daemon's user get no memory for reading only."""
    daemon.folder.chmod(0o755)
    daemon.socket.chmod(0o666)
    return Member(daemon, NOBODY, deadline_s=20, token=token)


def gpu() -> Gpu:
    return Gpu.open(uuids()[0])


def on_device(raw: Any) -> DeviceBuffer:
    """Bytes in new device memory."""
    raw = np.ascontiguousarray(raw)
    there = gpu().allocate(raw.nbytes)
    stream = gpu().thread_stream()
    stream.copy(there, memoryview(raw).cast("B"))
    stream.wait()
    return there


def bytes_of(buffer: DeviceBuffer) -> bytes:
    out = bytearray(buffer.nbytes)
    stream = buffer.gpu.thread_stream()
    stream.copy(memoryview(out), buffer)
    stream.wait()
    return bytes(out)


def held(lease: Any) -> list[bytes]:
    return [bytes_of(block) for block in lease.blocks]


def stored(client: Client, n: int = 6, layout: Layout | None = None) -> tuple[Any, list[bytes]]:
    ns, keys = client.namespace(layout or new_layout()), names(n)
    assert ns.put(keys, payloads(keys, ns.layout.block_bytes)).stored == n
    return ns, keys


def test_a_prefix_is_served_from_the_pool_from_the_second_time_on(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = stored(client)
        for found in (DRAM, HBM):
            with ns.acquire(keys, device="cuda:0") as lease:
                assert isinstance(lease, DeviceLease)
                assert lease.in_hbm
                assert lease.tiers == found * 6
                assert lease.verify() == 6
                assert held(lease) == [payload(key) for key in keys]
        status = client.status()
        assert status["counters"]["hit_blocks_hbm0"] == 6
        assert tier(status, "hbm0")["blocks"] == 6
        check_limits(status)
        assert status["gpus"] == {"hbm0": uuids()[0]}
        assert eventually(lambda: idle(client.status()))


def test_blocks_come_from_nvme_past_dram(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = stored(client)
        eventually(lambda: tier(client.status(), "nvme")["blocks"] == 6)
        filler = client.namespace(ns.layout.__class__(**{**ns.layout.to_map(), "revision": "filler"}))
        for i in range(12):
            more = names(100, f"filler{i}")
            filler.put(more, payloads(more))
        eventually(lambda: not any(c["tier"] == "dram" for k in keys for c in copies(client, ns, k)))
        with ns.acquire(keys, device=0) as lease:
            assert lease.tiers == NVME * 6
            assert held(lease) == [payload(key) for key in keys]
        assert all({c["tier"] for c in copies(client, ns, key)} == {"nvme", "hbm0"} for key in keys)


def copies(client: Client, ns: Any, key: bytes) -> list[dict[str, Any]]:
    """Those of a key that only one namespace has."""
    [block] = client.explain([key], model=ns.layout.model)
    found: list[dict[str, Any]] = block["copies"]
    return found


def test_blocks_written_on_the_gpu_are_stored_in_the_pool_and_copied_to_nvme(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = client.namespace(new_layout()), names(5)
        result = ns.put(keys, on_device(payloads(keys)))
        assert (result.stored, result.denied) == (5, 0)
        assert tier(client.status(), "hbm0")["blocks"] == 5
        assert tier(client.status(), "dram")["blocks"] == 0
        eventually(lambda: tier(client.status(), "nvme")["blocks"] == 5)
        assert got(ns, keys) == 5, "and whoever reads in DRAM gets it"


def test_get_and_scatter_fill_device_arrays(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = stored(client)
        out = gpu().allocate(6 * BLOCK)
        assert ns.get(keys, out) == 6
        assert bytes_of(out) == payloads(keys).tobytes()
        pages = gpu().allocate(8 * 6 * BLOCK)
        part = BLOCK // 4
        where = [
            [pages.part(at * part, (at + 1) * part) for at in range(40 - 4 * i, 44 - 4 * i)] for i in range(6)
        ]
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.scatter_all(where) == 6
            assert lease.scatter(2, [out.part(0, 100), out.part(100, BLOCK)])
            whole = room_for(6)
            assert lease.copy_into(whole) == 6
            some = gpu().allocate(77)
            lease.read(3, some, offset=33)
        assert np.array_equal(whole, payloads(keys))
        assert bytes_of(some) == payload(keys[3])[33:110]
        assert bytes_of(out)[:BLOCK] == payload(keys[2])
        for i, key in enumerate(keys):
            assert b"".join(bytes_of(each) for each in where[i]) == payload(key)


def test_the_documented_example_works_as_pasted(control: Any) -> None:
    text = (Path(__file__).parents[2] / "docs/python.md").read_text()
    [example] = [e for e in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "cuda:0" in e]
    with serving() as (_, client):
        ns, keys = stored(client)
        target = gpu().allocate(6 * BLOCK)
        pages = [
            [target.part(i * BLOCK, i * BLOCK + 100), target.part(i * BLOCK + 100, (i + 1) * BLOCK)]
            for i in range(6)
        ]
        exec(example, found := {"ns": ns, "keys": keys, "pages": pages, "blocks": on_device(payloads(keys))})
        assert found["good"] == 6
        assert bytes_of(target) == payloads(keys).tobytes()


def test_rooms_are_filled_from_parts_on_the_device(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = client.namespace(new_layout()), names(4)
        there = [on_device(payloads([key])) for key in keys]
        with ns.reserve(keys, device="cuda:0") as room:
            assert isinstance(room, DeviceReservation)
            room.gather(0, [there[0].part(0, 1000), there[0].part(1000, BLOCK)])
            room.fill(1, there[1])
            room.write(2, there[2].part(0, 100))
            room.write(2, there[2].part(100, BLOCK), offset=100)
            gpu().thread_stream().copy(room.blocks[3], there[3])
            gpu().thread_stream().wait()
            room.fill(0, there[0])
            room.fill(1, there[1])
            assert room.commit().stored == 4
        assert got(ns, keys) == 4
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.verify() == 4


def test_without_a_pool_blocks_come_from_dram(control: Any) -> None:
    with serving(WITH_NVME) as (_, client):
        ns, keys = client.namespace(new_layout()), names(6)
        assert ns.put(keys, [on_device(payloads([key])) for key in keys]).stored == 6
        with ns.acquire(keys, device="cuda:0") as lease:
            assert not lease.in_hbm
            assert lease.tiers == DRAM * 6
            assert lease.verify() == 6
            assert held(lease) == [payload(key) for key in keys]
            out = gpu().allocate(6 * BLOCK)
            assert lease.copy_into(out) == 6
        assert bytes_of(out) == payloads(keys).tobytes()
        assert got(ns, keys) == 6


@pytest.mark.parametrize("pool", [True, False])
def test_pages_of_device_memory_are_stored_and_loaded(
    control: Any, monkeypatch: pytest.MonkeyPatch, pool: bool
) -> None:
    """In groups of 2 blocks each way: pages of three layers, of which two share their memory."""
    monkeypatch.setattr("kvstore.client.gpu._STAGED_BYTES", 2 * BLOCK)
    rows, third = 12, BLOCK // 4
    with serving(POOL if pool else WITH_NVME) as (_, client):
        data = noise_pages(rows, 3, third)
        memory = [on_device(data[:, :2]), on_device(data[:, 2])]
        layers = [PagedLayer(memory[0], i * third, 2 * third, third) for i in range(2)]
        paged = PagedMemory([*layers, PagedLayer(memory[1], 0, third, third)], rows)
        assert (paged.gpu, paged.page_bytes) == (gpu(), 3 * third)
        ns, keys = client.namespace(new_layout(6 * third)), names(5)
        with ns.reserve(keys, device="cuda:0") as room:
            room.gather_all(paged.parts(np.arange(10).reshape(5, 2)))
            assert room.commit().stored == 5
        out = room_for(5, 6 * third)
        assert ns.get(keys, out) == 5
        assert np.array_equal(out, data[:10].reshape(5, -1))
        for piece in memory:
            gpu().thread_stream().zero(piece)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.in_hbm is pool
            assert lease.scatter_all(paged.parts([[11, 0], [-1, 1], [2, -1], [5, 4]]), 1) == 4
        expected = np.zeros_like(data)
        expected[[11, 0, 1, 2, 5, 4]] = data[[2, 3, 5, 6, 8, 9]]
        assert bytes_of(memory[0]) == expected[:, :2].tobytes()
        assert bytes_of(memory[1]) == expected[:, 2].tobytes()


def noise_pages(*shape: int) -> Any:
    return np.random.default_rng(8).integers(0, 256, shape, np.uint8)


def test_tables_that_do_not_suit_a_lease_of_the_gpu_are_refused(control: Any) -> None:
    host = PagedMemory([PagedLayer(bytearray(8 * BLOCK), 0, BLOCK, BLOCK)], 8)
    with serving() as (_, client):
        ns, keys = stored(client)
        there = gpu().allocate(8 * BLOCK)
        paged = PagedMemory([PagedLayer(there, 0, BLOCK, BLOCK // 2)], 8)
        with pytest.raises(errors.MisuseError, match=f"layer 1 has 8 rows in bytes 1 to {8 * BLOCK + 1} of"):
            PagedMemory([PagedLayer(there, i, BLOCK, BLOCK) for i in range(2)], 8)
        with pytest.raises(errors.MisuseError, match=f"an array in host memory.*are on {gpu().uuid}"):
            PagedMemory([PagedLayer(memory, 0, 1, 1) for memory in (there, bytearray(9))], 8)
        with ns.acquire(keys, device="cuda:0") as lease:
            with pytest.raises(errors.MisuseError, match=f"in host memory.*the blocks are on {gpu().uuid}"):
                lease.scatter_all(host.parts([[1]]))
            with pytest.raises(
                errors.MisuseError, match=f"block 5 has {BLOCK // 2} bytes instead of {BLOCK}"
            ):
                lease.scatter_all(paged.parts([[1]]), 5)
            with pytest.raises(errors.MisuseError, match="blocks 5 to 7"):
                lease.scatter_all(paged.parts([[1, 2], [3, 4]]), 5)
            with pytest.raises(errors.MisuseError, match=r"out has .* read-only"):
                lease.copy_into(bytes(6 * BLOCK))
        with pytest.raises(errors.MisuseError, match="has ended"):
            lease.verify()
        with ns.acquire(keys) as lease:
            with pytest.raises(errors.MisuseError, match=f"on {gpu().uuid}.*the blocks are in host memory"):
                lease.scatter_all(paged.parts([[1, 2]]))
            with pytest.raises(errors.MisuseError, match=f"on {gpu().uuid}.*the blocks are in host memory"):
                lease.copy_into(there)
        with ns.reserve(names(1, "more"), device="cuda:0") as room:
            with pytest.raises(errors.MisuseError, match="with a page of -1"):
                room.gather_all(paged.parts([[1, -1]]))
            with pytest.raises(errors.MisuseError, match="in host memory"):
                room.fill(0, bytes(BLOCK))


@pytest.mark.parametrize("pool", [True, False])
def test_many_blocks_go_in_groups_that_take_little_device_memory(
    control: Any, monkeypatch: pytest.MonkeyPatch, pool: bool
) -> None:
    monkeypatch.setattr("kvstore.client.gpu._STAGED_BYTES", 4 * BLOCK)
    with serving(POOL if pool else WITH_NVME) as (_, client):
        ns, keys = client.namespace(new_layout()), names(11)
        assert ns.put(keys, on_device(payloads(keys))).stored == 11
        out = gpu().allocate(11 * BLOCK)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.in_hbm is pool
            parts = [
                [out.part(i * BLOCK, i * BLOCK + 5), out.part(i * BLOCK + 5, (i + 1) * BLOCK)]
                for i in range(11)
            ]
            assert lease.scatter_all(parts[2:9], first=2) == 7
            assert bytes_of(out)[2 * BLOCK : 9 * BLOCK] == payloads(keys[2:9]).tobytes()
            assert (lease.verify(), lease.copy_into(out), lease.copy_into(out, verify=False)) == (11, 11, 11)
            assert bytes_of(out) == payloads(keys).tobytes()
            whole = lease.blocks
            assert [bytes_of(block) for block in whole] == [payload(key) for key in keys]
            assert lease.scatter_all(parts[9:], first=9) == 2
            if pool:
                stream = gpu().thread_stream()
                stream.copy(whole[6].part(0, 1), memoryview(bytes([payload(keys[6])[0] ^ 1])))
                stream.wait()
                assert (lease.verify(), lease.scatter_all(parts), lease.scatter_all(parts[5:], 5)) == (
                    6,
                    6,
                    1,
                )


def test_a_gpu_without_memory_for_blocks_of_dram_is_a_miss(control: Any) -> None:
    with serving(WITH_NVME) as (daemon, client), Client(daemon.url, deadline_s=5) as careless:
        ns, keys = stored(client)
        out = gpu().allocate(6 * BLOCK)
        rest = gpu().allocate(gpu().memory()[0])
        relaxed = careless.namespace(ns.layout)
        with relaxed.acquire(keys, device="cuda:0") as lease:
            assert (len(lease), lease.verify(), lease.copy_into(out)) == (6, 0, 0)
        assert relaxed.get(keys, out) == 0
        result = relaxed.put(names(2, "new"), out.part(0, 2 * BLOCK))
        assert (result.stored, result.denied) == (0, 2)
        assert "has no" in result.why
        gpu().free(rest)
        assert relaxed.get(keys, out) == 6
        assert eventually(lambda: idle(client.status()))


def test_a_prefix_larger_than_the_pool_is_served_from_dram(control: Any) -> None:
    with serving({**WITH_NVME, "hbm": {"limit": "2MiB"}}) as (_, client):
        ns, keys = stored(client, 200)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert (len(lease), lease.in_hbm) == (200, False)
            assert held(lease) == [payload(key) for key in keys]
        with ns.acquire(keys[:20], device="cuda:0") as lease:
            assert (len(lease), lease.in_hbm) == (20, True)


def test_a_wrong_byte_is_found_in_the_pool_and_served_right_by_the_same_call(control: Any) -> None:
    with serving() as (_, client):
        ns, keys = stored(client)
        with ns.acquire(keys, device="cuda:0") as lease:
            stream = gpu().thread_stream()
            stream.copy(lease.blocks[3].part(5, 6), memoryview(bytes([payload(keys[3])[5] ^ 1])))
            stream.wait()
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.verify() == 3
        eventually(lambda: client.status()["counters"].get("quarantined_blocks") == 1)
        with ns.acquire(keys, device="cuda:0") as lease:
            stream.copy(lease.blocks[1].part(5, 6), memoryview(bytes([payload(keys[1])[5] ^ 1])))
            stream.wait()
        out = gpu().allocate(6 * BLOCK)
        assert ns.get(keys, out) == 6
        assert bytes_of(out) == payloads(keys).tobytes()
        assert client.status()["counters"]["quarantined_blocks"] == 2


def test_the_scrubber_looks_at_the_pool(control: Any) -> None:
    with serving({**POOL, "scrub": {"rate": "64MiB"}}) as (_, client):
        ns, keys = stored(client)
        with ns.acquire(keys, device="cuda:0") as lease:
            stream = gpu().thread_stream()
            stream.copy(lease.blocks[3].part(9, 10), memoryview(bytes([payload(keys[3])[9] ^ 1])))
            stream.wait()
        eventually(lambda: client.status()["counters"].get("quarantined_blocks") == 1)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.verify() == 6


def test_where_ipc_does_not_work_clients_use_dram_and_say_so_once(
    control: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as (_, client):
        ns, keys = stored(client)
        monkeypatch.setenv("FAKE_CUDA_IPC", "no")
        for _ in range(3):
            with ns.acquire(keys, device="cuda:0") as lease:
                assert (len(lease), lease.in_hbm, lease.verify()) == (6, False, 6)
        assert ns.put(names(2, "more"), on_device(payloads(names(2, "more")))).stored == 2
        said = [record.message for record in caplog.records if "come from DRAM" in record.message]
        assert len(said) == 1
        assert "CUDA IPC does not work here" in said[0]
        assert eventually(lambda: idle(client.status()))


def test_where_the_daemon_cannot_export_clients_use_dram(
    control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_IPC", "no")
    with serving() as (_, client):
        ns, keys = stored(client)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert (len(lease), lease.in_hbm, lease.verify()) == (6, False, 6)


@pytest.mark.parametrize(
    ("fake", "hbm", "said"),
    [
        ({"driver": "old"}, {"limit": "4MiB"}, "the NVIDIA driver is too old"),
        ({"driver": "none"}, {"limit": "4MiB"}, "there is no NVIDIA driver"),
        ({"gpus": 0}, {"limit": "4MiB"}, "no GPU is visible"),
        ({}, {"limit": "2GiB"}, "hbm.limit is 2GiB, 1GiB of 1GiB are free"),
        ({}, {"limit": "4MiB", "gpus": ["7"]}, "device '7' is no GPU here"),
    ],
)
def test_a_missing_pool_is_reported_and_the_daemon_serves(
    fake: dict[str, Any], hbm: dict[str, Any], said: str
) -> None:
    with fake_cuda(**fake), LocalDaemon({**WITH_NVME, "hbm": hbm}) as daemon:
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            ns, keys = stored(client)
            assert got(ns, keys) == 6
            assert any(said in problem for problem in client.status()["problems"]), client.status()[
                "problems"
            ]
        assert said in log_of(daemon)


def test_without_cupy_the_daemon_says_so_and_serves() -> None:
    with serving({**WITH_NVME, "hbm": {"limit": "4MiB"}}) as (_, client):
        ns, keys = stored(client)
        assert got(ns, keys) == 6
        assert "install kvstore[cuda]" in client.status()["problems"][0]
        with pytest.raises(errors.MisuseError, match=r"install kvstore\[cuda\]"):
            ns.acquire(keys, device=0)


def test_two_gpus_have_a_pool_each() -> None:
    with fake_cuda(gpus=2), serving() as (_, client):
        ns, keys = stored(client)
        first, second = uuids()
        for device in (first, second, second):
            with ns.acquire(keys, device=device) as lease:
                assert lease.in_hbm
                assert {block.gpu.uuid for block in lease.blocks} == {device}
                assert lease.verify() == 6
        status = client.status()
        assert status["gpus"] == {"hbm0": first, "hbm1": second}
        assert [tier(status, name)["blocks"] for name in ("hbm0", "hbm1")] == [6, 6]
        elsewhere = on_device(payloads(keys[:1]))
        with ns.acquire(keys, device=second) as lease, pytest.raises(errors.MisuseError, match=f"on {first}"):
            lease.scatter(0, [elsewhere])
        paged = PagedMemory([PagedLayer(elsewhere, 0, BLOCK, BLOCK)], 1)
        refused = pytest.raises(errors.MisuseError, match=f"on {first}.*the blocks are on {second}")
        with ns.reserve(names(1, "more"), device=second) as room, refused:
            room.gather_all(paged.parts([[0]]))


def test_a_lost_gpu_takes_its_pool_with_it_and_blocks_are_served_from_below(control: Any) -> None:
    with serving() as (daemon, client):
        ns, keys = stored(client)
        uuid = uuids()[0]
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.in_hbm
        more = names(3, "more")
        assert ns.put(more, payloads(more)).stored == 3
        with greeted(daemon, ns.layout) as (peer, number):
            control.lose(0)
            granted = peer.ask(m.Acquire(2, number, 32, b"".join(more), 5.0, 0.0, uuid))
            # What was on its way into the pool: a miss, or asked for again in DRAM.
            places = np.frombuffer(granted.slots, SLOT_RECORD)["place"] >> np.uint64(32)
            assert len(places) in (0, 3)
            assert (places < HBM_EXTENTS).all()
            eventually(lambda: any("is lost" in problem for problem in client.status()["problems"]))
            granted = peer.ask(m.Acquire(3, number, 32, b"".join(keys), 5.0, 0.0, uuid))
            places = np.frombuffer(granted.slots, SLOT_RECORD)["place"] >> np.uint64(32)
            assert len(places) == 6
            assert (places < HBM_EXTENTS).all()
        eventually(lambda: "hbm0" not in [t["name"] for t in client.status()["tiers"]])
        assert got(ns, keys) == 6
        assert got(ns, more) == 3
        assert eventually(lambda: idle(client.status()))


CODE = """
import sys
from kvstore import Client, Layout
url, layout = sys.argv[1], Layout(**eval(sys.argv[2]))
keys = [bytes.fromhex(key) for key in sys.argv[4].split(",")]
client = Client(url, deadline_s=5)
with client.namespace(layout).acquire(keys, device={device!r}) as lease:
    print(eval(sys.argv[3]), flush=True)
    {then}
"""


@contextmanager
def process(
    daemon: LocalDaemon, layout: Layout, keys: list[bytes], what: str, then: str
) -> Iterator[subprocess.Popen[str]]:
    code = CODE.format(device="cuda:0", then=then)
    args = [daemon.url, repr(layout.to_map()), what, ",".join(key.hex() for key in keys)]
    with subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


OWNER, READER, OTHER = (new_token(bytes([n]) * 32) for n in (1, 2, 3))
TENANTS = {
    "a": {
        "hbm": {"limit": "6MiB"},
        "tokens": [
            {"hash": f"sha256:{hash_of(OWNER).hex()}", "role": "admin"},
            {"hash": f"sha256:{hash_of(READER).hex()}", "role": "read"},
        ],
    },
    "b": {"hbm": {"floor": "4MiB"}, "tokens": [{"hash": f"sha256:{hash_of(OTHER).hex()}"}]},
}


@needs_root
def test_a_pool_has_quotas_and_other_tenants_cannot_map_it(control: Any) -> None:
    with (
        serving({**POOL, "tenants": TENANTS}) as (daemon, operator),
        Client(daemon.url, OWNER, deadline_s=20, strict=True) as owner,
        who_reads(daemon, READER) as reader,
        who_reads(daemon, OTHER) as other,
    ):
        ns, keys = stored(owner, 8)
        assert ns.publish(["b"])
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.in_hbm
            extent = int(np.frombuffer(lease._slots.records, SLOT_RECORD)["place"][0]) >> 32
        with reader.namespace(ns.layout).acquire(keys, device="cuda:0") as lease:
            assert (lease.in_hbm, lease.verify()) == (False, 8), "who maps a pool can write to it"
        with other.namespace(ns.layout, "a").acquire(keys, device="cuda:0") as lease:
            assert (lease.in_hbm, lease.verify()) == (False, 8), "what others publish comes from DRAM"
        with Peer(daemon.socket) as peer:
            peer.ask(m.Hello(m.MAGIC, m.VERSION, OTHER))
            refused = peer.ask(m.Map(5, extent, True))
            assert refused == m.Denied(5, f"there is no extent {extent}", "")
        for i in range(40):
            more = names(20, f"a{i}")
            assert ns.put(more, on_device(payloads(more))).denied == 0
        parts = {t["name"]: t for t in operator.status()["tiers"]}
        mine = {t["name"]: tier(t, "hbm0") for t in operator.status()["tenants"]}
        assert mine["a"]["used_bytes"] <= mine["a"]["limit_bytes"] == 6 << 20
        assert mine["b"]["floor_bytes"] == 4 << 20
        assert parts["hbm0"]["used_bytes"] <= 6 << 20
        theirs = other.namespace(new_layout())
        assert theirs.put(keys, on_device(payloads(keys))).stored == 8
        with theirs.acquire(keys, device="cuda:0") as lease:
            assert (lease.in_hbm, lease.verify()) == (True, 8), "its floor was kept"


def test_a_pool_is_resized_as_it_runs_but_not_from_under_a_process_that_maps_it(control: Any) -> None:
    with serving() as (daemon, client):
        ns, keys = stored(client)

        def resized(mib: int) -> None:
            client.control("change", patch={"hbm": {"limit": f"{mib}MiB"}})

        def capacity() -> int:
            return int(tier(client.status(), "hbm0")["capacity_bytes"]) >> 20

        eventually(lambda: capacity() == 16)
        resized(6)
        eventually(lambda: capacity() == 6)
        many = names(300, "many")
        assert ns.put(many, payloads(many)).stored == 300
        then = "lease.release(); print(1, flush=True); import time; time.sleep(60)"
        with process(daemon, ns.layout, many, "lease.in_hbm, len(lease)", then) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "(True, 300)\n"
            assert other.stdout.readline() == "1\n"
            before = control.used_bytes()
            resized(2)
            eventually(lambda: capacity() == 2)
            time.sleep(0.7)
            assert control.used_bytes() == before, "what a process maps is not freed"
            other.kill()
            other.wait()
        eventually(lambda: control.used_bytes() == before - (4 << 20))
        resized(8)
        eventually(lambda: capacity() == 8)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.verify() == 6
        with pytest.raises(errors.DeniedError, match="does not come or go while the daemon runs"):
            client.control("change", patch={"hbm": {"limit": 0}})


def test_two_processes_share_one_extent_and_one_may_be_killed(control: Any) -> None:
    with serving() as (daemon, client):
        ns, keys = stored(client)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert lease.verify() == 6
        with process(
            daemon, ns.layout, keys, "lease.in_hbm, lease.verify()", "import time; time.sleep(60)"
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "(True, 6)\n"
            assert client.status()["leases"] == 1
            other.send_signal(signal.SIGKILL)
            other.wait()
        eventually(lambda: client.status()["leases"] == 0)
        with ns.acquire(keys, device="cuda:0") as lease:
            assert (lease.in_hbm, lease.verify()) == (True, 6)
        assert client.status()["counters"]["hit_blocks_hbm0"] == 12


def test_a_daemon_that_is_killed_is_a_miss_and_the_next_one_has_a_new_pool(control: Any) -> None:
    with serving(supervised=True) as (daemon, client):
        ns, keys = stored(client)
        lease = ns.acquire(keys, device="cuda:0")
        assert lease.verify() == 6
        mapped = list(lease.blocks)
        daemon.kill()
        assert [*map(bytes_of, mapped)] == [payload(key) for key in keys], "who has it mapped keeps its pages"
        lease.release()
        eventually(lambda: alive(client), 30)
        eventually(lambda: complete(client))
        with ns.acquire(keys, device="cuda:0") as again:
            assert (again.in_hbm, again.verify()) == (True, 6)
            assert HBM not in again.tiers, "nothing of a pool outlives the daemon"


def alive(client: Client) -> bool:
    try:
        client.ping()
    except errors.UnavailableError:
        return False
    return True


def test_blocks_that_only_the_pool_has_are_written_to_nvme_at_a_stop(control: Any) -> None:
    settings = {**POOL, "nvme": {**WITH_NVME["nvme"], "write_policy": "on_evict"}}
    with serving(settings) as (daemon, client):
        ns, keys = client.namespace(new_layout()), names(5)
        assert ns.put(keys, on_device(payloads(keys))).stored == 5
        assert tier(client.status(), "nvme")["blocks"] == 0
        daemon.stop()
        daemon.start()
        assert got(ns, keys) == 5


def test_without_nvme_blocks_evicted_from_the_pool_stay_in_dram(control: Any) -> None:
    small = {"dram": {"limit": "16MiB", "huge_pages": False}, "hbm": {"limit": "2MiB"}, "scrub": {"rate": 0}}
    with serving({**small, "policy": {"eviction": "lru"}}) as (_, client):
        ns = client.namespace(new_layout())
        chains = [names(20, f"chain{i}") for i in range(12)]
        for keys in chains:
            result = ns.put(keys, on_device(payloads(keys)))
            assert (result.stored, result.denied) == (20, 0)
        assert [got(ns, keys) for keys in chains] == [20] * 12


def test_the_asyncio_client_reads_and_writes_on_the_device(control: Any) -> None:
    async def main(url: str) -> None:
        async with AsyncClient(url, deadline_s=20, strict=True) as client:
            ns, keys = client.namespace(new_layout()), names(4)
            assert (await ns.put(keys, on_device(payloads(keys)))).stored == 4
            out = gpu().allocate(4 * BLOCK)
            assert await ns.get(keys, out) == 4
            assert bytes_of(out) == payloads(keys).tobytes()
            with await ns.acquire(keys, device="cuda:0") as lease:
                assert (lease.in_hbm, lease.verify()) == (True, 4)
            more = names(2, "more")
            with await ns.reserve(more, device="cuda:0") as room:
                room.gather_all([[on_device(payloads([key]))] for key in more])
                assert (await room.commit()).stored == 2
            assert await ns.prefetch(keys, device=0) == 4

    with serving() as (daemon, _):
        asyncio.run(main(daemon.url))


@pytest.mark.parametrize("device", ["cuda:9", "GPU-nothing", 3, ""])
def test_a_device_that_is_not_there_is_named(control: Any, device: Any) -> None:
    with serving() as (_, client):
        ns, keys = client.namespace(new_layout()), names(2)
        with pytest.raises(errors.MisuseError, match=f"device {device!r} is"):
            ns.acquire(keys, device=device)
        with pytest.raises(errors.MisuseError, match="bytes instead of"):
            ns.get(keys, gpu().allocate(100))
        with pytest.raises(errors.MisuseError, match="in several places"):
            ns.put(keys, [on_device(payloads(keys[:1])), payload(keys[1])])
