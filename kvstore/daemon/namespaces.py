"""Which layouts have which number, on record where there is a journal; and whose blocks were in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.core.events import Restore
from kvstore.tiers.dram import Inherited
from kvstore.tiers.nvme.journal import Namespace
from kvstore.types import Layout


class Namespaces:
    """Numbers, fingerprints and payload sizes (bytes) of the layouts of one daemon."""

    def __init__(self, record: Callable[[int, Namespace], None]) -> None:
        """`record` puts a namespace on record, before any block of it."""
        self.fingerprints: dict[int, bytes] = {}
        self.lengths: dict[int, int] = {}
        self._record = record
        self._numbers: dict[bytes, int] = {}
        self._nameless: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, fingerprint: bytes) -> int | None:
        """The number of a layout, None if it has none."""
        return self._numbers.get(fingerprint)

    def new_number(self) -> int:
        """A number that no layout has."""
        return max(self.fingerprints, default=0) + 1

    def remember(self, number: int, fingerprint: bytes, block_bytes: int) -> None:
        """A layout that is on record has this number."""
        self._numbers[fingerprint] = number
        self.fingerprints[number] = fingerprint
        self.lengths[number] = block_bytes

    def remember_nameless(self, number: int, fingerprint: bytes, block_bytes: int) -> None:
        """Like `remember`, for one of which only slot headers are known; on record at once."""
        self.remember(number, fingerprint, block_bytes)
        self._nameless.add(number)
        self._record(number, Namespace("default", {"block_bytes": block_bytes}, fingerprint))

    def opened(self, number: int, layout: Layout) -> None:
        """A client has opened this layout: on record by its full name."""
        if number in self._nameless or number not in self.fingerprints:
            fingerprint = layout.fingerprint()
            self._nameless.discard(number)
            self.remember(number, fingerprint, layout.block_bytes)
            self._record(number, Namespace("default", layout.to_map(), fingerprint))


def in_memory(found: Inherited, number_of: Callable[[bytes, int], int]) -> Restore:
    """The blocks of inherited extents as an event.

    `number_of` gives the number for a fingerprint and a payload size in bytes, 0 to leave its blocks out.
    """
    headers = found.headers
    fingerprints, inverse = np.unique(headers["namespace"], axis=0, return_inverse=True)
    numbers = np.zeros(len(headers), np.uint32)
    good = np.zeros(len(headers), np.bool_)
    for i, raw in enumerate(fingerprints):
        which = inverse.reshape(-1) == i
        length = int(headers["length"][which.argmax()])
        numbers[which] = number_of(raw.tobytes(), length)
        good |= which & (headers["length"] == length) & (numbers > 0)
    # Headers lie in memory that writers can reach: of two that name one block only the latest counts.
    names = np.concatenate(
        [numbers[:, None].view(np.uint8), headers["key_bytes"][:, None], headers["key"]], axis=1
    )
    first = np.zeros(len(headers), np.bool_)
    first[np.unique(names, axis=0, return_index=True)[1]] = True
    good &= first
    return Restore(
        0,
        numbers,
        headers["key"],
        headers["key_bytes"],
        headers["parent"],
        headers["parent_bytes"],
        found.extent,
        found.index,
        headers["version"],
        headers["checksum"],
    ).only(good)
