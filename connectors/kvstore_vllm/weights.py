"""Names the weights of an engine: by option, by the hub's commit, or by the content of local files."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config.load import LoadConfig

import kvstore
from kvstore.errors import ConfigError

_HINT = "set weights_revision in kv_connector_extra_config"

_READ_OWN_FILES = {
    "auto", "hf", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "safetensors", "sharded_state",
}  # fmt: skip
"""Load formats whose weights come from the files of the model."""


class Weights(kvstore.Weights):
    """The weights of one model of vLLM."""

    __slots__ = ()
    engine = "vLLM"
    hint = _HINT
    logger = logging.getLogger("vllm.kvstore")


def weights_of(config: Any, given: str) -> Weights:
    """Returns the weights of an engine's model. `given`: the option.

    Raises ConfigError if nothing names them.
    """
    return _weights(config.model_config, config.load_config, given)


def draft_of(config: Any, given: str) -> Weights | None:
    """Returns the weights of a draft model whose KV lies beside the model's, see `weights_of`.

    None: there is no such draft, or the model's own files may have the draft in them.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    draft, load = speculative.draft_model_config, speculative.draft_load_config
    if draft.model == config.model_config.model:
        return None
    return _weights(draft, load or config.load_config, given)


def _weights(model: Any, load: LoadConfig, given: str) -> Weights:
    if given or load.load_format == "dummy":
        return Weights(given or "dummy")
    # Of a model in an object store, the local files are its configuration alone.
    if model.model_weights:
        raise ConfigError(f"nothing tells which weights are in {model.model_weights!r}", _HINT)
    if load.load_format not in _READ_OWN_FILES:
        raise ConfigError(
            f"with load_format {load.load_format!r} nothing tells which weights are read", _HINT
        )
    return Weights.of_model(model.model, getattr(model.hf_config, "_commit_hash", None), _chosen(load))


def _chosen(load: LoadConfig) -> str:
    """Returns what selects the files to read among those of a model; empty: vLLM's default."""
    extra, default = load.model_loader_extra_config, LoadConfig()
    options = {
        "load_format": load.load_format if load.load_format != default.load_format else None,
        "ignore_patterns": load.ignore_patterns if load.ignore_patterns != default.ignore_patterns else None,
        "pattern": extra.get("pattern") if isinstance(extra, dict) else None,
    }
    return "".join(f", {name} {value}" for name, value in options.items() if value is not None)
