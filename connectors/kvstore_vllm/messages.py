"""What the two halves tell each other: the scheduler what to move, the workers what blocks look like."""

from __future__ import annotations

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
class Load:
    """Fill a request's engine blocks `block_ids` from the stored blocks `keys`.

    The first `skip` engine blocks of the first stored block are there already; what the last one holds
    beyond `block_ids` is not wanted.
    """

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    skip: int


@dataclass(slots=True)
class Save:
    """Store a request's engine blocks `block_ids`, equally many of them under each of `keys`.

    `tokens`: the token ids of these blocks; None where there is more to a block than its tokens.
    """

    request_id: str
    keys: list[bytes]
    parent: bytes | None
    block_ids: list[int]
    tokens: list[int] | None = None


@dataclass
class Step(KVConnectorMetadata):
    """One step's orders. `epoch` names the weights since the last reset, empty before the first.

    `held` requests have finished and keep their engine blocks until all their saves are over. Engine blocks
    of `revoked` ones may be overwritten from this step on: their saves must not read them any more. So must
    none of the engine blocks `given`, which a request got for this step. `number` counts the steps that had
    loads or saves; `idle`: the step computes nothing.
    """

    epoch: str = ""
    number: int = 0
    idle: bool = False
    given: list[int] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker's stored blocks look like: known once its KV memory is. `off`: why nothing is served."""

    layout: Layout
    off: str = ""


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """All transfers of the steps up to this number are over."""

    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Progress:
        """That of the slower worker."""
        assert isinstance(other, Progress)
        return Progress(min(self.number, other.number))


@dataclass
class Figures(KVConnectorStats):
    """Counts since the last ones: blocks by what became of them, failures by hook. vLLM logs them."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Starts from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Figures:
        """Adds another's."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """What is logged."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data
