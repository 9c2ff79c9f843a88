"""Runs the prompts of a model with states up to block boundaries, where their states are copied.

Rows whose boundaries are in the same columns run together. `merge` puts them into one cache, with the padding
of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvstore_transformers.blocks import BlockShape, Columns
from kvstore_transformers.caches import last_logits_only, new_cache, position_arguments
from kvstore_transformers.states import Snapshots, State


@dataclass(slots=True)
class Group:
    """Rows of a batch with `pad` columns of padding, of which `past` has the first `tokens`, without padding.

    `boundaries` are the numbers of tokens behind which states are copied.
    """

    rows: list[int]
    pad: int
    tokens: int
    boundaries: set[int]
    past: DynamicCache


def prefill(model: Any, group: Group, rows: Sequence[list[int]], stop: int, snapshots: Snapshots) -> None:
    """Runs the model over the tokens of a group up to its last boundary, and at least to column `stop`."""
    ids = torch.tensor([rows[row][group.pad :] for row in group.rows], device=model.device)
    few = last_logits_only(model)
    for end in sorted(group.boundaries | {stop - group.pad}):
        if end > group.tokens:
            positions = position_arguments(model, group.tokens, end)
            model(
                input_ids=ids[:, group.tokens : end],
                past_key_values=group.past,
                use_cache=True,
                **positions,
                **few,
            )
            group.tokens = end
            if end in group.boundaries:
                for past_row, row in enumerate(group.rows):
                    snapshots.take(group.past, past_row, row, end)


def merge(shape: BlockShape, groups: list[Group], width: int, config: Any) -> DynamicCache:
    """Returns a cache of `width` columns with the rows of all groups, which end there or are padding."""
    if len(groups) == 1 and groups[0].pad == 0:
        return groups[0].past
    if width == 0:
        return new_cache(config)
    count = sum(len(group.rows) for group in groups)
    columns, states = Columns(shape, count, width), list[State | None]([None] * count)
    for group in groups:
        if group.tokens:
            columns.take(group.rows, group.pad, group.past)
            for past_row, row in enumerate(group.rows):
                states[row] = shape.states.read(group.past, past_row)
    past = columns.to_cache(new_cache(config))
    shape.states.write(past, states)
    return past
