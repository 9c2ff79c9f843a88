"""What the scheduler half tells the workers at each step. TensorRT-LLM passes it to all ranks by pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore import Key


@dataclass(frozen=True, slots=True)
class Load:
    """A promised block, in a row of the staging memory, for page `block_id`."""

    row: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Save:
    """Consecutive blocks of a prompt that are complete after the step. `parent`: the key before them.

    `tokens`: for KV events; None: no events for these blocks.
    """

    keys: list[Key]
    parent: Key | None
    block_ids: list[int]
    tokens: list[int] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine. Numbers rise. `revision` names the weights; empty: nothing is saved."""

    number: int
    revision: str = ""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
