"""The engine over kvikio, held to the same contract as every engine, with a fake libcuda on any machine.

The fake answers all calls but one with an error, so this is kvikio's POSIX path: what a GPU does is not seen.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.cuda.device import Gpu, uuids
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.base import BlockIO, IOEngine
from kvstore.types import ALIGN
from tests.cuda.faking import fake_cuda
from tests.daemons import WITH_NVME, eventually, got, idle, names, new_layout, payloads
from tests.tiers.test_io_engine import IOEngineContract, aligned, noise, run

SOURCE = Path(__file__).with_name("libcuda.c")


@pytest.fixture(scope="session", autouse=True)
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake, made and loaded, unless this machine has a driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return Path("libcuda.so.1")
    except OSError:
        pass
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


class TestKvikio(IOEngineContract):
    def make(self) -> IOEngine:
        from kvstore.tiers.nvme.io.kvikio_engine import KvikioEngine  # noqa: PLC0415

        return KvikioEngine()


@pytest.fixture
def engine() -> Iterator[IOEngine]:
    from kvstore.tiers.nvme.io.engines import best_engine  # noqa: PLC0415

    made = best_engine(2)
    assert made.name == "kvikio"
    yield made
    made.close()


def test_released_files_are_closed_and_their_numbers_reused(engine: IOEngine, tmp_path: Path) -> None:
    for i, name in enumerate(("one", "two")):
        fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        assert run(engine, [BlockIO(fd, 0, aligned(noise(ALIGN, i)), True)]) == [None]
        links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _there(n)]
        assert links.count(str(tmp_path / name)) > 1
        engine.release(fd)
        links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _there(n)]
        assert links.count(str(tmp_path / name)) == 1
        os.close(fd)
    assert [(tmp_path / name).read_bytes() for name in ("one", "two")] == [noise(ALIGN, 0), noise(ALIGN, 1)]
    engine.release(10_000)


def test_gpu_memory_needs_no_bounce_buffer(engine: IOEngine, tmp_path: Path) -> None:
    """The fake's device memory is host memory to kvikio: what is seen is that it takes such buffers."""
    assert engine.device_memory
    with fake_cuda(each_bytes=64 << 20):
        gpu = Gpu.open(uuids()[0])
        blocks, size = [noise(3 * ALIGN, i) for i in range(8)], 3 * ALIGN
        source, target = gpu.allocate(8 * size), gpu.allocate(8 * size)
        stream = gpu.stream()
        stream.copy(source, memoryview(b"".join(blocks)))
        stream.wait()
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        engine.register(source)
        places = [slice(i * size, (i + 1) * size) for i in range(8)]
        ios = [BlockIO(fd, p.start, source[p], True) for p in places]
        assert run(engine, ios) == [None] * 8
        assert (tmp_path / "file").read_bytes() == b"".join(blocks)
        backwards = [
            BlockIO(fd, p.start, target[q], False) for p, q in zip(places, places[::-1], strict=True)
        ]
        assert run(engine, backwards) == [None] * 8
        out = memoryview(bytearray(8 * size))
        stream.copy(out, target)
        stream.wait()
        assert out == b"".join(blocks[::-1])
        assert run(engine, [BlockIO(fd, 9 * size, target[places[0]], False)]) == [errno.EIO]
        engine.unregister(source)
        engine.release(fd)
        os.close(fd)


def _there(n: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{n}")


def test_a_full_disk_has_its_errno(engine: IOEngine) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    [outcome] = run(engine, [BlockIO(fd, 0, aligned(ALIGN), True)])
    assert outcome == errno.ENOSPC
    engine.release(fd)
    os.close(fd)


def test_a_daemon_selects_the_engine_and_loses_no_blocks(
    libcuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(libcuda))
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        assert client.status()["nvme_io"].startswith("kvikio")
        layout, keys = new_layout(), names(1600)
        ns = client.namespace(layout)
        for at in range(0, 1600, 100):
            ns.put(keys[at : at + 100], payloads(keys[at : at + 100]))
        eventually(lambda: idle(client.status()))
        daemon.kill()
        monkeypatch.delenv("LD_PRELOAD")
        daemon.start()
        assert client.status()["nvme_io"].startswith("posix"), "each reads what the other wrote"
        ns = client.namespace(layout)
        assert sum(got(ns, keys[at : at + 100]) for at in range(0, 1600, 100)) == 1600
