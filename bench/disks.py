"""References for disks: direct I/O of whole blocks at random offsets of a file that was written once before.

The memory that is read into or written from determines up to a third of the speed. There are three
references:

    fio              libaio with a queue depth of four and small pages
    fio-huge-pages   the same with huge pages; its few buffers stay in the CPU cache
    same-memory      preadv and pwritev by four threads, over as many huge pages as the DRAM tier has

Without fio, only `same-memory` is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from bench.harness import GIB, MIB, Bench, NotDone, Result, Sample, Target
from kvstore.arena import Extent
from kvstore.errors import TierError

DEPTH = 4


class Disk(Protocol):
    """A reference. `move` transfers random blocks and returns GiB/s."""

    name: str

    def move(self, nbytes: int, write: bool) -> float:
        """Transfers blocks at random offsets with a full queue. Returns GiB/s."""


def compare(
    bench: Bench,
    name: str,
    ours: Sample,
    disks: Sequence[Disk],
    sample_bytes: int,
    write: bool,
    targets: dict[str, Target],
) -> Iterator[Result]:
    """Yields one row per reference, all from the same rounds."""
    samples = [lambda _, disk=disk: disk.move(sample_bytes, write) for disk in disks]
    rounds = bench.interleave(name, (ours, *samples))
    for i, disk in enumerate(disks, 1):
        yield rounds.result(f"{name}/{disk.name}", "GiB/s", targets.get(disk.name), i)


@contextmanager
def reference_disks(
    folder: Path, block_bytes: int, file_bytes: int, memory_bytes: int
) -> Iterator[list[Disk]]:
    """Yields the references, on a separate file that is written in full first."""
    path = folder / "reference"
    memory = _memory(memory_bytes)
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, file_bytes)
        raw = _Raw(path, block_bytes, file_bytes, memory)
        raw.fill()
        disks: list[Disk] = [raw]
        if shutil.which("fio"):
            # fio truncates the file that it maps.
            small = _memory(64 * MIB)
            huge = f"--mem=mmapshared:/proc/{os.getpid()}/fd/{small.fd}"
            fios = [_Fio("fio", path, block_bytes, file_bytes, "--mem=malloc")]
            fios.append(_Fio("fio-huge-pages", path, block_bytes, file_bytes, huge))
            disks = [*(fio for fio in fios if fio.works()), raw]
        yield disks
    finally:
        path.unlink(missing_ok=True)


def _memory(nbytes: int) -> Extent:
    """Returns a memfd of huge pages like those of the DRAM tier, of unsealed size."""
    fd = os.memfd_create("kvstore-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    extent = Extent(fd, nbytes)
    extent.populate(huge=True)
    return extent


class _Fio:
    def __init__(self, name: str, path: Path, block_bytes: int, file_bytes: int, memory: str) -> None:
        self.name = name
        self._block_bytes = block_bytes
        self._command = [
            "fio",
            "--name=reference",
            f"--filename={path}",
            f"--size={file_bytes}",
            f"--bs={block_bytes}",
            "--ioengine=libaio",
            f"--iodepth={DEPTH}",
            "--direct=1",
            "--norandommap",
            "--randrepeat=0",
            "--thread",
            "--allow_file_create=0",
            "--output-format=json",
            f"--iomem_align={2 * MIB}",
            memory,
        ]

    def works(self) -> bool:
        """Returns whether this fio has the engine and accepts the memory."""
        try:
            self.move(16 * self._block_bytes, write=False)
        except TierError:
            return False
        return True

    def move(self, nbytes: int, write: bool) -> float:
        """See Disk. Returns the figure that fio reports, without the time of its start."""
        kind = "write" if write else "read"
        command = [*self._command, f"--rw=rand{kind}", f"--io_size={nbytes}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TierError(f"fio failed: {(done.stderr or done.stdout)[-500:]}")
        # fio may print notes before the JSON.
        report = json.loads(done.stdout[done.stdout.index("{") :])
        job = report["jobs"][0][kind]
        if job["io_bytes"] < nbytes:
            raise NotDone(f"fio moved {job['io_bytes']} bytes of {nbytes}")
        return float(job["bw_bytes"]) / GIB


class _Raw:
    name = "same-memory"

    def __init__(self, path: Path, block_bytes: int, file_bytes: int, memory: Extent) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._blocks = file_bytes // block_bytes
        slots = range(0, memory.nbytes - block_bytes + 1, block_bytes)
        self._slots = itertools.cycle([memory.view[at : at + block_bytes] for at in slots])

    def fill(self) -> None:
        """Writes every block once, so that no measured write meets an unwritten file system extent."""
        self._move(list(range(self._blocks)), write=True)

    def move(self, nbytes: int, write: bool) -> float:
        """See Disk."""
        return self._move(random.choices(range(self._blocks), k=nbytes // self._block_bytes), write)

    def _move(self, blocks: list[int], write: bool) -> float:
        fd = os.open(self._path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        call: Callable[..., int] = os.pwritev if write else os.preadv
        size = self._block_bytes
        todo = zip(blocks, self._slots, strict=False)
        errors: list[Exception] = []

        def work() -> None:
            try:
                for block, slot in todo:
                    if call(fd, (slot,), block * size) != size:
                        raise TierError(f"block {block} of {self._path} did not move whole")
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(DEPTH)]
        start = time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os.close(fd)
        if errors:
            raise errors[0]
        return len(blocks) * size / (time.perf_counter() - start) / GIB
