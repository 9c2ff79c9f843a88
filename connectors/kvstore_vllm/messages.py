"""Messages between the halves: transfers from the scheduler, layouts and progress from the workers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvstore import Layout


@dataclass(slots=True)
class Part:
    """Stored blocks `keys` of a group, to load into the pages `block_ids`.

    The first `skip` pages of the first stored block are already computed. Pages of the last stored block
    beyond `block_ids` are ignored.
    """

    group: int
    keys: list[bytes]
    block_ids: list[int]
    skip: int = 0


@dataclass(slots=True)
class Load:
    """Loads the parts of a request's prefix within so many seconds."""

    request_id: str
    parts: list[Part]
    within_s: float = math.inf


@dataclass(slots=True)
class Save:
    """Saves the pages `block_ids` of a request's group, the same number under each of `keys`.

    `parent`: the key before them; None: they need no block before them. `tokens`: the token ids of these
    blocks; None if tokens do not identify a block.
    """

    request_id: str
    group: int
    keys: list[bytes]
    parent: bytes | None
    block_ids: list[int]
    tokens: list[int] | None = None


@dataclass
class Step(KVConnectorMetadata):
    """The transfers of one step.

    `epoch`: names the weights since the last reset; empty before the first. `number`: counts the steps with
    loads or saves. `idle`: the step computes nothing. `serial`: counts all steps.
    """

    epoch: str = ""
    number: int = 0
    idle: bool = False
    serial: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The block layouts of a worker by group, known after its KV memory.

    `off`: the reason if nothing is served.
    """

    layouts: list[Layout]
    off: str = ""


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """All transfers of the steps up to `number` have ended. `serial`: the step of this report."""

    number: int
    serial: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Progress:
        """Returns the progress of the slower worker."""
        assert isinstance(other, Progress)
        return Progress(min(self.number, other.number), min(self.serial, other.serial))


@dataclass
class Figures(KVConnectorStats):
    """Counts since the last report: blocks by outcome, failures by hook. vLLM logs them."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Clears the counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Figures:
        """Adds the counts of `other`."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the counts to log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Returns whether there are no counts."""
        return not self.data
