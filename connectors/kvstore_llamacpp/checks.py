"""Refuses models and settings that cannot be served. Each refusal is a MisuseError with a hint."""

from __future__ import annotations

from typing import Any

import llama_cpp

from kvstore.errors import MisuseError
from kvstore_llamacpp.state import SERVED_VERSIONS

SERVED_MODELS = ("gemma2", "gemma3", "gpt-oss", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Architectures, as GGUF files name them, whose KV depends on the prefix alone. All are tested."""

_USED = ("_is_hybrid", "_is_recurrent", "_requires_eval", "ctx", "input_ids", "metadata", "n_tokens")
"""What the connector uses of a Llama beside its documented methods."""

_CAUSAL = (llama_cpp.LLAMA_ATTENTION_TYPE_UNSPECIFIED, llama_cpp.LLAMA_ATTENTION_TYPE_CAUSAL)


def check_model(llm: Any, revision: str | None) -> None:
    """Refuses a Llama whose KV depends on more than tokens, or is not kept in full."""
    versions = (llama_cpp.LLAMA_SESSION_VERSION, llama_cpp.LLAMA_STATE_SEQ_VERSION)
    if versions not in SERVED_VERSIONS:
        raise MisuseError(
            f"llama.cpp writes states of versions {versions[0]} and {versions[1]}",
            f"served are {' or '.join(f'{whole} and {one}' for whole, one in SERVED_VERSIONS)}",
        )
    for name in _USED:
        if not hasattr(llm, name):
            raise MisuseError(
                f"{type(llm).__name__} has no {name}", "pass a Llama, of a release that is served"
            )
    architecture = llm.metadata.get("general.architecture", "unknown")
    if llm._is_recurrent or llm._is_hybrid:
        raise MisuseError(
            f"{architecture} is a recurrent or hybrid model", "no part of its state is that of a prefix"
        )
    if architecture not in SERVED_MODELS:
        raise MisuseError(
            f"the architecture {architecture} is not tested", f"served are {', '.join(SERVED_MODELS)}"
        )
    if int(llm.metadata.get("split.count", "1")) > 1 and revision is None:
        raise MisuseError(
            f"the weights of {llm.model_path} are in several files", "name all of them with revision="
        )
    _check_settings(llm)
    check_call(llm)


def check_call(llm: Any) -> None:
    """Refuses a Llama with parts that can be changed after its construction."""
    if llm.chat_handler is not None:
        raise MisuseError(
            f"{type(llm.chat_handler).__name__} puts more than text into the context",
            "stored blocks are found by token ids alone: take a Llama without a chat_handler",
        )
    if llm.draft_model is not None:
        raise MisuseError("the Llama has a draft_model", "speculative decoding is not tested: leave it out")


def _check_settings(llm: Any) -> None:
    params = llm.context_params
    if llm.lora_path is not None:
        raise MisuseError(f"a LoRA is set: {llm.lora_path}", "it changes KV: merge it into the model's file")
    if llm.kv_overrides:
        raise MisuseError(
            f"kv_overrides has {', '.join(llm.kv_overrides)}", "the model's file no longer names its KV"
        )
    if params.embeddings:
        raise MisuseError("the Llama is made for embeddings", "only completions can be served")
    if llm._logits_all:
        raise MisuseError("logits_all is set", "restored tokens have no logits: leave it out")
    if params.attention_type not in _CAUSAL:
        raise MisuseError(f"attention_type is {params.attention_type}", "only causal attention can be served")
    if llama_cpp.llama_model_n_swa(llm.model) > 0 and not params.swa_full:
        raise MisuseError(
            "swa_full is False, and the model has sliding windows",
            "KV outside a window is lost, so a shorter prompt would continue without it: leave swa_full out",
        )
