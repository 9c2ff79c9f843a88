"""lookup: lookups of 1 to 8192 keys among 1 M stored blocks, compared with an empty round trip.

Of a long prompt, a lookup looks at some keys only, unless blocks are stored behind missing ones
(`with-gaps`).

The daemon starts on a generated folder: records of 1 M blocks in chains, and slab files without bytes. The
scrubber is off, because it would detect them. A prefix of random length is stored of each prompt, and all of
every second one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness import KIB, MIB, Bench, Result, Target, expect
from bench.latency import Timed, compare
from bench.served import serve, wait_for_table
from kvstore import Layout
from kvstore import Namespace as Space
from kvstore.tiers.nvme.records import ID, RecordBatch
from kvstore.tiers.nvme.store import NUMBER, Changes, Items, Namespace, RecordStore
from kvstore.types import extent_bytes

BLOCK_BYTES = 64 * KIB
PROMPTS = 64
LENGTHS = (1, 64, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Sizes:
    """`blocks` in chains of `chain`, which is the longest prompt, and slots for them."""

    blocks: int = 1_000_000
    slots: int = 1 << 20
    dram_bytes: int = 64 * MIB


SMOKE = Sizes(3 * LENGTHS[-1], 1 << 15, 16 * MIB)
CHAIN = LENGTHS[-1]
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)

Chain = list[bytes]


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per number of keys."""
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder:
        bench.doing(f"recording {z.blocks} blocks")
        chains = _fabricate(folder, z)
        bench.doing(f"starting on {z.blocks} blocks")
        started = time.monotonic()
        with serve(z.dram_bytes, (folder, z.slots * BLOCK_BYTES), scrub={"rate": 0}) as (client, _):
            restore_s = time.monotonic() - started
            blocks = client.status()["blocks"]
            expect(blocks, z.blocks, "blocks restored")
            space = client.namespace(LAYOUT)
            bench.doing("waiting for the presence table")
            wait_for_table(client, LAYOUT, chains[0][:1])

            def measured(name: str, keys: int, target: Target | None = None) -> Result:
                timed = Timed(_Asker(space, _prompts(chains, keys)))
                result = compare(bench, name, client, timed, 0.25, target)
                result.extra |= {"blocks": blocks, "restore_s": restore_s}
                return result

            for keys in LENGTHS:
                yield measured(f"lookup/{keys}", keys, Target("<=", 1.0) if keys == LENGTHS[-1] else None)
            # Now blocks are stored behind a missing one.
            expect(space.invalidate(chains[-1][:1]), 1, "blocks deleted")
            yield measured(f"lookup/{keys}-with-gaps", keys)


class _Asker:
    """Looks up prompts in turns and checks the answers."""

    def __init__(self, space: Space, prompts: list[tuple[Chain, int]]) -> None:
        self._space = space
        self._prompts = prompts

    def __call__(self, n: int) -> None:
        keys, stored = self._prompts[n % len(self._prompts)]
        expect(self._space.lookup(keys), stored, "blocks found")


def _prompts(chains: list[Chain], keys: int) -> list[tuple[Chain, int]]:
    """Returns prompts: keys and the number of stored ones."""
    rng = random.Random(keys)
    prompts = []
    for i in range(PROMPTS):
        stored = keys if i % 2 else rng.randrange(keys + 1)
        unknown = [os.urandom(32) for _ in range(keys - stored)]
        prompts.append((rng.choice(chains[:-1])[:stored] + unknown, stored))
    return prompts


def _fabricate(folder: Path, z: Sizes) -> list[Chain]:
    """Writes the folder of a daemon that has stored these blocks. Returns their keys."""
    keys = [os.urandom(32) for _ in range(z.blocks)]
    extent = extent_bytes(z.slots * BLOCK_BYTES)
    slots = extent // BLOCK_BYTES
    extents = z.slots // slots
    (folder / "slabs").mkdir()
    for number in range(extents):
        with (folder / "slabs" / f"{number:06d}.slab").open("wb") as slab:
            slab.truncate(extent)
    now = time.time()
    records = RecordBatch(
        [1] * z.blocks,
        keys,
        [b"" if i % CHAIN == 0 else keys[i - 1] for i in range(z.blocks)],
        [i // slots for i in range(z.blocks)],
        [i % slots for i in range(z.blocks)],
        [1] * z.blocks,
        [BLOCK_BYTES] * z.blocks,
        [0] * z.blocks,
        [now - 1e-6 * i for i in range(z.blocks)],
    )
    store = RecordStore(folder, extent, 1 << 30)
    try:
        space = Namespace("default", LAYOUT.to_map(), LAYOUT.fingerprint())
        tables: dict[str, Items] = {
            "namespaces": {ID.pack(1): space.pack()},
            "extents": {ID.pack(number): NUMBER.pack(BLOCK_BYTES) for number in range(extents)},
        }
        store.commit(Changes(tables, [records.pack()]))
    finally:
        store.close()
    return [keys[i : i + CHAIN] for i in range(0, z.blocks, CHAIN)]
