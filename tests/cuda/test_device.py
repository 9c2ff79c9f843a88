"""The device room on the fake: what is asked of CUDA, in which order, and what is made of its errors."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu, resolve, uuids, why_not
from kvstore.errors import MisuseError
from tests.cuda.faking import ROOT, fake_cuda

MIB = 1 << 20
UUID = "GPU-01010101-0101-0101-0101-010101010101"
SECOND = UUID.replace("01", "02")


@pytest.fixture
def control() -> Iterator[Any]:
    with fake_cuda(gpus=2, each_bytes=64 * MIB) as made:
        yield made


@pytest.fixture
def gpu(control: Any) -> Gpu:
    return Gpu.open(UUID)


def filled(gpu: Gpu, content: bytes) -> DeviceBuffer:
    buffer, stream = gpu.allocate(len(content)), gpu.stream()
    stream.copy(buffer, memoryview(content))
    stream.wait()
    return buffer


def held(buffer: DeviceBuffer) -> bytes:
    out, stream = bytearray(buffer.nbytes), buffer.gpu.stream()
    stream.copy(memoryview(out), buffer)
    stream.wait()
    return bytes(out)


class TestWhatThereIs:
    def test_a_machine_with_all_of_it(self, control: Any) -> None:
        assert why_not() == ""
        assert uuids() == [UUID, SECOND]

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"driver": "none"}, r"no NVIDIA driver \(libcuda"),
            ({"driver": "old"}, r"driver is too old: it is for CUDA 12\.2, cupy for 13\.0"),
            ({"gpus": 0}, r"no GPU is visible \(CUDA_VISIBLE_DEVICES"),
        ],
    )
    def test_a_missing_part_is_named(self, settings: dict[str, Any], words: str) -> None:
        with fake_cuda(**settings):
            with pytest.raises(CudaError):
                uuids()
            assert __import__("re").search(words, why_not())

    def test_no_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert "cupy" in why_not()
        assert "kvstore[cuda]" in why_not()

    def test_half_a_package(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.13: no such file')")
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert "libcudart" in why_not()

    @pytest.mark.parametrize("device", [0, "0", "cuda:0", UUID, UUID.upper(), "GPU-01", "gpu-0101"])
    def test_every_way_to_name_one(self, control: Any, device: int | str) -> None:
        assert resolve(device) == UUID

    @pytest.mark.parametrize("device", [2, "7", "cuda:2", "GPU-03", "", "x", -1, "cuda:", "cpu"])
    def test_an_unknown_gpu_is_refused_with_a_list(self, control: Any, device: int | str) -> None:
        with pytest.raises(MisuseError, match=f"device {device!r} is no GPU here.*{UUID}, {SECOND}"):
            resolve(device)

    @pytest.mark.parametrize("device", [0, "cuda:0", UUID, "GPU-01"])
    def test_cuda_is_asked_for_a_name_once(
        self, control: Any, monkeypatch: pytest.MonkeyPatch, device: int | str
    ) -> None:
        """Each acquire and reservation names its GPU, and listing the GPUs takes 10 ms."""
        first = Gpu.named(device)
        monkeypatch.setattr("kvstore.cuda.device_ids.uuids", list)
        monkeypatch.setattr("kvstore.cuda.device.uuids", list)
        assert Gpu.named(device) is first is Gpu.open(UUID)

    def test_a_prefix_of_two_names_neither(self, control: Any) -> None:
        with pytest.raises(MisuseError, match="more than one"):
            resolve("GPU-0")

    def test_an_instance_has_the_name_that_made_it_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "MIG-8f3c9d1e-0000-1111-2222-333344445555"
        with fake_cuda(gpus=1):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
            assert uuids() == [name]
            assert Gpu.open(resolve("MIG-8f")).ordinal == 0

    @pytest.mark.parametrize("short", [True, False])
    def test_nvml_knows_instances(self, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
        name = UUID.replace("GPU", "MIG")
        monkeypatch.setitem(sys.modules, "pynvml", Nvml([name, "MIG-77"]))
        with fake_cuda(gpus=1):
            if short:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0101")
            assert uuids() == [name]

    def test_nvml_of_a_whole_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Nvml([]))
        with fake_cuda(gpus=1):
            assert uuids() == [UUID]

    def test_one_object_a_uuid_and_none_for_others(self, gpu: Gpu) -> None:
        assert Gpu.open(UUID) is gpu
        assert (gpu.ordinal, Gpu.open(SECOND).ordinal) == (0, 1)
        with pytest.raises(MisuseError, match=f"no GPU GPU-03.*{UUID}"):
            Gpu.open("GPU-03")


class Nvml:
    """One GPU with these instances, as pynvml shows it."""

    class NVMLError(Exception):
        pass

    def __init__(self, instances: list[str]) -> None:
        self.instances = instances
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: 1
        self.nvmlDeviceGetHandleByIndex = lambda i: "whole"
        self.nvmlDeviceGetUUID = lambda handle: handle

    def nvmlDeviceGetMaxMigDeviceCount(self, _: str) -> int:
        if not self.instances:
            raise self.NVMLError("not supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _: str, i: int) -> str:
        try:
            return self.instances[i]
        except IndexError:
            raise self.NVMLError("not found") from None


class TestMemory:
    def test_new_memory_is_zeros_and_is_given_back(self, gpu: Gpu, control: Any) -> None:
        assert gpu.memory() == (64 * MIB, 64 * MIB)
        buffer = gpu.allocate(3 * MIB)
        assert held(buffer) == bytes(3 * MIB)
        assert gpu.memory() == (60 * MIB, 64 * MIB), "whole pages"
        gpu.free(buffer)
        assert gpu.memory() == (64 * MIB, 64 * MIB)
        assert control.files() == []

    def test_each_gpu_has_its_own(self, gpu: Gpu) -> None:
        other = Gpu.open(SECOND)
        there = other.allocate(4 * MIB)
        assert (gpu.memory()[0], other.memory()[0]) == (64 * MIB, 60 * MIB)
        threads = [threading.Thread(target=each.allocate, args=(2 * MIB,)) for each in (gpu, other)]
        for thread in threads:
            thread.start()
            thread.join()
        assert (gpu.memory()[0], other.memory()[0]) == (62 * MIB, 58 * MIB)
        other.free(there)

    def test_an_out_of_memory_error_has_sizes_and_a_hint(self, gpu: Gpu) -> None:
        gpu.allocate(60 * MIB)
        with pytest.raises(
            CudaError, match=f"no {6 * MIB} bytes left: {4 * MIB} of {64 * MIB}.*hbm.limit"
        ) as e:
            gpu.allocate(5 * MIB)
        assert (e.value.lost, e.value.code) == (False, 2)

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_no_bytes(self, gpu: Gpu, nbytes: int) -> None:
        with pytest.raises(MisuseError):
            gpu.allocate(nbytes)

    def test_a_part_of_an_allocation_is_not_freed(self, gpu: Gpu) -> None:
        buffer = gpu.allocate(2 * MIB)
        with pytest.raises(CudaError, match="cannot free"):
            gpu.free(buffer.part(16, 32))

    def test_parts(self, gpu: Gpu) -> None:
        whole = filled(gpu, bytes(range(200)))
        part = whole.part(50, 100)
        assert (part.address, part.nbytes, len(part)) == (whole.address + 50, 50, 50)
        assert held(part.part(10, 20)) == bytes(range(60, 70))
        assert held(part[40:99]) == bytes(range(90, 100))
        assert part[:0].nbytes == 0
        assert part[30:20].nbytes == 0
        assert part[1:][1:].root is whole
        for bounds in ((-1, 2), (3, 2), (0, 51)):
            with pytest.raises(MisuseError):
                part.part(*bounds)
        with pytest.raises(MisuseError):
            part.__getitem__(slice(0, 10, 2))

    def test_array_interfaces_of_a_buffer(self, gpu: Gpu) -> None:
        part = filled(gpu, bytes(range(100))).part(10, 30)
        seen = part.__cuda_array_interface__
        assert (seen["data"], seen["shape"], seen["typestr"]) == ((part.address, False), (20,), "|u1")
        assert part.__dlpack_device__() == (2, 0)
        capsule = part.__dlpack__()
        assert "dltensor" in repr(capsule)


class TestStreams:
    def test_copies_every_way(self, gpu: Gpu) -> None:
        data = np.random.default_rng(1).bytes(100_000)
        there, beside, stream = filled(gpu, data), gpu.allocate(100_000), gpu.stream()
        stream.copy(beside, there)
        stream.wait()
        assert held(beside) == data
        back = memoryview(bytearray(50_000))
        stream.copy(back, beside.part(50_000, 100_000))
        assert not any(back), "nothing before it is waited for"
        stream.wait()
        assert back == data[50_000:]

    def test_bad_copies(self, gpu: Gpu) -> None:
        there, stream = gpu.allocate(100), gpu.stream()
        with pytest.raises(ValueError, match="a copy of 99 bytes to 100"):
            stream.copy(there, memoryview(bytes(99)))
        with pytest.raises(MisuseError, match="read-only"):
            stream.copy(memoryview(bytes(100)), there)
        stream.copy(there.part(0, 0), memoryview(b""))
        beyond = DeviceBuffer(there.address, 3 * MIB, gpu)
        with pytest.raises(CudaError, match=r"a copy of 3145728 bytes.*InvalidValue"):
            stream.copy(memoryview(bytearray(3 * MIB)), beyond)

    def test_copied_memory_is_kept_until_the_copy_ends(self, gpu: Gpu) -> None:
        there, stream = gpu.allocate(MIB), gpu.stream()
        for value in range(8):
            stream.copy(there.part(value * 1000, value * 1000 + 1000), memoryview(bytearray([value] * 1000)))
        stream.wait()
        assert held(there.part(0, 8000)) == b"".join(bytes([value] * 1000) for value in range(8))

    def test_zeros(self, gpu: Gpu) -> None:
        there, stream = filled(gpu, b"x" * 100), gpu.stream()
        stream.zero(there.part(10, 90))
        stream.wait()
        assert held(there) == b"x" * 10 + bytes(80) + b"x" * 10

    def test_scratch_is_distinct_until_waited_for_and_then_used_again(self, gpu: Gpu) -> None:
        stream = gpu.stream()
        first, second = stream.scratch(1000), stream.scratch(MIB)
        large = stream.scratch(3 * MIB)
        spans = sorted((b.address, b.address + b.nbytes) for b in (first, second, large))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(start % 256 == 0 for start, _ in spans)
        stream.wait()
        assert stream.scratch(5 * MIB).nbytes == 5 * MIB
        assert gpu.memory()[0] == 58 * MIB, "one piece in the place of two"
        free = gpu.memory()[0]
        for _ in range(10):
            stream.wait()
            stream.scratch(5 * MIB)
        assert gpu.memory()[0] == free
        stream.close()
        assert gpu.memory()[0] == 64 * MIB

    def test_scratch_memory_is_freed_with_its_stream(self, gpu: Gpu) -> None:
        gpu.stream().scratch(MIB)
        assert gpu.memory()[0] == 64 * MIB

    def test_a_thread_has_one_of_its_own(self, gpu: Gpu) -> None:
        seen = [gpu.thread_stream(), gpu.thread_stream()]
        thread = threading.Thread(target=lambda: seen.append(gpu.thread_stream()))
        thread.start()
        thread.join()
        assert seen[0] is seen[1]
        assert seen[0] is not seen[2]

    def test_kernels_get_their_arguments_and_run_in_order(
        self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import cupy  # noqa: PLC0415

        made: list[tuple[str, tuple[str, ...]]] = []
        launched: list[Any] = []

        class Module:
            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                made.append((code, options))

            def get_function(self, name: str) -> Any:
                def kernel(grid: Any, block: Any, args: Any, *, stream: Any) -> None:
                    cupy.cuda.runtime.enqueue(stream.ptr, lambda: launched.append((name, grid, block, args)))

                return kernel

        monkeypatch.setattr(cupy, "RawModule", Module)
        monkeypatch.setattr("kvstore.cuda.device.files", lambda package: Sources())
        there, stream = gpu.allocate(100), gpu.stream()
        stream.launch("one", 7, 32, there, -1, 1 << 63, np.uint32(5))
        stream.launch("two", 1, 1)
        gpu.stream().launch("two", 1, 1)
        assert launched == []
        stream.wait()
        [(name, grid, block, args), second] = launched
        assert (name, grid, block, second[0]) == ("one", (7,), (32,), "two")
        assert [(int(a), a.dtype.name) for a in args] == [
            (there.address, "uint64"), (-1, "int64"), (1 << 63, "uint64"), (5, "uint32"),
        ]  # fmt: skip
        assert made == [("the source", ("-std=c++17",))], "compiled once"

    def test_a_compiler_that_fails_is_a_cuda_error(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        import cupy  # noqa: PLC0415

        def broken(**_: Any) -> None:
            raise OSError("libnvrtc.so.13: cannot open")

        monkeypatch.setattr(cupy, "RawModule", broken)
        monkeypatch.setattr("kvstore.cuda.device.files", lambda package: Sources())
        with pytest.raises(CudaError, match=r"kernels.cu cannot be compiled: libnvrtc"):
            gpu.stream().launch("one", 1, 1)


class Sources:
    def joinpath(self, name: str) -> Sources:
        assert name == "kernels.cu"
        return self

    def read_text(self) -> str:
        return "the source"


class TestPinning:
    def test_pinned_once_and_unpinned(self, gpu: Gpu) -> None:
        view = memoryview(mmap.mmap(-1, MIB))
        assert gpu.register(view)
        assert gpu.register(view), "it is"
        gpu.unregister(view)
        with pytest.raises(CudaError, match="cannot unpin"):
            gpu.unregister(view)

    def test_memory_that_is_mapped_read_only(self, gpu: Gpu, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(MIB))
        with (tmp_path / "file").open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), MIB, prot=mmap.PROT_READ))
        assert not gpu.register(view)
        assert gpu.register(view, readonly=True)

    @pytest.mark.parametrize(("refused", "readonly"), [("no", False), ("no", True), ("writable", True)])
    def test_a_driver_that_refuses_is_no_error(self, refused: str, readonly: bool) -> None:
        with fake_cuda(register=refused):
            gpu = Gpu.open(UUID)
            view = memoryview(bytearray(MIB))
            assert not gpu.register(view, readonly)
            there, stream = gpu.allocate(MIB), gpu.stream()
            stream.copy(there, view)
            stream.wait()


IMPORTER = """
    import sys
    from kvstore.cuda.device import Gpu
    gpu = Gpu.open({uuid!r})
    buffer = gpu.open_export(bytes.fromhex({handle!r}), {nbytes})
    stream = gpu.stream()
    out = bytearray(buffer.nbytes)
    stream.copy(memoryview(out), buffer)
    stream.wait()
    print(bytes(out[:8]).hex(), flush=True)
    stream.copy(buffer.part(0, 4), memoryview(b"back"))
    stream.wait()
    print("written", flush=True)
    sys.stdin.readline()
    gpu.close_export(buffer)
"""

EXPORTER = """
    import sys
    from kvstore.cuda.device import Gpu
    gpu = Gpu.open({uuid!r})
    buffer = gpu.allocate(4 << 20)
    stream = gpu.stream()
    stream.copy(buffer.part(0, 8), memoryview(b"exported"))
    stream.wait()
    print(gpu.export(buffer).hex(), flush=True)
    sys.stdin.readline()
"""


def child(source: str, uuid: str = UUID, **values: Any) -> subprocess.Popen[str]:
    code = textwrap.dedent(source).format(uuid=uuid, **values)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ended(process: subprocess.Popen[str], kill: bool = False) -> int:
    if kill:
        process.kill()
    process.communicate("\n")
    return process.returncode


class TestSharing:
    @pytest.mark.parametrize("kill", [False, True])
    def test_another_process_sees_it_and_may_die(self, gpu: Gpu, control: Any, kill: bool) -> None:
        buffer = filled(gpu, b"exported" * (MIB // 2))
        handle = gpu.export(buffer)
        assert len(handle) == 64
        importer = child(IMPORTER, handle=handle.hex(), nbytes=buffer.nbytes)
        assert bytes.fromhex(line(importer)) == b"exported"
        assert line(importer) == "written"
        assert held(buffer.part(0, 8)) == b"backrted"
        assert gpu.memory()[0] == 60 * MIB, "counted once"
        assert ended(importer, kill) == (-signal.SIGKILL if kill else 0)
        assert held(buffer.part(0, 8)) == b"backrted"
        gpu.free(buffer)
        assert control.files() == []

    def test_an_export_is_readable_after_the_exporter_died(self, gpu: Gpu, control: Any) -> None:
        exporter = child(EXPORTER)
        handle = bytes.fromhex(line(exporter))
        buffer = gpu.open_export(handle, 4 * MIB)
        ended(exporter, kill=True)
        assert held(buffer.part(0, 8)) == b"exported"
        assert control.files() == [], "what a killed process had is free again"
        assert held(buffer.part(0, 8)) == b"exported"
        gpu.close_export(buffer)
        with pytest.raises(CudaError, match=r"IPC does not work here.*if its process still has it"):
            gpu.open_export(handle, 4 * MIB)

    def test_nothing_is_left_by_a_process_that_ends(self, gpu: Gpu, control: Any) -> None:
        exporter = child(EXPORTER)
        line(exporter)
        assert len(control.files()) == 1
        assert ended(exporter) == 0
        assert list(Path("/dev/shm").glob(control.prefix() + "*")) == []

    def test_where_it_does_not_work_that_is_said(self) -> None:
        with fake_cuda(ipc="no"):
            gpu = Gpu.open(UUID)
            for call in (lambda: gpu.export(gpu.allocate(1)), lambda: gpu.open_export(bytes(64), 1)):
                with pytest.raises(
                    CudaError, match=r"CUDA IPC does not work here.*--ipc=host and --pid=host"
                ) as e:
                    call()
                assert not e.value.lost

    @pytest.mark.parametrize(("handle", "nbytes"), [(b"", 10), (bytes(63), 10), (bytes(64), 0)])
    def test_bad_handles(self, gpu: Gpu, handle: bytes, nbytes: int) -> None:
        with pytest.raises(MisuseError):
            gpu.open_export(handle, nbytes)

    def test_a_part_is_not_exported(self, gpu: Gpu) -> None:
        with pytest.raises(MisuseError, match="export the whole"):
            gpu.export(gpu.allocate(4 * MIB).part(0, 2 * MIB))

    def test_only_opened_imports_are_closed(self, gpu: Gpu) -> None:
        with pytest.raises(CudaError, match="cannot close"):
            gpu.close_export(gpu.allocate(1))


class TestLoss:
    @pytest.mark.parametrize("code", [214, 700, 719])
    def test_every_later_call_says_so(self, gpu: Gpu, control: Any, code: int) -> None:
        buffer, stream, view = gpu.allocate(100), gpu.stream(), memoryview(bytearray(100))
        control.lose(0, code)
        calls = [
            gpu.memory, gpu.stream, lambda: gpu.allocate(1), lambda: gpu.free(buffer),
            lambda: gpu.export(buffer), lambda: gpu.open_export(bytes(64), 1), lambda: gpu.register(view),
            lambda: stream.copy(view, buffer), stream.wait, lambda: stream.zero(buffer), gpu.select,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(CudaError, match=f"{UUID}.*no more use") as e:
                call()
            assert (e.value.lost, e.value.code) == (True, code)
        assert Gpu.open(SECOND).memory()[0] == 64 * MIB, "the other one works"

    def test_in_the_middle(self, gpu: Gpu, control: Any) -> None:
        stream, there = gpu.stream(), gpu.allocate(100)
        control.lose(0, after=1)
        stream.copy(there, memoryview(bytes(100)))
        with pytest.raises(CudaError) as e:
            stream.wait()
        assert e.value.lost

    def test_other_errors_are_not_taken_for_cuda_errors(self, gpu: Gpu) -> None:
        def broken() -> None:
            raise RuntimeError("of something else")

        with pytest.raises(RuntimeError, match="of something else"):
            gpu.call("a call", broken)


def test_addresses_are_of_the_memory_itself() -> None:
    from kvstore.cuda.device import address_of  # noqa: PLC0415

    memory = ctypes.create_string_buffer(100)
    assert address_of(memoryview(memory)) == ctypes.addressof(memory)
    assert address_of(memoryview(memory).toreadonly()[10:]) == ctypes.addressof(memory) + 10
