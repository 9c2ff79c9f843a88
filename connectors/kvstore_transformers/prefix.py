"""`PrefixCache` restores the longest stored prefix of a batch into a DynamicCache and stores new blocks.

A DynamicCache is a rectangle, so all rows of a batch restore the same number of columns. This costs no
compute, because the computed part is as wide as the row with the most unknown tokens in any case.

A model with states is resumed at a stored state instead, each row at its own. The model then runs up to the
last block boundary of the prompt, where the state is copied, before `generate` runs the rest. So every call
has the same split, and a hit has the bits of the call that stored it.

Not covered: the models and calls that are served (`checks`), the layout of bytes (`blocks`, `states`),
namespaces (`identity`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore import Client, ExceptionBarrier, Key, Layout, PutResult, chain_keys
from kvstore.errors import MisuseError
from kvstore_transformers.blocks import BlockShape, Columns
from kvstore_transformers.caches import new_cache
from kvstore_transformers.checks import (
    check_call,
    check_layers,
    check_model,
    check_own_cache,
    check_pads,
    check_settings,
)
from kvstore_transformers.identity import layouts_of, settings_of
from kvstore_transformers.prefill import Group, merge, prefill
from kvstore_transformers.state_store import StateStore
from kvstore_transformers.states import AnswerStates, Snapshots, State
from kvstore_transformers.tails import row_ends
from kvstore_transformers.trial import try_prefix

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
"""The most bytes in transit between a cache and the store."""

_GROUP = 16
"""Columns are restored in groups of this size, and at least one group is computed.

Kernels round differently for small inputs and for remainders behind groups of 4, 8 or 16. Whole groups give
most tokens the same bits as without a store.
"""


@dataclass(slots=True)
class Figures:
    """The counts of one call: tokens of its prompts without padding, and blocks to be stored, of states too.

    `present_blocks` were stored before. `denied_blocks` were not stored, because of no daemon, no room or
    no expected use; `why` has the reason.
    """

    prompt_tokens: int = 0
    restored_tokens: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    denied_blocks: int = 0
    why: str = ""


class PrefixCache:
    """Stored prefixes for one model, one call at a time. `last` has the counts of the latest call.

    The constructor runs the model on a few tokens, to inspect its cache and to prove that a prefix is enough,
    and reads every weight once for a digest, so that models with different weights share no blocks.
    `revision` names the weights instead. The namespace also contains configuration, adapters, versions,
    processor and torch settings; a call after a change of these is refused. Weights that change later, for
    example by training, need a new PrefixCache. A block has `block_tokens` tokens. Prompts under different
    salts share no blocks.

    Raises MisuseError for models and calls that cannot be served. Failures of the store are misses, counted
    in `failures` by operation and in `Figures.denied_blocks`. A call spends at most one deadline of the
    client on restoring and one on storing. Blocks that arrive later are computed or not stored.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        block_tokens: int = 64,
        revision: str | None = None,
        salt: bytes = b"",
    ) -> None:
        check_model(model, revision)
        self.last = Figures()
        self._model = model
        self._salt = salt
        self._attached_to: Any = None
        self._deadline_s = client.deadline_s
        self._ends_s = 0.0
        self._shape = BlockShape(model, block_tokens)
        try_prefix(model, self._shape.states)
        blocks, states = layouts_of(model, self._shape, revision)
        self._ns = client.namespace(blocks)
        self._states = StateStore(client.namespace(states), self._shape.states) if states else None
        self._snapshots = Snapshots(self._shape.states, 0)
        self._guard = ExceptionBarrier(_logger)
        self._settings = settings_of(model)

    @property
    def failures(self) -> Counter[str]:
        """The number of internal failures of `restore` and `store`; each counts as a miss."""
        return self._guard.failures

    @property
    def shape(self) -> BlockShape:
        """The shape of the model's blocks."""
        return self._shape

    @property
    def layout(self) -> Layout:
        """The layout of the stored blocks."""
        return self._ns.layout

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replaces `model.generate` by `generate` in a `with` block: pipelines over the model use it."""
        model, self._attached_to = self._model, self._model.generate
        before = model.__dict__.get("generate")
        model.generate = self.generate
        try:
            yield
        finally:
            self._attached_to = None
            del model.generate
            if before is not None:
                model.generate = before

    def generate(
        self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **options: Any
    ) -> Any:
        """Returns the result of `model.generate` for token ids (rows, columns), padded on the left.

        Without `attention_mask` there is no padding. Prompts and answers are stored up to the end of each
        row. `past_key_values`: an empty StaticCache to fill; None: a DynamicCache.
        """
        settings = check_settings(self._model, options)
        self._check_model_is_as_it_was()
        pads = check_pads(input_ids, attention_mask, settings)
        if past_key_values is not None:
            check_own_cache(past_key_values, *input_ids.shape)
        past = self._restored(input_ids.tolist(), pads, past_key_values)
        if attention_mask is None:
            # An explicit mask keeps generate from inferring padding.
            attention_mask = torch.ones_like(input_ids)
        prompt_columns = input_ids.shape[1]
        if self._states:
            watch = AnswerStates(
                self._snapshots,
                pads,
                self._shape.block_tokens,
                lambda sequences: row_ends(sequences.tolist(), prompt_columns, settings),
                self._guard,
            )
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or []), watch]
        generate = self._attached_to or self._model.generate
        output = generate(input_ids, attention_mask=attention_mask, past_key_values=past, **options)
        sequences = (output if isinstance(output, torch.Tensor) else output.sequences).tolist()
        self._save(past, sequences, pads, row_ends(sequences, prompt_columns, settings))
        return output

    def restore(self, input_ids: Any, attention_mask: Any = None) -> DynamicCache:
        """Returns a cache with the stored columns of a batch, for a custom decoding loop; it may be empty.

        For a model with states, it also runs the model up to the last block boundary of the prompts. The loop
        continues at column `past.get_seq_length()`. It must count positions from the first token of each row,
        as `generate` does. Keys and values at other positions must not be stored.
        """
        self._check_model_is_as_it_was()
        return self._restored(input_ids.tolist(), check_pads(input_ids, attention_mask))

    def store(self, past: DynamicCache, sequences: Any, attention_mask: Any = None) -> None:
        """Stores the full blocks of token ids (rows, columns) whose keys and values are in `past`.

        `attention_mask` covers at least the prompts. See `restore` for positions.
        """
        check_layers(past)
        self._check_model_is_as_it_was()
        if self._states and self._snapshots.past is not past:
            raise MisuseError(
                "past is not the cache of the latest restore", "its states at block boundaries are gone"
            )
        width = sequences.shape[1] if attention_mask is None else attention_mask.shape[1]
        pads = check_pads(sequences[:, :width], attention_mask)
        self._save(past, sequences.tolist(), pads, [sequences.shape[1]] * len(pads))

    def _check_model_is_as_it_was(self) -> None:
        check_call(self._model, settings_of(self._model), self._settings)

    # -- restore

    @torch.no_grad()
    def _restored(self, rows: list[list[int]], pads: list[int], into: Any = None) -> Any:
        """Returns a cache with a prefix of the rows: `into`, an empty one, or a new one."""
        self.last = Figures(prompt_tokens=sum(len(row) - pad for row, pad in zip(rows, pads, strict=True)))
        self._ends_s = time.monotonic() + self._deadline_s
        self._snapshots = Snapshots(self._shape.states, len(rows))
        past = None
        with self._guard("restore"):
            if self._states:
                past = self._resumed(self._states, rows, pads)
            else:
                past = self._restored_columns(rows, pads, into)
        if past is None and into is not None:
            into.reset()
            past = into
        elif past is None:
            past = new_cache(self._model.config)
        self._snapshots.past = past
        return past

    def _restored_columns(self, rows: list[list[int]], pads: list[int], into: Any) -> Any:
        keys = [self._keys(row[pad:]) for row, pad in zip(rows, pads, strict=True)]
        columns = self._fetch(keys, pads, self._known_columns(keys, pads, len(rows[0])))
        past = columns.to_cache(new_cache(self._model.config) if into is None else into)
        self.last.restored_tokens = sum(max(0, columns.width - pad) for pad in pads)
        return past

    def _known_columns(self, keys: list[list[Key]], pads: list[int], width: int) -> int:
        """Returns how many leading columns are padding or stored in every row: whole groups, never all."""
        known = width - _GROUP
        for chain, pad in zip(keys, pads, strict=True):
            stored = self._ns.lookup(chain, self._left_s(), prompt=len(chain))
            known = min(known, pad + self._shape.block_tokens * stored)
        return max(0, known) // _GROUP * _GROUP

    def _fetch(self, keys: list[list[Key]], pads: list[int], width: int) -> Columns:
        """Fetches the first `width` columns, or as many as arrive for every row."""
        columns = Columns(self._shape, len(keys), width)
        for row, (chain, pad) in enumerate(zip(keys, pads, strict=True)):
            wanted = -(-max(0, columns.width - pad) // self._shape.block_tokens)
            arrived = self._fetch_row(columns, row, pad, chain[:wanted])
            if arrived < wanted:
                columns.cut((pad + arrived * self._shape.block_tokens) // _GROUP * _GROUP)
        return columns

    def _fetch_row(self, columns: Columns, row: int, pad: int, keys: Sequence[Key]) -> int:
        step = self._piece_blocks()
        blocks = np.empty((min(step, len(keys)), self._shape.block_bytes), np.uint8)
        for at in range(0, len(keys), step):
            piece = keys[at : at + step]
            n = self._ns.get(piece, blocks[: len(piece)], deadline_s=self._left_s(), prompt=0)
            columns.fill(row, pad + at * self._shape.block_tokens, blocks[:n])
            if n < len(piece):
                return at + n
        return len(keys)

    # -- resume a model with states

    def _resumed(self, states: StateStore, rows: list[list[int]], pads: list[int]) -> DynamicCache:
        """Restores each row up to its last stored state, and runs it up to the last block boundary."""
        groups = self._groups(states, rows, pads)
        restored = sum(group.tokens * len(group.rows) for group in groups)
        width = max((group.pad + max(group.boundaries) for group in groups if group.boundaries), default=0)
        for group in groups:
            prefill(self._model, group, rows, width, self._snapshots)
        past = merge(self._shape, groups, width, self._model.config)
        self.last.restored_tokens = restored
        return past

    def _groups(self, states: StateStore, rows: list[list[int]], pads: list[int]) -> list[Group]:
        """Restores rows. Those with the same padding and the same boundaries form a group."""
        size, columns = self._shape.block_tokens, len(rows[0])
        found: dict[tuple[int, int, int], list[tuple[int, list[Key], State | None]]] = {}
        for row, (tokens, pad) in enumerate(zip(rows, pads, strict=True)):
            keys = self._keys(tokens[pad:])
            known = self._ns.lookup(keys, self._left_s(), prompt=len(keys))
            known = min(known, max(0, columns - pad - _GROUP) // size)
            at, state = states.latest(keys[:known], self._left_s())
            found.setdefault((pad, at, known), []).append((row, keys[:at], state))
        groups = []
        for (pad, at, known), members in found.items():
            # Prompts have parted behind the known blocks if no state is there: it is of use to the next one.
            boundaries = {known * size, max(0, columns - pad - _GROUP) // size * size} - {0}
            groups.append(self._group(members, pad, at * size, boundaries))
        return groups

    def _group(
        self, members: list[tuple[int, list[Key], State | None]], pad: int, at: int, boundaries: set[int]
    ) -> Group:
        """Restores the first `at` tokens of the rows of a group."""
        rows, keys, states = zip(*members, strict=True)
        columns = self._fetch(list(keys), [0] * len(rows), at)
        if columns.width < at:
            # A block has been evicted since its lookup.
            at, columns = 0, Columns(self._shape, len(rows), 0)
        past = columns.to_cache(new_cache(self._model.config))
        if at:
            self._shape.states.write(past, states)
        return Group(list(rows), pad, at, boundaries, past)

    # -- store

    @torch.no_grad()
    def _save(self, past: DynamicCache, rows: list[list[int]], pads: list[int], ends: list[int]) -> None:
        held = int(past.get_seq_length())
        self.last = Figures(self.last.prompt_tokens, self.last.restored_tokens)
        self._ends_s = time.monotonic() + self._deadline_s
        with self._guard("store"):
            for row, (tokens, pad, end) in enumerate(zip(rows, pads, ends, strict=True)):
                computed = tokens[pad : min(end, held)]
                if self._states:
                    self._save_states(self._states, past, row, pad, computed)
                else:
                    self._save_row(past, row, pad, computed)

    def _save_row(self, past: DynamicCache, row: int, pad: int, tokens: list[int]) -> None:
        keys, size = self._keys(tokens), self._shape.block_tokens
        at = 0 if self.last.denied_blocks else self._ns.lookup(keys, self._left_s(), prompt=0)
        self.last.present_blocks += at
        while at < len(keys) and not self.last.denied_blocks:
            piece = keys[at : at + self._piece_blocks()]
            blocks = self._shape.blocks(past, row, pad + at * size, len(piece))
            # With a salt, tokens do not identify a block.
            said = None if self._salt else tokens[at * size : (at + len(piece)) * size]
            result = self._ns.put(piece, blocks, keys[at - 1] if at else None, self._left_s(), said)
            self._count(result)
            at += len(piece)
        self.last.denied_blocks += len(keys) - at

    def _save_states(
        self, states: StateStore, past: DynamicCache, row: int, pad: int, tokens: list[int]
    ) -> None:
        """Stores the copied states of a row, and the blocks before the last one."""
        copied = {at: state for at, state in self._snapshots.of_rows[row].items() if at <= len(tokens)}
        tokens = tokens[: max(copied, default=0)]
        self._save_row(past, row, pad, tokens)
        keys = self._keys(tokens)
        for at, state in sorted(copied.items()):
            if self.last.denied_blocks:
                self.last.denied_blocks += len(state)
            else:
                self._count(states.put(keys[at // self._shape.block_tokens - 1], state, self._left_s()))

    def _count(self, result: PutResult) -> None:
        self.last.stored_blocks += result.stored
        self.last.present_blocks += result.present
        self.last.denied_blocks += result.denied
        self.last.why = result.why

    def _keys(self, tokens: list[int]) -> list[Key]:
        return chain_keys(tokens, self._shape.block_tokens, self._salt)

    def _left_s(self) -> float:
        # A deadline of 0 would be misuse.
        return max(0.001, self._ends_s - time.monotonic())

    def _piece_blocks(self) -> int:
        return max(1, _PIECE_BYTES // self._shape.block_bytes)
