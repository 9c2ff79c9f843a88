"""Reads `kv_connector_extra_config` and refuses engines that cannot be served, with a ConfigError."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore.errors import ConfigError

SERVED_KINDS: dict[type, dict[str, Any]] = {
    FullAttentionSpec: {"non_causal": False, "tokens_per_state": 1},
    ChunkedLocalAttentionSpec: {"tokens_per_state": 1},
    MambaSpec: {
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "num_prefill_checkpoint_blocks": 0,
        "tp_replicated": False,
    },
    SlidingWindowSpec: {"extra_retained_tokens": 0, "tokens_per_state": 1},
}
"""The served kinds of KV cache, and the served values of their options. Subclasses are not served."""
SERVED_GROUPS = {
    "is_eagle_group": False,
    "host_resident": False,
    "enable_kv_transfer": True,
    "role": KVCacheGroupRole.DEFAULT,
}
"""The served properties of a group of layers."""
HINTS = {
    "MLAAttentionSpec": "latent attention is not served; "
    "VLLM_MLA_DISABLE=1 runs the model with full attention",
}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The options of the connector.

    `url`: the daemon; empty: KVSTORE_SOCKET or the default path. `deadline_s`: bounds every transfer. `load`:
    "async" (a request waits for its blocks while others run) or "sync" (the step waits). `block_tokens`:
    tokens of a stored block; 0: as many as a page. `weights_revision`: names the weights instead of
    their files or commit. `without_prefix_caching`: the reason to serve an engine with prefix caching off;
    empty: refuse.
    """

    url: str = ""
    deadline_s: float = 1.0
    load: str = "async"
    block_tokens: int = 0
    weights_revision: str = ""
    without_prefix_caching: str = ""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> ConnectorSettings:
        """Parses an engine's extra config. Raises ConfigError."""
        settings = _parsed(cls, extra, "kv_connector_extra_config")
        if settings.load not in ("async", "sync"):
            raise ConfigError(f"kv_connector_extra_config: load is {settings.load!r}", "async or sync")
        return settings

    def blocks_per_key(self, engine_block_tokens: int) -> int:
        """Returns the number of pages in a stored block. Raises ConfigError if it is not whole."""
        count, rest = divmod(self.block_tokens or engine_block_tokens, engine_block_tokens)
        if count < 1 or rest:
            raise ConfigError(
                f"kv_connector_extra_config: block_tokens is {self.block_tokens}",
                f"a multiple of the engine's block size, {engine_block_tokens}",
            )
        return count


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The options of the tier below vLLM's CPU tier. `deadline_s`: bounds every lookup, store and load."""

    url: str = ""
    deadline_s: float = 1.0
    weights_revision: str = ""

    @classmethod
    def of(cls, given: dict[str, Any]) -> TierSettings:
        """Parses an entry of `secondary_tiers`. Raises ConfigError."""
        return _parsed(cls, given, "secondary_tiers")


_Settings = TypeVar("_Settings", ConnectorSettings, TierSettings)


def _parsed(cls: type[_Settings], given: dict[str, Any], where: str) -> _Settings:
    """Returns the settings of the dictionary that is called `where`. Raises ConfigError."""
    known = {field.name: field for field in fields(cls)}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {name!r}", hint)
        kind = type(known[name].default)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ConfigError(f"{where}: {name} is {value!r}", f"a {kind.__name__}")
    settings = cls(**given)
    if not 0 < settings.deadline_s < 86400:
        raise ConfigError(f"{where}: deadline_s is {settings.deadline_s}", "seconds, more than 0")
    return settings


def check_model(model: Any) -> None:
    """Raises ConfigError for a model with an encoder, or that does not generate text."""
    if model.is_encoder_decoder:
        why = "an encoder, and attention to its output"
    elif model.runner_type == "pooling":
        why = "a pooler, which may need every token of a prompt computed"
    else:
        return
    raise ConfigError(
        f"the model {model.model!r} has {why}",
        "only models that write text by a decoder alone are served: leave out the connector",
    )


def check_engine(config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """Raises ConfigError for an engine whose blocks cannot be named, found again or restored."""
    transfer = config.kv_transfer_config
    _check_kept(config, kv_cache_config.kv_cache_groups)
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that is lost would fail "
            "its request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if settings.load == "sync":
        _check_sync(config)
    _check_load(kv_cache_config.kv_cache_groups, settings)


def check_tiered_engine(config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for an engine with vLLM's CPU tier that the tier below it cannot serve.

    vLLM gives a tier the block hashes of a request, but neither its adapter nor its images.
    """
    _check_kept(config, kv_cache_config.kv_cache_groups)
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "the engine's prefix caching is off, so it may be unable to start in the middle of a prompt",
            "set --enable-prefix-caching, or leave out the tier",
        )
    if config.lora_config is not None:
        raise ConfigError(
            "LoRA is on: vLLM names an adapter by name and path, and its files may change",
            "use KVStoreConnector, which names adapters by content",
        )
    if config.model_config.is_mm_prefix_lm:
        raise ConfigError(
            "images have bidirectional attention, so a prompt with images must be computed as a whole",
            "use KVStoreConnector, which leaves out such prompts",
        )
    if config.parallel_config.nnodes > 1:
        raise ConfigError(
            f"the engine has {config.parallel_config.nnodes} nodes: vLLM's CPU tier is memory of one node",
            "use KVStoreConnector",
        )


def _check_kept(config: Any, groups: Sequence[Any]) -> None:
    """Raises ConfigError for an engine whose blocks cannot be named or are not restored exactly."""
    cache, parallel = config.cache_config, config.parallel_config
    check_model(config.model_config)
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} seeds its block hashes at random: "
            "no other process, nor this one after a restart, would find a block again",
            "use sha256 or sha256_cbor, or set PYTHONHASHSEED to the same value everywhere",
        )
    if not groups:
        raise ConfigError("the model has no KV cache", "nothing is there to store: leave out the connector")
    for group in groups:
        _check_group(group)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}", "context parallelism is not served")
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales is on: another run would scale the same KV otherwise",
            "take the scales from the checkpoint",
        )
    speculative = config.speculative_config
    if speculative is not None and not speculative.use_ngram():
        raise ConfigError(
            f"speculative decoding by {speculative.method!r} keeps a draft's KV beside the model's",
            "only n-gram drafting is served",
        )


def _check_sync(config: Any) -> None:
    """Raises ConfigError if a step could read the pages of a failed synchronous load."""
    scheduler, stages = config.scheduler_config, config.parallel_config.pipeline_parallel_size
    if scheduler.long_prefill_token_threshold > 0:
        raise ConfigError(
            "load is 'sync' with --long-prefill-token-threshold: while a lost block is computed again in "
            "pieces, requests that share it would read it half done",
            "use async loads, or no threshold",
        )
    if scheduler.async_scheduling or stages > 1:
        beside = "async scheduling" if scheduler.async_scheduling else f"{stages} pipeline stages"
        raise ConfigError(
            f"load is 'sync' with {beside}: the next step starts on a block before its failed load is known",
            "use async loads, or --no-async-scheduling and one pipeline stage",
        )


def _check_load(groups: Sequence[Any], settings: ConnectorSettings) -> None:
    """Raises ConfigError for options that only one group of full attention is served with."""
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    if len(groups) > 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        what = f"the model's KV cache has {len(groups)} groups of layers ({kinds})"
        if settings.load == "sync":
            raise ConfigError(
                f"load is 'sync', and {what}: vLLM cannot be told of a block that is lost",
                "use async loads, or --disable-hybrid-kv-cache-manager",
            )
        if settings.block_tokens:
            raise ConfigError(
                f"block_tokens is {settings.block_tokens}, and {what}",
                "leave out block_tokens: blocks are as large as vLLM's",
            )


def _check_group(group: Any) -> None:
    """Raises ConfigError for a kind of KV cache that is not tested to be restored exactly."""
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    options = SERVED_KINDS.get(type(spec))
    if options is None:
        served = ", ".join(each.__name__ for each in SERVED_KINDS)
        hint = HINTS.get(kind, f"{served} are served: leave out the connector")
        raise ConfigError(f"the model's KV cache is of kind {kind}", hint)
    for of, name, served in [(spec, *each) for each in options.items()] + [
        (group, *each) for each in SERVED_GROUPS.items()
    ]:
        if (value := getattr(of, name, served)) != served:
            raise ConfigError(f"the model's KV cache has {name} {value!r}", f"only {served!r} is served")


def why_off(config: Any, settings: ConnectorSettings) -> str:
    """Returns the reason if nothing may be loaded or stored, as a clause; otherwise an empty string.

    An engine with prefix caching off may be unable to start in the middle of a prompt.
    """
    if config.cache_config.enable_prefix_caching or settings.without_prefix_caching:
        return ""
    return "the engine's prefix caching is off (by --no-enable-prefix-caching, or by vLLM for this model)"
