"""What tiny random models answer in llama-cpp-python, with and without a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama

F32, Q4_0, Q8_0 = llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_Q4_0, llama_cpp.GGML_TYPE_Q8_0
BF16 = 30  # llama-cpp-python has no name for it
KINDS: dict[str, dict[str, Any]] = {
    "f16": {},
    "f16 flash": {"flash_attn": True},
    "bf16": {"type_k": BF16, "type_v": BF16},
    "f32": {"type_k": F32, "type_v": F32},
    "keys q8_0": {"type_k": Q8_0},
    "q8_0 flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
    "q4_0 flash": {"type_k": Q4_0, "type_v": Q4_0, "flash_attn": True},
}
"""Types of KV. Values are by token with flash attention, which quantised ones need, transposed without."""


def loaded(path: Path, **options: Any) -> Llama:
    """A Llama on one thread: with more of them, bits may differ."""
    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7}
    return Llama(str(path), **{**settings, **options})


def answer(llm: Llama, prompt: list[int], n: int = 12) -> tuple[str, list[Any]]:
    """The text of a completion, and the logits before each of its tokens."""
    seen: list[Any] = []

    def note(_: Any, scores: Any) -> Any:
        seen.append(np.array(scores))
        return scores

    said = llm.create_completion(
        prompt, max_tokens=n, temperature=0.0, logits_processor=llama_cpp.LogitsProcessorList([note])
    )
    return said["choices"][0]["text"], seen


def same(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> bool:
    """Whether text and logits are equal, bit for bit."""
    return one[0] == other[0] and np.array_equal(np.array(one[1]), np.array(other[1]))


def split_answer(
    llm: Llama, prompt: list[int], at: int, first: Sequence[int] = (), n: int = 12
) -> tuple[str, list[Any]]:
    """What a Llama without a store answers that has the first `at` tokens of the prompt in its context.

    It has evaluated them with all tokens of `first`, by default the prompt: kernels may round rows
    differently in batches of other sizes.
    """
    llm.reset()
    if at:
        llm.eval(first or prompt)
        llm._ctx.kv_cache_seq_rm(-1, at, -1)
        llm.n_tokens = at
        llm._requires_eval = True
    return answer(llm, prompt, n)
