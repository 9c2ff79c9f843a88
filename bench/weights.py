"""weights: the digest that names a model's weights, compared with one plain read of the same files.

A plain read on one thread is the least that an engine does to load a model. The engine has read the files
before the connector names them, so `in-memory` is what the first digest on a node takes: a share
`of_read_from_disk` of that read. Later ones take `remembered`. `vllm-start` measures the start of an engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.harness import GIB, MIB, Bench, Result, Target, expect
from kvstore import files_digest
from kvstore.weights.files import ModelFile, model_files
from kvstore.weights.pieces import digest_each

_READ_BYTES = 4 * MIB
_SETTLED_S = 11.0  # younger files are not remembered
_LOGGER = logging.getLogger("bench.weights")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Files like the shards of a model, and the time after which they are remembered."""

    files: int = 2
    file_bytes: int = GIB
    settled_s: float = _SETTLED_S


SMOKE = Sizes(2, MIB, 0.0)


def run(bench: Bench) -> Iterator[Result]:
    """Yields three rows."""
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder, cache_in(folder / ".cache"):
        _write(bench, folder, z)
        files = list(model_files(folder).values())

        def digest() -> None:
            expect(len(digest_each(files, _LOGGER)), z.files, "files digested")

        def read() -> None:
            expect(sum(map(_read, files)), z.files * z.file_bytes, "bytes read")

        def rate(work: Callable[[], None]) -> float:
            return z.files * z.file_bytes / _seconds(work) / GIB

        def cold(work: Callable[[], None]) -> float:
            drop_from_page_cache(files)
            return rate(work)

        rounds = bench.interleave("from disk", (lambda _: cold(digest), lambda _: cold(read)), 0.4)
        yield rounds.result("weights/from-disk", "GiB/s", Target(">=", 0.9))
        from_disk = rounds.median(1)
        read()
        rounds = bench.interleave("in memory", (lambda _: rate(digest), lambda _: rate(read)), 0.4)
        yield rounds.result("weights/in-memory", "GiB/s", of_read_from_disk=from_disk / rounds.median(0))
        wait_until_old(bench, files, z.settled_s)
        named = files_digest(folder)
        again = [lambda _: 1e3 * _seconds(lambda: files_digest(folder)), lambda _: 1e3 * _seconds(digest)]
        rounds = bench.interleave("remembered", again, 0.2)
        expect(files_digest(folder), named, "the same name")
        yield rounds.result("weights/remembered", "ms", Target("<=", 0.1))


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Digests are remembered in this folder, not in the user's."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _write(bench: Bench, folder: Path, z: Sizes) -> None:
    dice = np.random.default_rng(1)
    for number in range(z.files):
        bench.doing("writing", number / z.files)
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            for _ in range(z.file_bytes // MIB):
                file.write(dice.bytes(MIB))


def _read(each: ModelFile) -> int:
    buffer, done = bytearray(_READ_BYTES), 0
    with each.path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            done += n
    return done


def drop_from_page_cache(files: list[ModelFile]) -> None:
    """Removes the files from the page cache."""
    for each in files:
        with each.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_until_old(bench: Bench, files: list[ModelFile], settled_s: float = _SETTLED_S) -> None:
    """Returns when digests of the files are remembered."""
    newest_s = max(each.state.ctime_ns for each in files) / 1e9
    while (left_s := newest_s + settled_s - time.time()) > 0:
        bench.doing("waiting until the files are old enough")
        time.sleep(left_s)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
