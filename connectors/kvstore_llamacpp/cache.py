"""`KVStoreCache`: a cache for `Llama.set_cache`, whose blocks all prompts and processes share.

llama-cpp-python asks a cache before a prompt, and gives it the whole state of the context after the answer.
This one answers with the longest stored prefix, and puts it into the context itself: a LlamaState would be
copied three more times, with logits of 4 bytes for each word of the vocabulary.

Not covered: the models and settings that are served (`checks`), the layout of bytes (`state`), namespaces
(`identity`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llama_cpp import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

from kvstore import Client, ExceptionBarrier, Key, chain_keys
from kvstore.errors import MisuseError
from kvstore_llamacpp import context
from kvstore_llamacpp.blocks import common_prefix, load_blocks, store_blocks
from kvstore_llamacpp.checks import check_call, check_model
from kvstore_llamacpp.identity import layout_of
from kvstore_llamacpp.state import NewState, State, StateError
from kvstore_llamacpp.trial import try_prefix

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Figures:
    """The counts of one completion: tokens of its prompt, and blocks to be stored.

    `restored_tokens` come from the store, `held_tokens` were in the context before, as of the turn before.
    `present_blocks` were stored before. `denied_blocks` were not stored, because of no daemon, no room or no
    expected use; `why` has the reason.
    """

    prompt_tokens: int = 0
    held_tokens: int = 0
    restored_tokens: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    denied_blocks: int = 0
    why: str = ""


class InContext(LlamaState):
    """Names the tokens that the context holds already, in `input_ids`. It cannot be loaded."""

    def __init__(self, tokens: Sequence[int]) -> None:
        # The rest is absent on purpose.
        self.input_ids = np.array(tokens, np.intc)
        self.n_tokens = len(tokens)

    def __getattr__(self, name: str) -> Any:
        raise MisuseError(
            f"a state of KVStoreCache has no {name}: it is in the context of the Llama of the cache",
            "make a KVStoreCache for each Llama",
        )


class KVStoreCache(BaseLlamaCache):
    """Stored prefixes for one Llama: `llm.set_cache(KVStoreCache(llm, client))`.

    `last` has the counts of the latest completion. The constructor evaluates a few tokens, which empties the
    context, to prove that a stored state is enough to continue, and reads the model's file once for a digest,
    so that models with different weights share no blocks. `revision` names the weights instead. The namespace
    also contains the types of KV, flash attention, RoPE settings, versions and processor. A block has
    `block_tokens` tokens. Prompts under different salts share no blocks.

    Raises MisuseError for a Llama that cannot be served. Failures of the store are misses, counted in
    `failures` by operation and in `Figures.denied_blocks`. A completion spends at most one deadline of the
    client on restoring and one on storing. Blocks that arrive later are evaluated or not stored.
    """

    def __init__(
        self, llm: Any, client: Client, block_tokens: int = 64, revision: str | None = None, salt: bytes = b""
    ) -> None:
        if block_tokens < 1:
            raise MisuseError(f"block_tokens is {block_tokens}", "at least 1 token a block")
        super().__init__(capacity_bytes=0)  # the daemon has the limits
        check_model(llm, revision)
        self.last = Figures()
        self._llm = llm
        self._block_tokens = block_tokens
        self._salt = salt
        self._deadline_s = client.deadline_s
        self._ends_s = 0.0
        self._stored_bytes = 0
        self._guard = ExceptionBarrier(_logger)
        self._form = try_prefix(llm)
        layout = layout_of(llm, self._form, block_tokens, revision)
        self._ns = client.namespace(layout)

    @property
    def failures(self) -> Counter[str]:
        """The number of internal failures by operation; each counts as a miss."""
        return self._guard.failures

    @property
    def cache_size(self) -> int:
        """The bytes that this cache has stored. The daemon may have evicted some."""
        return self._stored_bytes

    def __contains__(self, key: Sequence[int]) -> bool:
        """Returns whether a prefix of the tokens is stored."""
        self._start()
        with self._guard("lookup"):
            return self._ns.lookup(self._keys(key), self._left_s(), prompt=0) > 0
        return False

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Puts the longest stored prefix of the tokens into the context, and returns its tokens.

        Raises KeyError if none is longer than the one in the context, and for every failure.
        """
        self._start()
        self.last = Figures()
        with self._guard("restore"):
            tokens, held = list(key), common_prefix(self._llm._input_ids, key)
            self.last = Figures(prompt_tokens=len(tokens), held_tokens=held)
            check_call(self._llm)
            if n := self._restore(tokens, held):
                self.last.held_tokens, self.last.restored_tokens = 0, n
                return InContext(tokens[:n])
        raise KeyError("no longer prefix is stored")

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Stores the blocks of the tokens in the context that are not stored yet.

        `value` must be the state of the context, as `Llama.save_state` returns it.
        """
        self._start()
        self.last = replace(self.last, stored_blocks=0, present_blocks=0, denied_blocks=0, why="")
        with self._guard("store"):
            check_call(self._llm)
            self._store(value.input_ids[: value.n_tokens].tolist())

    # -- restore

    def _restore(self, tokens: list[int], held: int) -> int:
        """Returns how many tokens the context now has from the store; 0 if it is as before, or empty."""
        keys = self._keys(tokens)
        found = self._ns.lookup(keys, self._left_s(), prompt=len(keys))
        if found * self._block_tokens <= held:
            return 0
        state = NewState(self._form, found * self._block_tokens)
        arrived = load_blocks(self._ns, keys[:found], state, self._left_s)
        n = arrived * self._block_tokens
        if n <= held:
            return 0
        if arrived < found:
            state = self._shortened(state, arrived)
        context.replace(self._llm, state.raw, tokens[:n])
        return n

    def _shortened(self, state: NewState, count: int) -> NewState:
        """Returns the state of the first `count` blocks of another."""
        shorter = NewState(self._form, count * self._block_tokens)
        shorter.fill(self._block_tokens, 0, State(state.raw).blocks(self._block_tokens, 0, count))
        return shorter

    # -- store

    def _store(self, tokens: list[int]) -> None:
        if not np.array_equal(self._llm._input_ids, tokens):
            raise MisuseError("the state to store is not that of the context", "make a cache for each Llama")
        keys = self._keys(tokens)
        at = self._ns.lookup(keys, self._left_s(), prompt=0)
        self.last.present_blocks += at
        if at == len(keys):
            return
        state = context.read(self._llm)
        if state.form != self._form:
            raise StateError("the state of the context has another form than at the start")
        keys = keys[: state.n_tokens // self._block_tokens]
        # With a salt, tokens do not identify a block.
        said = None if self._salt else tokens
        result = store_blocks(self._ns, keys, at, state, said, self._left_s)
        self._stored_bytes += result.stored * self._ns.layout.block_bytes
        self.last.stored_blocks += result.stored
        self.last.present_blocks += result.present
        self.last.denied_blocks += result.denied
        self.last.why = result.why

    # -- within

    def _start(self) -> None:
        self._ends_s = time.monotonic() + self._deadline_s

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        # A context has more cells than a Llama has places for tokens: llama.cpp rounds their number up.
        return chain_keys(tokens[: len(self._llm.input_ids)], self._block_tokens, self._salt)

    def _left_s(self) -> float:
        # A deadline of 0 would be misuse.
        return max(0.001, self._ends_s - time.monotonic())
