"""The client of `bench.peers` in Mooncake's environment: a line of JSON each way, answers behind a `=`.

A master and another process, which lends the memory, are started here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from tests.engines.mooncake.cluster import Cluster

_BUFFER_BYTES = 16 << 20


class _Side:
    """Blocks in registered memory."""

    def __init__(self, store: Any, batch: int, block_bytes: int) -> None:
        self.blocks = np.random.default_rng(3).integers(0, 256, (batch, block_bytes), np.uint8)
        self._store = store
        start = self.blocks.ctypes.data
        self.places = [start + i * block_bytes for i in range(batch)]
        self.sizes = [block_bytes] * batch
        if code := store.register_buffer(start, self.blocks.nbytes):
            raise RuntimeError(f"register_buffer: {code}")

    def close(self) -> None:
        """Takes the memory back."""
        self._store.unregister_buffer(self.blocks.ctypes.data)


class _Client:
    def __init__(self, address: str) -> None:
        self._store = store = MooncakeDistributedStore()
        if code := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", address):
            raise RuntimeError(f"setup: {code}")
        self._sides: list[_Side] = []

    def fill(self, block_bytes: int, batch: int, sets: int, calls: int) -> int:
        for side in self._sides:
            side.close()
        self._store.remove_all(True)
        self._batch, self._size = batch, block_bytes
        self._sides = self._in, self._out = [_Side(self._store, batch, block_bytes) for _ in range(2)]
        for number in range(sets):
            self._put(number)
        return 0

    def get(self, *numbers: int) -> float:
        seconds, out = 0.0, self._out
        for number in numbers:
            out.blocks[:, :8] = 0
            start = time.perf_counter()
            came = self._store.batch_get_into(self._keys(number), out.places, out.sizes)
            seconds += time.perf_counter() - start
            if came != out.sizes or out.blocks.view(np.uint64)[:, 0].tolist() != self._stamps(number):
                raise RuntimeError(f"batch_get_into: {came[:4]}")
        return seconds

    def put(self, *numbers: int) -> float:
        return sum(self._put(number) for number in numbers)

    def tidy(self, *numbers: int) -> int:
        self._store.batch_remove([key for number in numbers for key in self._keys(number)], True)
        return 0

    def exists(self) -> float:
        keys = self._keys(0)[:32]
        start = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        seconds = time.perf_counter() - start
        if found != [1] * len(keys):
            raise RuntimeError(f"batch_is_exist: {found}")
        return seconds

    def _put(self, number: int) -> float:
        into = self._in
        into.blocks.view(np.uint64)[:, 0] = self._stamps(number)
        start = time.perf_counter()
        codes = self._store.batch_put_from(self._keys(number), into.places, into.sizes)
        seconds = time.perf_counter() - start
        if any(codes):
            raise RuntimeError(f"batch_put_from: {codes[:4]}")
        return seconds

    def _keys(self, number: int) -> list[str]:
        return [f"{self._size}-{number}-{i}" for i in range(self._batch)]

    def _stamps(self, number: int) -> list[int]:
        return [number * self._batch + i + 1 for i in range(self._batch)]


def main(arguments: Sequence[str]) -> None:
    """Serves until stdin ends."""
    folder, room_bytes = Path(arguments[0]), int(arguments[1])
    with Cluster(folder, room_bytes) as cluster:
        client = _Client(cluster.address)
        _say([os.getpid(), cluster.master.pid, cluster.peer.pid])
        for line in sys.stdin:
            what, *given = json.loads(line)
            try:
                _say(getattr(client, what)(*given))
            except Exception as error:
                _say({"error": str(error)})


def _say(answer: Any) -> None:
    print("=" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
