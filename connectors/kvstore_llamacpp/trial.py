"""A short run that proves, with the model and devices at hand, that a state built of blocks is enough.

It detects what settings do not show: state outside the caches, and bytes that a backend does not give back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.errors import MisuseError
from kvstore_llamacpp import context
from kvstore_llamacpp.state import NewState, StateForm

_TOKENS = 24
_PREFIX = 16
_BLOCK = 8

_TOLERANCE = 0.3
"""The largest relative difference of logits due to rounding: wide enough for a router of experts."""


def try_prefix(llm: Any) -> StateForm:
    """Returns the form of a model's states. The context is empty afterwards.

    Raises MisuseError if a run that continues from a built state differs from one that has evaluated all
    tokens, and StateError if the state is not served.
    """
    if (size := len(llm.input_ids)) < _TOKENS:
        raise MisuseError(f"a context of {size} tokens", f"at least {_TOKENS} are needed: raise n_ctx")
    tokens = [(1 + 7 * i) % llm.n_vocab() for i in range(_TOKENS)]
    try:
        context.clear(llm)
        expected = context.logits(llm, tokens)
        state = context.read(llm)
        if state.n_tokens != _TOKENS:
            raise MisuseError(f"{_TOKENS} tokens were evaluated, the state has {state.n_tokens}", _HINT)
        blocks = state.blocks(_BLOCK, 0, _PREFIX // _BLOCK)
        built = NewState(state.form, _PREFIX)
        built.fill(_BLOCK, 0, blocks)
        context.replace(llm, built.raw, tokens[:_PREFIX])
        if not np.array_equal(context.read(llm).blocks(_BLOCK, 0, len(blocks)), blocks):
            raise MisuseError("llama.cpp has not kept a state as it was given", _HINT)
        _compare(context.logits(llm, tokens[_PREFIX:]), expected)
    finally:
        context.clear(llm)
    return state.form


_HINT = "only models whose state is their KV can be served"


def _compare(ours: Any, theirs: Any) -> None:
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    # NaN does not match.
    if not np.linalg.norm(ours - theirs) <= _TOLERANCE * np.linalg.norm(theirs):
        raise MisuseError("a run that continues from a stored state gives other logits", _HINT)
