"""The client of `bench.peers` in Mooncake's environment: a line of JSON each way, answers behind a `=`.

A master and another process, which lends the memory, are started here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore

from bench.contestants import Blocks, Contestant, Shape
from bench.harness import expect
from tests.engines.mooncake.cluster import Cluster

_BUFFER_BYTES = 16 << 20


class _Client(Contestant):
    name = "mooncake"

    def __init__(self, address: str) -> None:
        super().__init__()
        self._store = store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", address)
        expect(code, 0, "setup")
        self._registered: list[Blocks] = []

    def tidy(self, numbers: Sequence[int]) -> None:
        self._store.batch_remove([key for number in numbers for key in self._keys(number)], True)

    def _clear(self) -> None:
        for blocks in self._registered:
            self._store.unregister_buffer(blocks.ctypes.data)
        self._store.remove_all(True)
        self._registered = [self._blocks, self._out]
        for blocks in self._registered:
            expect(self._store.register_buffer(blocks.ctypes.data, blocks.nbytes), 0, "register_buffer")

    def _get(self, number: int, keys: list[str]) -> None:
        expect(self._store.batch_get_into(keys, *_places(self._out)), _places(self._out)[1], "bytes")

    def _put(self, number: int, keys: list[str]) -> None:
        codes = self._store.batch_put_from(keys, *_places(self._blocks))
        expect([code for code in codes if code], [], "codes of refused blocks")

    def _count(self, keys: list[str]) -> int:
        return int(self._store.batch_is_exist(keys).count(1))


def _places(blocks: Blocks) -> tuple[list[int], list[int]]:
    """Returns the address and the bytes of each block."""
    start, size = blocks.ctypes.data, blocks.shape[1]
    return [start + i * size for i in range(len(blocks))], [size] * len(blocks)


def main(arguments: Sequence[str]) -> None:
    """Serves until stdin ends."""
    folder, room_bytes = Path(arguments[0]), int(arguments[1])
    with Cluster(folder, room_bytes) as cluster:
        client = _Client(cluster.address)
        _say([os.getpid(), cluster.master.pid, cluster.peer.pid])
        for line in sys.stdin:
            what, *given = json.loads(line)
            try:
                alone = (Shape(*given),) if what == "fill" else (given,) if given else ()
                _say(getattr(client, what)(*alone))
            except Exception as error:
                _say({"error": str(error)})


def _say(answer: Any) -> None:
    print("=" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
