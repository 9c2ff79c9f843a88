"""Reads `kv_connector_extra_config` and refuses engines that cannot be served, with a ConfigError."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvstore import parse_options
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
    MLAAttentionSpec: {
        "non_causal": False,
        "tokens_per_state": 1,
        "cache_dtype_str": "auto",
        "model_version": None,
        "cache_role": SparseCacheRole.SPARSE,
        "is_index_group_leader": False,
        "non_causal_multi_token_decode": False,
    },
    SlidingWindowSpec: {"extra_retained_tokens": 0, "tokens_per_state": 1},
}
"""The served kinds of KV cache, and the served values of their options. Subclasses are not served."""
SERVED_STATES = ("GDN_ATTN", "SHORT_CONV")
"""The served kinds of recurrent layers, by vLLM's name for their kernels: those that a test covers."""
SERVED_GROUPS = {
    "host_resident": False,
    "enable_kv_transfer": True,
    "role": KVCacheGroupRole.DEFAULT,
}
"""The served properties of a group of layers. vLLM drops the last block of a hit if a group has a draft."""
SERVED_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
"""The served values of --kv-cache-dtype, beside the model's dtype. Some others keep scales beside the pages.

vLLM's CPU kernels accept all, but write values of the model's size into pages for smaller ones, and so over
pages of other blocks.
"""
SERVED_DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "ngram_gpu": {},
    "draft_model": {"kv_cache_dtype": None, "parallel_drafting": False, "use_heterogeneous_vocab": False},
    "eagle": {"kv_cache_dtype": None, "parallel_drafting": False},
    "eagle3": {"kv_cache_dtype": None, "parallel_drafting": False},
    "mtp": {"kv_cache_dtype": None, "parallel_drafting": False},
}
"""The served methods of speculative decoding, and the served values of their options."""
HINTS = {
    "mamba_cache_mode": "only 'align' is served: start vLLM with --enable-prefix-caching",
    "num_prefill_checkpoint_blocks": "only 0 is served, so no Mamba-2 layers: leave out the connector",
}
"""Hints on options of a kind of KV cache that are not served."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The options of the connector.

    `url`: the daemon, or several, separated by commas, which share the engine's shards; empty: KVSTORE_SOCKET
    or the default path. `deadline_s`: bounds every transfer. `lookup_deadline_s`: bounds every lookup, for
    which the scheduler waits. `load`: "async" (a request waits for its blocks while others run) or "sync"
    (the step waits). `block_tokens`: tokens of a stored block; 0: as many as a page. `weights_revision`:
    names the weights instead of their files or commit. `without_prefix_caching`: the reason to serve an
    engine with prefix caching off; empty: refuse.
    """

    url: str = ""
    deadline_s: float = 1.0
    lookup_deadline_s: float = 0.05
    load: str = "async"
    block_tokens: int = 0
    weights_revision: str = ""
    without_prefix_caching: str = ""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> ConnectorSettings:
        """Parses an engine's extra config. Raises ConfigError."""
        settings = parse_options(cls, extra, "kv_connector_extra_config")
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
        return parse_options(cls, given, "secondary_tiers")


def check_model(model: Any) -> None:
    """Raises ConfigError for a model with an encoder, or that does not generate text."""
    for refusal in refusals_of_model(model):
        raise refusal


def refusals_of_model(model: Any) -> Iterator[ConfigError]:
    """Yields why a model is refused before its KV is laid out."""
    if model.is_encoder_decoder:
        why = "an encoder, and attention to its output"
    elif model.runner_type == "pooling":
        why = "a pooler, which may need every token of a prompt computed"
    else:
        return
    yield ConfigError(
        f"the model {model.model!r} has {why}",
        "only models that write text by a decoder alone are served: leave out the connector",
    )


def check_engine(config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """Raises ConfigError for an engine whose blocks cannot be named, found again or restored."""
    for refusal in refusals(config, kv_cache_config, settings):
        raise refusal


def refusals(config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> Iterator[ConfigError]:
    """Yields every reason why the blocks of an engine cannot be named, found again or restored."""
    transfer = config.kv_transfer_config
    yield from _refusals_of_blocks(config, kv_cache_config)
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        yield ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that is lost would fail "
            "its request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if settings.load == "sync":
        yield from _refusals_of_sync(config)
    yield from _refusals_of_load(kv_cache_config.kv_cache_groups, settings)
    if config.speculative_config is not None:
        yield from _refusals_of_draft(config, kv_cache_config.kv_cache_groups, settings)


def check_tiered_engine(config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for an engine with vLLM's CPU tier that the tier below it cannot serve.

    vLLM gives a tier the block hashes of a request, but neither its adapter nor its images.
    """
    for refusal in _refusals_of_blocks(config, kv_cache_config):
        raise refusal
    if config.speculative_config is not None and config.speculative_config.uses_draft_kv_cache():
        raise ConfigError(
            f"speculative decoding by {config.speculative_config.method!r} keeps KV of a draft",
            "use KVStoreConnector",
        )
    if config.scheduler_config.async_scheduling and any(
        isinstance(each.kv_cache_spec, MambaSpec) for each in kv_cache_config.kv_cache_groups
    ):
        raise ConfigError(
            "the model has recurrent layers, and scheduling is asynchronous: of prompts that come in parts, "
            "vLLM offloads states that hold dropped tokens",
            "use KVStoreConnector, or --no-async-scheduling",
        )
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


def _refusals_of_blocks(config: Any, kv_cache_config: Any) -> Iterator[ConfigError]:
    """Yields why the blocks of an engine cannot be named or are not restored exactly."""
    cache, parallel, groups = config.cache_config, config.parallel_config, kv_cache_config.kv_cache_groups
    yield from refusals_of_model(config.model_config)
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        yield ConfigError(
            f"--prefix-caching-hash-algo {algorithm} seeds its block hashes at random: "
            "no other process, nor this one after a restart, would find a block again",
            "use sha256 or sha256_cbor, or set PYTHONHASHSEED to the same value everywhere",
        )
    if not groups:
        yield ConfigError("the model has no KV cache", "nothing is there to store: leave out the connector")
    for group in groups:
        yield from _refusals_of_group(group)
    # A state within a block has no key of its own.
    alignment = kv_cache_config.cache_hit_alignment_tokens
    sizes = [group.kv_cache_spec.block_size for group in groups]
    if alignment and any(alignment % size for size in sizes):
        yield ConfigError(
            f"prefixes end at multiples of {alignment} tokens, within blocks of {max(sizes)} tokens",
            "leave out --prefix-match-unit and --mamba-block-size",
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield ConfigError(f"{name} is {getattr(parallel, name)}", "context parallelism is not served")
    if config.weight_transfer_config is not None:
        yield ConfigError(
            "weight_transfer_config is set: the weights change while the engine runs, and blocks have the "
            "name of those at its start",
            "leave out the connector",
        )
    own = str(config.model_config.dtype).removeprefix("torch.")
    if cache.cache_dtype not in (*SERVED_CACHE_DTYPES, own):
        yield ConfigError(
            f"--kv-cache-dtype is {cache.cache_dtype}, and the model's dtype is {own}",
            f"{', '.join(SERVED_CACHE_DTYPES)} are served, and the model's dtype",
        )
    if getattr(cache, "calculate_kv_scales", False):
        yield ConfigError(
            "calculate_kv_scales is on: another run would scale the same KV otherwise",
            "take the scales from the checkpoint",
        )


def _refusals_of_draft(
    config: Any, groups: Sequence[Any], settings: ConnectorSettings
) -> Iterator[ConfigError]:
    """Yields why speculative decoding has KV that is not tested to be restored exactly."""
    speculative = config.speculative_config
    what = f"speculative decoding by {speculative.method!r}"
    if speculative.method not in SERVED_DRAFTS:
        yield ConfigError(f"{what} is not served", f"{', '.join(SERVED_DRAFTS)} are")
        return
    if not speculative.uses_draft_kv_cache():
        return
    for name, served in SERVED_DRAFTS[speculative.method].items():
        if (value := getattr(speculative, name, served)) != served:
            yield ConfigError(f"{what} has {name} {value!r}", f"only {served!r} is served")
    if speculative.use_gemma4_mtp():
        yield ConfigError(f"{what} reads the KV of the model", "only drafts with KV of their own are served")
    if speculative.use_multi_module_mtp():
        yield ConfigError(
            f"{what} has several layers that draft", "only one is served: set num_speculative_tokens to 1"
        )
    size = config.parallel_config.tensor_parallel_size
    if speculative.draft_parallel_config.tensor_parallel_size != size:
        yield ConfigError(
            f"{what}: the draft has another tensor parallelism than the model",
            f"set draft_tensor_parallel_size to {size}",
        )
    if settings.load == "sync":
        yield ConfigError(f"load is 'sync' with {what}", "use async loads")
    if settings.block_tokens:
        yield ConfigError(
            f"block_tokens is {settings.block_tokens} with {what}",
            "leave out block_tokens: blocks are as large as vLLM's",
        )
    for group in groups:
        kind = type(group.kv_cache_spec)
        # DeepSeek-V3 is published with a layer for MTP.
        latent = issubclass(kind, MLAAttentionSpec) and not (speculative.method == "mtp" and len(groups) == 1)
        if latent or issubclass(kind, (ChunkedLocalAttentionSpec, MambaSpec)):
            yield ConfigError(
                f"{what}, and the model's KV cache has a group of kind {kind.__name__}",
                "drafts are served with full attention and sliding windows, MTP with latent attention too",
            )


def drops_last_block(config: Any) -> bool:
    """Returns whether vLLM drops the last block of a hit: the draft needs the model's output there."""
    speculative = config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def _refusals_of_sync(config: Any) -> Iterator[ConfigError]:
    """Yields whether a step could read the pages of a failed synchronous load."""
    scheduler, stages = config.scheduler_config, config.parallel_config.pipeline_parallel_size
    if scheduler.long_prefill_token_threshold > 0:
        yield ConfigError(
            "load is 'sync' with --long-prefill-token-threshold: while a lost block is computed again in "
            "pieces, requests that share it would read it half done",
            "use async loads, or no threshold",
        )
    if scheduler.async_scheduling or stages > 1:
        beside = "async scheduling" if scheduler.async_scheduling else f"{stages} pipeline stages"
        yield ConfigError(
            f"load is 'sync' with {beside}: the next step starts on a block before its failed load is known",
            "use async loads, or --no-async-scheduling and one pipeline stage",
        )


def _refusals_of_load(groups: Sequence[Any], settings: ConnectorSettings) -> Iterator[ConfigError]:
    """Yields options that only one group of full attention is served with."""
    if not groups:
        return
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    if len(groups) > 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        what = f"the model's KV cache has {len(groups)} groups of layers ({kinds})"
        if settings.load == "sync":
            yield ConfigError(
                f"load is 'sync', and {what}: vLLM cannot be told of a block that is lost",
                "use async loads, or --disable-hybrid-kv-cache-manager",
            )
        if settings.block_tokens:
            yield ConfigError(
                f"block_tokens is {settings.block_tokens}, and {what}",
                "leave out block_tokens: blocks are as large as vLLM's",
            )


def _refusals_of_group(group: Any) -> Iterator[ConfigError]:
    """Yields why a kind of KV cache is not tested to be restored exactly."""
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    options = SERVED_KINDS.get(type(spec))
    if options is None:
        served = ", ".join(each.__name__ for each in SERVED_KINDS)
        yield ConfigError(
            f"the model's KV cache is of kind {kind}", f"{served} are served: leave out the connector"
        )
        return
    for of, name, served in [(spec, *each) for each in options.items()] + [
        (group, *each) for each in SERVED_GROUPS.items()
    ]:
        if (value := getattr(of, name, served)) != served:
            hint = HINTS.get(name, f"only {served!r} is served")
            yield ConfigError(f"the model's KV cache has {name} {value!r}", hint)
    if isinstance(spec, MambaSpec) and (state := spec.mamba_type.name) not in SERVED_STATES:
        yield ConfigError(
            f"the model has recurrent layers of kind {state}",
            f"{' and '.join(SERVED_STATES)} are served: leave out the connector",
        )


def why_off(config: Any, settings: ConnectorSettings) -> str:
    """Returns the reason if nothing may be loaded or stored, as a clause; otherwise an empty string.

    An engine with prefix caching off may be unable to start in the middle of a prompt.
    """
    if config.cache_config.enable_prefix_caching or settings.without_prefix_caching:
        return ""
    return "the engine's prefix caching is off (by --no-enable-prefix-caching, or by vLLM for this model)"
