"""Reads and replaces what a context of llama.cpp holds. Each call copies the bytes once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from kvstore_llamacpp.state import Bytes, State, StateError


def read(llm: Any) -> State:
    """Returns the state of everything in a context. Raises StateError."""
    # The state of the sequence alone lacks the tokens outside the windows of a model with windows.
    size = llama_cpp.llama_state_get_size(llm.ctx)
    raw = np.empty(size, np.uint8)
    written = llama_cpp.llama_state_get_data(llm.ctx, _pointer(raw), size)
    if not 0 < written <= size:
        raise StateError(f"llama.cpp has written {written} of {size} bytes of a state")
    return State(raw[:written])


def replace(llm: Any, raw: Bytes, tokens: Sequence[int]) -> None:
    """Gives a context the state of these tokens, and nothing else. If it fails, the context is empty.

    Raises StateError if llama.cpp refuses the state.
    """
    clear(llm)
    read_bytes = llama_cpp.llama_state_seq_set_data(llm.ctx, _pointer(raw), len(raw), 0)
    if read_bytes != len(raw):
        clear(llm)
        raise StateError(f"llama.cpp has read {read_bytes} of {len(raw)} bytes of a state")
    llm.input_ids[: len(tokens)] = tokens
    llm.n_tokens = len(tokens)  # reset has set that the next token needs logits


def clear(llm: Any) -> None:
    """Empties a context."""
    llm.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), False)


def logits(llm: Any, tokens: Sequence[int]) -> Any:
    """Evaluates tokens behind those in the context. Returns the logits of the last one."""
    llm.eval(tokens)
    last = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(last, (llm.n_vocab(),)).copy()


def _pointer(raw: Bytes) -> Any:
    return raw.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
