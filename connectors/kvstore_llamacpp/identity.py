"""Builds the namespace of a model: weights, form of its state, settings, kernels. No two models mix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp
from blake3 import blake3

from kvstore import Layout, files_digest, newest_file, process_started_ns
from kvstore.errors import MisuseError
from kvstore_llamacpp.state import StateForm

_OF_A_CONTEXT = {
    "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq",
    "n_threads", "n_threads_batch", "pooling_type", "defrag_thold", "cb_eval", "cb_eval_user_data",
    "abort_callback", "abort_callback_data", "embeddings", "no_perf", "kv_unified", "samplers", "n_samplers",
    "ctx_other",
}  # fmt: skip
"""Settings of a context on which no KV depends: sizes, threads, outputs, callbacks. Any other counts."""

_OF_A_MODEL = {
    "devices", "tensor_buft_overrides", "load_mode", "lazy_mode", "tensor_split", "progress_callback",
    "progress_callback_user_data", "kv_overrides", "vocab_only", "check_tensors", "no_alloc",
}  # fmt: skip
"""The same of a model: how its file is read. `checks` refuses `kv_overrides`."""

_VARIABLES = ("LLAMA_ATTN_ROT_DISABLE", "LLAMA_CPP_LIB_PATH")
"""Environment variables that change KV: whether quantised KV is rotated; the folder of another llama.cpp."""


def layout_of(llm: Any, form: StateForm, block_tokens: int, revision: str | None) -> Layout:
    """Returns the layout of a model's blocks. `revision` names the weights; None: a digest of the file.

    Raises MisuseError if a block is too large, or the file may have changed since it was loaded.
    """
    name = llm.metadata.get("general.name") or Path(llm.model_path).name
    settings = blake3(repr(sorted(settings_of(llm).items())).encode()).hexdigest(16)
    return Layout(
        model=name,
        revision=f"blake3:{weights_digest(llm.model_path)}" if revision is None else revision,
        dtype=", ".join(form.dtypes),
        block_tokens=block_tokens,
        block_bytes=block_tokens * form.token_bytes,
        kv_layout=f"llama.cpp state {llama_cpp.LLAMA_STATE_SEQ_VERSION}, tensor, column, token; "
        f"form {blake3(repr(form).encode()).hexdigest(16)}; settings {settings}",
    )


def settings_of(llm: Any) -> dict[str, str]:
    """Returns, by name, every setting other than weights that can change KV."""
    settings = {
        "architecture": llm.metadata["general.architecture"],
        "llama_cpp": llama_cpp.__version__,
        "instructions": llama_cpp.llama_print_system_info().decode(),
        "long context": _is_long(llm),
        "tensor_split": llm.tensor_split,
    }
    settings |= {name: os.environ.get(name, "") for name in _VARIABLES}
    settings |= _fields(llm.context_params, _OF_A_CONTEXT) | _fields(llm.model_params, _OF_A_MODEL)
    return {name: str(value) for name, value in settings.items()}


def weights_digest(path: str) -> str:
    """Returns the digest of a model's file, by name and content.

    Raises MisuseError if it changed after the start of the process, which may have loaded it before.
    """
    newest_ns = newest_file(path)[1]
    found = files_digest(path) if newest_ns < process_started_ns() else None
    if found is None or found.changed_ns != newest_ns:
        raise MisuseError(
            f"{path} was changed after the process started: it may have been loaded before",
            "start again, or name the weights with revision=",
        )
    return found.hexdigest


def _is_long(llm: Any) -> bool:
    """Returns whether a model with long RoPE uses the frequencies for long contexts."""
    prefix = llm.metadata["general.architecture"]
    trained = llm.metadata.get(f"{prefix}.rope.scaling.original_context_length")
    return bool(llm.n_ctx() > int(trained or llm.metadata.get(f"{prefix}.context_length", "0")))


def _fields(params: Any, without: set[str]) -> dict[str, Any]:
    return {name: getattr(params, name) for name, *_ in params._fields_ if name not in without}
