"""Checks an NVMe folder that no daemon uses: every record against its slab, and every block's checksum.

A slab of full size without an extent record is unassigned, not damaged. A record with several problems is
reported once, with the first in the order of `Kind`. Not covered here: printing, and records that LMDB cannot
read (`store.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.errors import TierError
from kvstore.tiers.nvme.encryption import BlockCipher, TenantKeys
from kvstore.tiers.nvme.key_files import KeyFiles, MasterKey
from kvstore.tiers.nvme.records import ID, Blocks, Damaged, deletions, mapped
from kvstore.tiers.nvme.recovery import strangers
from kvstore.tiers.nvme.store import Changes, Loaded, Namespace, RecordStore
from kvstore.types import ALIGN

Progress = Callable[[int, int], None]
"""Receives the checked bytes of blocks and their total."""

_RUN_BYTES = 8 << 20  # for each read
_MAP_BYTES = 8 << 30


class Kind(StrEnum):
    """Problems. Three concern an extent, the others a block's record."""

    NO_SLAB = "extent without its slab"
    SHORT_SLAB = "slab shorter than its extent"
    ORPHAN = "orphan slab"
    DAMAGED = "record cannot be decoded"
    NAMESPACE = "unknown namespace"
    NO_EXTENT = "unknown extent"
    MISSING = "slab missing"
    SLOT_BYTES = "extent has slots of another size"
    TENANT = "extent is another tenant's"
    LENGTH = "length is not the namespace's"
    OUTSIDE = "outside the extent's slots"
    BEYOND = "beyond the slab's end"
    NO_KEY = "sealed, and its tenant has no data key"
    UNREADABLE = "cannot be read"
    SUPERSEDED = "a later record has the same block"
    CHECKSUM = "wrong checksum"


_NUMBERS = {kind: i for i, kind in enumerate(Kind, 1)}
_GOOD = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `extent`, `index` (the slot) and `namespace` are numbers, None if unknown."""

    kind: Kind
    extent: int | None = None
    index: int | None = None
    namespace: int | None = None
    key: bytes = b""


@dataclass(slots=True)
class Report:
    """The result of a check. `verdict` has 0 or the number of a `Kind` for each row of `blocks`.

    `damaged` has what is no valid record, `orphans` files. `repaired` means that all problems are.
    `unchecked` counts encrypted blocks that were not read without the master key.
    """

    folder: Path
    extents: int
    blocks: Blocks
    verdict: npt.NDArray[np.uint8]
    damaged: Damaged
    no_slab: list[int] = field(default_factory=list)
    short: dict[int, Path] = field(default_factory=dict)
    orphans: dict[int, Path] = field(default_factory=dict)
    checked_bytes: int = 0
    unchecked: int = 0
    repaired: bool = False

    def counts(self) -> dict[Kind, int]:
        """Returns how often each kind was found, without kinds that were not."""
        found = Counter({Kind.NO_SLAB: len(self.no_slab), Kind.SHORT_SLAB: len(self.short)})
        found.update({Kind.ORPHAN: len(self.orphans), Kind.DAMAGED: len(self.damaged)})
        rows = np.bincount(self.verdict, minlength=len(Kind) + 1).tolist()
        found.update({kind: rows[number] for kind, number in _NUMBERS.items()})
        return {kind: found[kind] for kind in Kind if found[kind]}

    def findings(self) -> Iterator[Finding]:
        """Yields every problem, those of extents first."""
        yield from (Finding(Kind.NO_SLAB, extent) for extent in self.no_slab)
        yield from (Finding(Kind.SHORT_SLAB, extent) for extent in self.short)
        yield from (Finding(Kind.ORPHAN, extent) for extent in self.orphans)
        yield from (Finding(Kind.DAMAGED, key=raw) for raw in self.damaged.pages + self.damaged.others)
        yield from (Finding(Kind.DAMAGED, *divmod(place, 1 << 32)) for place in self.damaged.places.tolist())
        kinds = tuple(Kind)
        blocks = self.blocks
        for i in np.flatnonzero(self.verdict).tolist():
            yield Finding(
                kinds[self.verdict[i] - 1],
                int(blocks.extent[i]),
                int(blocks.index[i]),
                int(blocks.ns[i]),
                blocks.key(i),
            )


def fsck(
    folder: Path, limit_bytes: int | None, repair: bool, progress: Progress, master: MasterKey | None = None
) -> Report:
    """Checks a folder. `repair` deletes bad records and orphan slabs and gives short slabs their size.

    `limit_bytes` is nvme.limit if known: unnamed slabs beyond it are orphans too. Encrypted blocks are kept
    unchecked without `master`. TierError if the folder is absent, in use, of an earlier format, unreadable or
    unrepairable, or if `master` is another key.
    """
    with closing(RecordStore(folder, None, _MAP_BYTES)) as store:
        try:
            loaded = store.load()
            with_key = set(KeyFiles(folder).load())
            keys = TenantKeys(folder, master, {}) if master is not None else None
            report = _check(folder, loaded, store.extent_bytes, limit_bytes, progress, with_key, keys)
            if repair:
                if len(loaded.damaged):
                    store.renew(loaded)
                _repair(store, report)
        except (OSError, lmdb.Error) as error:
            raise TierError(f"cannot check {folder}: {error}") from error
    return report


def _check(
    folder: Path,
    loaded: Loaded,
    extent_bytes: int,
    limit_bytes: int | None,
    progress: Progress,
    with_key: Set[str],
    keys: TenantKeys | None,
) -> Report:
    paths = {int(p.stem): p for p in sorted(folder.glob("slabs/*.slab")) if p.stem.isdecimal()}
    sizes = {extent: path.stat().st_size for extent, path in paths.items()}
    count = None if limit_bytes is None else limit_bytes // extent_bytes
    verdict = _places(loaded, sizes, extent_bytes, with_key)
    report = Report(folder, len(loaded.extents), loaded.blocks, verdict, loaded.damaged)
    report.no_slab = sorted(loaded.extents.keys() - paths.keys())
    for extent, path in paths.items():
        short = sizes[extent] < extent_bytes
        if extent in loaded.extents:
            if short:
                report.short[extent] = path
        elif short or (count is not None and extent >= count):
            report.orphans[extent] = path
    _read(loaded, paths, report, progress, keys)
    return report


def _places(
    loaded: Loaded, slab_sizes: dict[int, int], extent_bytes: int, with_key: Set[str]
) -> npt.NDArray[np.uint8]:
    """Returns the verdicts that need no block bytes. `with_key`: tenants with a data key."""
    blocks = loaded.blocks
    stored = mapped(
        blocks.ns, {n: namespace.stored_bytes for n, namespace in loaded.namespaces.items()}, absent=-1
    )
    namespaces = loaded.namespaces.items()
    keyless = [n for n, namespace in namespaces if namespace.encrypted and namespace.tenant not in with_key]
    payloads = {n: int(namespace.layout["block_bytes"]) for n, namespace in namespaces}
    length = mapped(blocks.ns, payloads, absent=-1)
    slot = mapped(blocks.extent, loaded.extents, absent=-1)
    slab = mapped(blocks.extent, slab_sizes, absent=-1)
    index = blocks.index.astype(np.int64)
    tests = {
        Kind.NAMESPACE: length < 0,
        Kind.NO_EXTENT: slot < 0,
        Kind.MISSING: slab < 0,
        Kind.SLOT_BYTES: slot != -(-stored // ALIGN) * ALIGN,
        Kind.TENANT: strangers(loaded),
        Kind.LENGTH: blocks.length != length,
        Kind.OUTSIDE: (index + 1) * slot > extent_bytes,
        Kind.BEYOND: index * slot + stored > slab,
        Kind.NO_KEY: np.isin(blocks.ns, keyless),
    }
    verdict = np.select(list(tests.values()), [_NUMBERS[kind] for kind in tests], _GOOD).astype(np.uint8)
    verdict[blocks.superseded(verdict == _GOOD)] = _NUMBERS[Kind.SUPERSEDED]
    return verdict


def _read(
    loaded: Loaded, paths: dict[int, Path], report: Report, progress: Progress, keys: TenantKeys | None
) -> None:
    """Reads the blocks of all good records in device order and verifies them."""
    blocks, verdict = report.blocks, report.verdict
    proofs = _proofs(loaded, keys)
    readable = np.isin(blocks.ns, list(proofs))
    report.unchecked = int((~readable & (verdict == _GOOD)).sum())
    rows = np.flatnonzero(readable & (verdict == _GOOD))
    rows = rows[np.lexsort((blocks.index[rows], blocks.extent[rows]))]
    total = int(blocks.length[rows].sum(dtype=np.int64))
    for some in np.split(rows, np.flatnonzero(np.diff(blocks.extent[rows])) + 1):
        if not len(some):
            continue
        extent = int(blocks.extent[some[0]])
        slot_bytes = loaded.extents[extent]
        fd = os.open(paths[extent], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for run in _runs(some, blocks.index, slot_bytes):
                _verify_run(fd, slot_bytes, run, proofs, report)
                report.checked_bytes += int(blocks.length[run].sum(dtype=np.int64))
                progress(report.checked_bytes, total)
            # A single pass must not evict the page cache of other processes.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


_Proof = Callable[[bytes, int, int, memoryview], bool]
"""Returns whether a slot holds the block of this key, length and checksum."""


def _proofs(loaded: Loaded, keys: TenantKeys | None) -> dict[int, _Proof]:
    """Returns the verification of each namespace. Omits encrypted namespaces without a key."""

    def proof(namespace: Namespace, cipher: BlockCipher | None) -> _Proof:
        def prove(key: bytes, length: int, checksum: int, slot: memoryview) -> bool:
            if cipher is not None:
                payload = memoryview(bytearray(length))
                if not cipher.decrypt(key, slot, payload):
                    return False
                slot = payload
            return arena.checksum(slot[:length], arena.seed(namespace.fingerprint, key, length)) == checksum

        return prove

    found = {
        n: proof(namespace, None) for n, namespace in loaded.namespaces.items() if not namespace.encrypted
    }
    for n, namespace in loaded.namespaces.items():
        if namespace.encrypted and keys is not None and keys.has_key(namespace.tenant):
            length = int(namespace.layout["block_bytes"])
            found[n] = proof(namespace, keys.cipher(namespace.tenant, namespace.fingerprint, length))
    return found


def _runs(
    rows: npt.NDArray[np.int64], index: npt.NDArray[np.uint32], slot_bytes: int
) -> list[npt.NDArray[np.int64]]:
    """Cuts the sorted rows of one extent into runs of neighbours of at most `_RUN_BYTES`."""
    slots = max(1, _RUN_BYTES // slot_bytes)
    at = index[rows].astype(np.int64)
    return np.split(rows, np.flatnonzero((np.diff(at) > 1) | (np.diff(at // slots) > 0)) + 1)


def _verify_run(
    fd: int, slot_bytes: int, run: npt.NDArray[np.int64], proofs: dict[int, _Proof], report: Report
) -> None:
    blocks = report.blocks
    first, last = int(blocks.index[run[0]]), int(blocks.index[run[-1]])
    try:
        data = _pread(fd, (last - first + 1) * slot_bytes, first * slot_bytes)
    except OSError:
        if first == last:
            report.verdict[run] = _NUMBERS[Kind.UNREADABLE]
        else:
            for row in run:
                _verify_run(fd, slot_bytes, np.array([row]), proofs, report)
        return
    for i in run.tolist():
        start, prove = (int(blocks.index[i]) - first) * slot_bytes, proofs[int(blocks.ns[i])]
        slot = data[start : start + slot_bytes]
        if not prove(blocks.key(i), int(blocks.length[i]), int(blocks.checksum[i]), slot):
            report.verdict[i] = _NUMBERS[Kind.CHECKSUM]


def _pread(fd: int, nbytes: int, offset: int) -> memoryview:
    """Reads `nbytes`, or fewer at the end of the file."""
    parts, got = [], 0
    while got < nbytes and (part := os.pread(fd, nbytes - got, offset + got)):
        parts.append(part)
        got += len(part)
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def _repair(store: RecordStore, report: Report) -> None:
    """Deletes records first: a crash in between leaves files that the next check finds."""
    blocks = report.blocks
    gone = dict.fromkeys(map(ID.pack, report.no_slab))
    store.commit(Changes({"extents": gone}, [deletions(blocks.places[report.verdict != _GOOD])]))
    for path in report.orphans.values():
        path.unlink()
    for path in report.short.values():
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, store.extent_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
    report.repaired = True
