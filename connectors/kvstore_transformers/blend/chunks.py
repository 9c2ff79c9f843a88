"""`ChunkCache` stores documents as chunks, each computed alone, and puts them behind each other in any order.

A chunk's keys and values lack the attention to the documents before it, so this is lossy. A share of the
tokens is recomputed in their place, see `recompute`.

Not covered: the models that are served (`trial`, `checks`), the shift of keys (`rotation`), stored
blocks (`chunk_store`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvstore import Client, ExceptionBarrier
from kvstore_transformers.blend.chunk_store import ChunkStore, lossy_layout
from kvstore_transformers.blend.recompute import compute, lossy_cache, replace_deviating
from kvstore_transformers.blend.rotation import Rotation
from kvstore_transformers.blend.texts import Text, check_fits, check_share, chunks_of, tokens_of
from kvstore_transformers.blend.trial import check_blendable, try_blend
from kvstore_transformers.blocks import Columns
from kvstore_transformers.caches import last_logits_only, new_cache, position_arguments
from kvstore_transformers.checks import check_call, check_model
from kvstore_transformers.identity import settings_of
from kvstore_transformers.prefix import Figures, PrefixCache

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blend:
    """A prompt, and the cache of all its tokens but the last.

    `past_key_values` holds `tokens` tokens; `input_ids` is (1, tokens + 1). `restored_tokens` of the prefix
    and `loaded_tokens` of the chunks came from the store. `recomputed_tokens` of the loaded ones were
    computed again. All others were computed.
    """

    past_key_values: DynamicCache
    input_ids: Any
    tokens: int
    restored_tokens: int
    loaded_tokens: int
    recomputed_tokens: int

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments for one call of `model.generate`, in which the cache grows."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "past_key_values": self.past_key_values,
        }


class ChunkCache:
    """Stored chunks of documents for one model, one call at a time. Lossy: for those who accept that.

    Chunks are in an independent namespace whose layout is marked as lossy: a PrefixCache never reads them.
    The arguments are those of PrefixCache, and the namespace contains the same settings. Chunks with the same
    first blocks share them. Under different salts they share none.

    The constructor runs the model on a few tokens, and reads every weight once for a digest unless `revision`
    names the weights. Raises MisuseError for models and calls that cannot be served. Failures of the store
    are misses, counted in `failures` by operation.
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
        check_blendable(model)
        self._rotation = Rotation(model)
        self._prefixes = PrefixCache(model, client, block_tokens, revision, salt)
        self._shape = self._prefixes.shape
        try_blend(model, self._shape, self._rotation)
        self._model = model
        self._deadline_s = client.deadline_s
        self._store = ChunkStore(client.namespace(lossy_layout(self._prefixes.layout)), self._shape, salt)
        self._guard = ExceptionBarrier(_logger)
        self._settings = settings_of(model)

    @property
    def failures(self) -> Counter[str]:
        """The number of internal failures by operation; each counts as a miss."""
        return self._guard.failures + self._prefixes.failures

    @torch.no_grad()
    def store(self, chunks: Sequence[Text]) -> Figures:
        """Computes chunks that are not stored, each alone, and stores them. Returns counts of blocks.

        Takes the time of a prefill of the missing chunks: call it when documents are indexed, or after an
        answer. Stops at the first denied block, such as without a daemon. Each request to the daemon has the
        client's deadline.
        """
        self._check_model_is_as_it_was()
        texts = chunks_of(chunks, self._model.config)
        figures, blocks = Figures(prompt_tokens=sum(map(len, texts))), 0
        for tokens in texts:
            keys = self._store.keys(tokens)
            blocks += len(keys)
            # What is counted before the end of a chunk is all of it, or a block was denied.
            if figures.stored_blocks + figures.present_blocks + len(keys) == blocks:
                with self._guard("store"):
                    self._store_chunk(tokens, figures)
        figures.denied_blocks = blocks - figures.stored_blocks - figures.present_blocks
        return figures

    @torch.no_grad()
    def blend(
        self, chunks: Sequence[Text], question: Text, prefix: Text = (), recompute: float = 0.15
    ) -> Blend:
        """Returns a cache of prefix, chunks and question, in this order, for `model.generate`.

        Loads stored chunks and moves their keys to their places. Of the loaded tokens, the share `recompute`
        (0 to 1) whose keys and values deviate most is computed again; to find them, the first layer is
        computed for all. 0 computes nothing of loaded tokens; 1 loads nothing, and is a prefill. The prefix,
        such as a system prompt, the question, and chunks that are not stored are computed in full. The prefix
        is restored and stored as PrefixCache does it, exactly.

        Stores no chunk: see `store`. Waits for the store for at most one deadline of the client for the
        chunks, and two for the prefix.
        """
        config = self._model.config
        check_share(recompute)
        texts = chunks_of(chunks, config)
        head, tail = tokens_of("prefix", prefix, config, empty=True), tokens_of("question", question, config)
        tokens = [*head, *(token for text in texts for token in text), *tail]
        check_fits("the prompt", len(tokens), config)
        self._check_model_is_as_it_was()
        ids = torch.tensor(tokens, device=self._model.device)
        columns = Columns(self._shape, 1, len(tokens) - 1)
        restored = self._take_prefix(columns, ids[: len(head)])
        loaded, sources = self._load(columns, len(head), texts if recompute < 1 else [])
        past = lossy_cache(columns, config)
        self._move(past, loaded, sources)
        chosen = replace_deviating(self._model, past, ids, len(head), loaded, recompute)
        to_compute = ~loaded | chosen
        to_compute[: len(head)] = False
        compute(self._model, past, ids, to_compute.nonzero()[:, 0])
        return Blend(past, ids[None], len(tokens) - 1, restored, int(loaded.sum()), int(chosen.sum()))

    def _check_model_is_as_it_was(self) -> None:
        check_call(self._model, settings_of(self._model), self._settings)

    def _run(self, ids: Any, past: DynamicCache) -> None:
        """Runs the model over the tokens (tokens,) that a cache lacks."""
        at = int(past.get_seq_length())
        self._model(
            input_ids=ids[None, at:],
            past_key_values=past,
            use_cache=True,
            **position_arguments(self._model, at, len(ids)),
            **last_logits_only(self._model),
        )

    def _store_chunk(self, tokens: list[int], figures: Figures) -> None:
        keys = self._store.keys(tokens)
        first = self._store.stored(keys)
        figures.present_blocks += first
        if first < len(keys):
            past = new_cache(self._model.config)
            self._run(torch.tensor(tokens, device=self._model.device), past)
            whole = Columns(self._shape, 1, len(keys) * self._shape.block_tokens)
            whole.take([0], 0, past)
            self._store.put(whole.to_cache(new_cache(self._model.config)), keys, first, figures)

    def _take_prefix(self, columns: Columns, ids: Any) -> int:
        """Puts the exact prefix into the first columns. Returns how many of its tokens were stored."""
        if not len(ids):
            return 0
        past = self._prefixes.restore(ids[None])
        restored = self._prefixes.last.restored_tokens
        self._run(ids, past)
        self._prefixes.store(past, ids[None])
        columns.take([0], 0, past)
        return restored

    def _load(self, columns: Columns, start: int, chunks: list[list[int]]) -> tuple[Any, Any]:
        """Loads chunks into columns from `start` on.

        Returns which columns were loaded, and the position of each column's keys, (columns,) both.
        """
        loaded = torch.zeros(columns.width, dtype=torch.bool, device=self._model.device)
        sources = torch.arange(columns.width, device=self._model.device)
        ends_s = time.monotonic() + self._deadline_s
        for tokens in chunks:
            n = 0
            with self._guard("load"):
                n = self._store.load(columns, start, tokens, ends_s)
            loaded[start : start + n] = True
            sources[start : start + n] -= start
            start += len(tokens)
        return loaded, sources

    def _move(self, past: DynamicCache, loaded: Any, sources: Any) -> None:
        """Turns the keys of loaded columns from their positions in their chunks to those in the prompt."""
        targets = loaded.nonzero()[:, 0]
        if len(targets):
            for layer in past.layers:
                at = targets.to(layer.keys.device)
                layer.keys[:, :, at] = self._rotation.move(layer.keys[:, :, at], sources[targets], targets)
