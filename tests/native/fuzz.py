"""Random batches for the C extension, right and wrong ones: bytes, sums and errors are those of the oracle.

    python -m tests.native.fuzz --seconds 20 --seed 1

Ends with 1 and the seed at the first difference. Under a sanitizer, it ends at the first bad access.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import time
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.columns import zeros
from kvstore.native import END_OF_FILE, _native, pieces

SIZES = (0, 1, 16, 240, 241, 1023, 1024, 1088, 2048, 4096, 65_536, 262_143, 262_144, 270_001, 1 << 20)
MOST = 1 << 21


def memory(dice: random.Random, nbytes: int) -> Any:
    """Exactly `nbytes` bytes at the end of an allocation, at any alignment: what lies behind is not ours."""
    before = dice.randrange(64)
    return np.frombuffer(dice.randbytes(before + nbytes), np.uint8).copy()[before:]


def batch(dice: random.Random) -> tuple[list[Any], list[Any], Any]:
    """Targets, sources and a table, of which any piece may be wrong."""
    n, wrong = dice.randrange(1, 6), dice.random() < 0.2
    sizes = [max(0, dice.choice(SIZES) + dice.randrange(-2, 3)) for _ in range(n)]
    sources = [memory(dice, size) for size in sizes]
    targets = [memory(dice, size + dice.randrange(3)) for size in sizes]
    if dice.random() < 0.1:
        targets[0] = sources[0]
    table = pieces(n)
    for i, row in enumerate(table):
        start = dice.randrange(sizes[i] + 1) if dice.random() < 0.3 else 0
        row["source"] = row["target"] = i
        row["source_offset"], row["length"] = start, dice.choice((sizes[i] - start, (sizes[i] - start) // 2))
        row["target_offset"] = dice.randrange(len(targets[i]) - int(row["length"]) + 1)
        row["seed"], row["more"] = dice.getrandbits(64), dice.random() < 0.3
        if wrong and dice.random() < 0.5:
            field, low = (
                dice.choice(("source", "target", "source_offset", "target_offset", "length")),
                sizes[i],
            )
            values = (
                (n, 2**31) if field in ("source", "target") else (low + 1, 2**63, 2**64 - 1, 2**64 - 1 - low)
            )
            table[field][i] = np.uint64(dice.choice(values))
    table["more"][-1] = dice.random() < 0.02
    return targets, sources, table


def oracle(targets: list[Any], sources: list[Any], table: Any, copying: bool) -> list[int] | None:
    """Copies, and returns the sum of each row; None for a batch that must be refused."""
    for row in table.tolist():
        source, target, start, at, length, *_ = row
        if source >= len(sources) or start + length > len(sources[source]):
            return None
        if copying and (target >= len(targets) or at + length > len(targets[target])):
            return None
        if copying and length and targets[target] is sources[source] and abs(start - at) < length:
            return None
    if table["more"][-1]:
        return None
    sums, block, first = [], b"", None
    for source, target, start, at, length, seed, _, more in table.tolist():
        data = sources[source][start : start + length].tobytes()
        if copying:
            targets[target][at : at + length] = np.frombuffer(data, np.uint8)
        block, first = block + data, seed if first is None else first
        sums.append(0 if more else xxh3_64_intdigest(block, first))
        if not more:
            block, first = b"", None
    return sums


def differs(dice: random.Random) -> str:
    """Runs one batch both ways. Returns what differs, "" if nothing does."""
    targets, sources, table = batch(dice)
    call = dice.choice(("copy", "copy_and_sum", "sums"))
    own_sources = [source.copy() for source in sources]
    own_targets = [
        own_sources[i] if target is sources[i] else target.copy() for i, target in enumerate(targets)
    ]
    expected = oracle(own_targets, own_sources, table, copying=call != "sums")
    arguments = (sources, table) if call == "sums" else (targets, sources, table)
    try:
        getattr(_native, call)(*arguments)
    except ValueError as error:
        got = None
        if expected is not None:
            return f"{call} refused a batch: {error}"
    else:
        got = table["sum"].tolist()
    if got is not None and expected is None:
        return f"{call} took a batch that must be refused"
    if call != "copy" and got != expected:
        return f"{call} gave other sums"
    if not all(map(np.array_equal, targets, own_targets)):
        return f"{call} gave other bytes"
    return ""


def misreads(dice: random.Random) -> str:
    """What is wrong with lookups in a table of noise, whose keys are of any length; "" if nothing is."""
    memory = zeros(8 * dice.randint(3, 600), np.uint64)
    memory[:] = np.frombuffer(dice.randbytes(memory.nbytes), np.uint64)
    memory[0] = 1
    length = dice.randint(1, 64)
    keys = [dice.randbytes(length) for _ in range(dice.randint(0, 100))]
    found, where = _native.presence(memory, keys, dice.random() < 0.5), _native.places(memory, keys)
    if found is None or where is None or len(found) > len(keys) or len(where[1]) != 8 * len(where[0]):
        return "presence gave no answer"
    return ""


def misproves(dice: random.Random) -> str:
    """What is wrong with reads from extents of noise, in which no block can be proved; "" if nothing is."""
    slot_bytes, slots = dice.choice((1, 100, 4096)), dice.randrange(20)
    offset = 4096 + 192 * slots + dice.randrange(2)
    extents = []
    for number in range(dice.randrange(3)):
        noise = zeros(offset + slots * slot_bytes, np.uint8)
        noise[:] = np.frombuffer(dice.randbytes(noise.nbytes), np.uint8)
        claimed = slots + dice.choice((0, 0, 0, 1))
        extents.append((number, noise, offset + dice.choice((0, 0, 0, 1 << 40)), claimed))
    n, length, size = dice.randrange(9), dice.randint(1, 64), dice.randint(1, slot_bytes)
    places = np.array([dice.randrange(3) << 32 | dice.randrange(22) for _ in range(n)], np.uint64).tobytes()
    keys, out = [dice.randbytes(length) for _ in range(n)], memory(dice, n * size)
    if dice.random() < 0.5:
        out = [memory(dice, size) for _ in range(n)]
    try:
        good = _native.read_slots(out, extents, places, keys, dice.randbytes(16), size, slot_bytes)
    except ValueError:
        return ""
    return "read_slots has proved noise" if good else ""


REGION = 5000


def misqueues(dice: random.Random) -> str:
    """What is wrong with batches of I/O that each move their own regions of a file; "" if nothing is."""
    fd = os.memfd_create("fuzz")
    try:
        return _misqueues(dice, fd)
    finally:
        os.close(fd)


def _misqueues(dice: random.Random, fd: int) -> str:
    task_bytes = dice.choice((1, 100, 4096, 1 << 30))
    numbers = dice.randint(1, 4), task_bytes, dice.randint(1, 300), dice.randint(1, 9)
    queue, wanted = _native.IOQueue(*numbers), bytearray(dice.randbytes(60 * REGION))
    os.pwrite(fd, wanted, 0)
    batches: list[list[Any]] = []
    reports: dict[int, list[Any]] = {}
    regions = iter(range(60))

    def transfer() -> Any:
        at, write = REGION * next(regions), dice.random() < 0.5
        where = dice.choice((at, at, at, at, 60 * REGION - 5, -1))
        size = dice.choice((0, 1, 100, 4096, REGION)) if task_bytes > 1 else dice.randrange(200)
        return dice.choice((fd, fd, fd, -1)), where, memory(dice, size), write and where == at

    for _ in range(dice.randrange(12)):
        batches.append([transfer() for _ in range(dice.randrange(6))])
        queue.submit(batches[-1], len(batches) - 1, dice.random() < 0.5)
        if dice.random() < 0.3 and len(reports) < len(batches):
            reports.update([queue.next()])
    if dice.random() < 0.2:
        return ""  # what waits is dropped
    queue.close()
    while ended := queue.next():
        reports.update([ended])
    for number, batch in enumerate(batches):
        refused = bool(batch) and [error for _, error in reports[number]] == [errno.EAGAIN] * len(batch)
        for i, (file, at, buffer, write) in enumerate(batch):
            error = errno.EINVAL if at < 0 else 0
            if len(buffer) and not error:
                ends_early = not write and at + len(buffer) > len(wanted)
                error = errno.EBADF if file < 0 else END_OF_FILE if ends_early else 0
            if not refused and dict(reports[number]).get(i, 0) != error:
                return f"a transfer ended with {reports[number]}, not with {error}"
            moved = not (refused or error)
            if moved and write:
                wanted[at : at + len(buffer)] = buffer.tobytes()
            elif moved and buffer.tobytes() != wanted[at : at + len(buffer)]:
                return "a transfer has read other bytes"
    return "" if os.pread(fd, 2 * len(wanted), 0) == wanted else "the file has other bytes"


ALL = (differs, misreads, misproves, misqueues)


def main() -> int:
    """Runs for some seconds on every instruction set. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ends, runs, sets = time.monotonic() + options.seconds, 0, 0
    while True:
        try:
            _native.choose(sets)
        except ValueError:
            break
        sets += 1
    while time.monotonic() < ends:
        seed = options.seed + runs
        _native.choose(runs % sets)
        if problem := next(filter(None, (run(random.Random(seed)) for run in ALL)), ""):
            print(f"seed {seed}, {_native.instruction_set()}: {problem}")
            return 1
        runs += 1
    print(f"{runs} batches on {sets} instruction sets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
