"""A tier on real files for tests of what is encrypted in them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.core.events import OK
from kvstore.tiers.base import Owner
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.recovery import Recovered
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ENCRYPTION_BYTES, Layout, slot_bytes
from tests.tiers.nvme.at_once import make_extents

MIB = 1 << 20
BLOCK = 8190  # sealed, it takes a page more
SEALED_SLOT = slot_bytes(BLOCK + ENCRYPTION_BYTES)
WAIT_S = 30.0
MASTER = MasterKey("the test's key", bytes(range(32)))
OTHER_MASTER = MasterKey("another key", bytes(32))
Place = tuple[int, int]


def payload(key: bytes) -> bytes:
    """What block `key` holds: a phrase that can be found wherever it is in plain."""
    return (phrase(key) * BLOCK)[:BLOCK]


def phrase(key: bytes) -> bytes:
    return b"the plain text of block " + key + b"; "


class Folder:
    """Namespaces 1 and 2 of `team` and 3 of `other`, in extents 0, 1 and 2. Every call waits for its end."""

    TENANTS = {1: "team", 2: "team", 3: "other"}

    def __init__(self, path: Path, master: MasterKey | None, encrypt: Mapping[str, bool]) -> None:
        self.path = path
        self.tier = NvmeTier.open(path, 4 * MIB, MIB, PosixEngine(2), master, encrypt)
        try:
            self.found: Recovered = self.tier.load()
            make_extents(self.tier)
            self.fingerprints = {}
            for number, tenant in self.TENANTS.items():
                layout = Layout(model=f"model {number}", block_bytes=BLOCK)
                self.fingerprints[number] = layout.fingerprint(tenant)
                row = Namespace(tenant, layout.to_map(), self.fingerprints[number])
                self.tier.put_namespace(number, row)
                self.tier.format(number - 1, self.slot_bytes(number), Owner(tenant))
        except BaseException:
            self.tier.close()
            raise

    def slot_bytes(self, number: int) -> int:
        return slot_bytes(BLOCK + ENCRYPTION_BYTES * self.tier.keys.encrypts(self.TENANTS[number]))

    def identity(self, number: int, key: bytes) -> BlockIds:
        checksum = arena.checksum(payload(key), arena.seed(self.fingerprints[number], key, BLOCK))
        words = np.frombuffer(key.ljust(64, b"\0"), np.uint64).reshape(1, 8)
        size, space = np.array([len(key)], np.uint8), np.array([number], np.uint16)
        return BlockIds(space, words, size, np.array([checksum], np.uint64))

    def copy(self, number: int, key: bytes, index: int) -> Copy:
        place = where((number - 1, index))
        one = np.ones(1, np.uint32)
        return Copy(1, 0, 1, self.identity(number, key), [b""], place, place, one, False, None)

    def write(self, number: int, key: bytes, index: int = 0, data: bytes = b"") -> int:
        """The outcome of writing a block, whose slot holds `data` instead of what its checksum says."""
        slot = memoryview(bytearray(slot_bytes(BLOCK)))
        slot[:BLOCK] = data or payload(key)
        ended = _Ended()
        self.tier.writer.write(self.copy(number, key, index), [aligned(bytes(slot))], {number: BLOCK}, ended)
        return ended.result()

    def read(self, number: int, key: bytes, index: int = 0) -> int:
        """The outcome of reading a block; OK only if its bytes came with it."""
        slot, ended = aligned(bytes(slot_bytes(BLOCK))), _Ended()
        copy = self.copy(number, key, index)
        self.tier.reader.read(copy, [slot], self.fingerprints, {number: BLOCK}, ended)
        outcome = ended.result()
        assert outcome != OK or slot[:BLOCK] == payload(key)
        return outcome

    def slab(self, number: int) -> Path:
        return self.path / "slabs" / f"{number - 1:06d}.slab"

    def restored(self) -> list[tuple[int, bytes]]:
        """Namespace and key of every block that came back at the start."""
        blocks = self.found.restore
        keys = [k.tobytes()[:n] for k, n in zip(blocks.keys, blocks.key_bytes.tolist(), strict=True)]
        return sorted(zip(blocks.namespace.tolist(), keys, strict=True))


class _Ended:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._results: list[int] = []

    def __call__(self, results: np.ndarray) -> None:
        self._results = results.tolist()
        self._event.set()

    def result(self) -> int:
        assert self._event.wait(WAIT_S), "it never ended"
        [outcome] = self._results
        return outcome


@contextmanager
def opened(
    path: Path, master: MasterKey | None = MASTER, encrypt: Mapping[str, bool] | None = None
) -> Iterator[Folder]:
    """The folder with `team` encrypted, unless told otherwise."""
    folder = Folder(path, master, {"team": True, "other": False} if encrypt is None else encrypt)
    try:
        yield folder
    finally:
        folder.tier.close()


def where(*places: Place) -> Where:
    return Where(np.array([e << 32 | i for e, i in places], np.uint64))


def aligned(data: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, len(data)))
    memory[:] = data
    return memory


def files(path: Path) -> dict[str, bytes]:
    """Every file of a folder, without the sparse tables that LMDB keeps for readers."""
    every = (p for p in path.rglob("*") if p.is_file() and p.name != "lock.mdb")
    return {str(p.relative_to(path)): p.read_bytes() for p in every}


def spilled(path: Path, key: bytes) -> list[str]:
    """Files in which the plain text of a block can be found."""
    return [name for name, data in files(path).items() if phrase(key) in data]
