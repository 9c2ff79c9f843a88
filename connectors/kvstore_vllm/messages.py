"""Messages between the halves: transfers from the scheduler, layouts and progress from the workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore import Layout
from kvstore_vllm.options import OWN, Advice, Scope


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
    """Loads the parts of a request's prefix. `waits`: for blocks that another engine is still storing.

    `within_s`: the longest time of the load if no other runs, in seconds.
    """

    request_id: str
    parts: list[Part]
    waits: bool = False
    scope: Scope = OWN
    within_s: float = math.inf


@dataclass(slots=True)
class Save:
    """Saves the pages `block_ids` of a request's group, the same number under each of `keys`.

    `parent`: the key before them; None: they need no block before them. `tokens`: the token ids of these
    blocks; None if tokens do not identify a block. `chain`: the key of the last block of full attention of
    their prefix, without which they are of no use; None: there is none.
    """

    request_id: str
    group: int
    keys: list[bytes]
    parent: bytes | None
    block_ids: list[int]
    tokens: list[int] | None = None
    scope: Scope = OWN
    chain: bytes | None = None


@dataclass(slots=True)
class Hint:
    """Tells the store what will become of a request's stored blocks `keys` of a group."""

    request_id: str
    group: int
    keys: list[bytes]
    advice: Advice
    scope: Scope = OWN


@dataclass
class Step(KVConnectorMetadata):
    """The transfers of one step.

    `epoch`: names the weights since the last reset; empty before the first. `number`: counts the steps with
    loads, saves or hints. `idle`: the step computes nothing. `met`: the workers' layouts are known. `serial`:
    counts all steps.
    """

    epoch: str = ""
    number: int = 0
    idle: bool = False
    met: bool = False
    serial: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The block layouts of a worker by group; none until its weights have a name.

    `off`: the reason if nothing is served, as a clause. `unnamed`: it is that the weights cannot be named.
    """

    layouts: list[Layout]
    off: str = ""
    unnamed: bool = False


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """All transfers of the steps up to `number` have ended.

    `serial`: the step of this report. `told`: the handshakes by rank of the worker, until a step says that
    they are known.
    """

    number: int
    serial: int = 0
    told: dict[int, Handshake] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Progress:
        """Returns the progress of the slower worker, and the handshakes of both."""
        assert isinstance(other, Progress)
        return Progress(
            min(self.number, other.number), min(self.serial, other.serial), self.told | other.told
        )
