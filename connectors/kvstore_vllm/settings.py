"""What users set in `kv_connector_extra_config`, and which engines cannot be served. Raises ConfigError."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """`url` of the daemon (empty: KVSTORE_SOCKET, or the default path); `deadline_s` bounds every transfer;
    `load` is "async" (requests wait for their blocks while others run) or "sync" (the step waits);
    `block_tokens` a stored block holds (0: as many as the engine's own); `weights_revision` names the weights
    where files cannot, or across machines.
    """

    url: str = ""
    deadline_s: float = 1.0
    load: str = "async"
    block_tokens: int = 0
    weights_revision: str = ""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Settings:
        """The settings in an engine's extra config."""
        known = {field.name: field for field in fields(cls)}
        for name, value in extra.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config: unknown key {name!r}", hint)
            kind = type(known[name].default)
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise ConfigError(f"kv_connector_extra_config: {name} is {value!r}", f"a {kind.__name__}")
        settings = cls(**extra)
        if settings.load not in ("async", "sync"):
            raise ConfigError(f"kv_connector_extra_config: load is {settings.load!r}", "async or sync")
        if not 0 < settings.deadline_s < 86400:
            raise ConfigError(
                f"kv_connector_extra_config: deadline_s is {settings.deadline_s}", "seconds, more than 0"
            )
        return settings

    def blocks_per_key(self, engine_block_tokens: int) -> int:
        """How many engine blocks a stored block holds."""
        count, rest = divmod(self.block_tokens or engine_block_tokens, engine_block_tokens)
        if count < 1 or rest:
            raise ConfigError(
                f"kv_connector_extra_config: block_tokens is {self.block_tokens}",
                f"a multiple of the engine's block size, {engine_block_tokens}",
            )
        return count


def check_engine(config: Any, kv_cache_config: Any, settings: Settings) -> None:
    """Raises ConfigError for an engine whose blocks we could not name, find again or restore."""
    cache, parallel, transfer = config.cache_config, config.parallel_config, config.kv_transfer_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} seeds its block hashes at random: "
            "no other process, nor this one after a restart, would find a block again",
            "use sha256 or sha256_cbor, or set PYTHONHASHSEED to the same value everywhere",
        )
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that is lost would fail "
            "its request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if settings.load == "sync" and config.scheduler_config.long_prefill_token_threshold > 0:
        raise ConfigError(
            "load is 'sync' with --long-prefill-token-threshold: while a lost block is computed again in "
            "pieces, requests that share it would read it half done",
            "use async loads, or no threshold",
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model's KV cache has {len(groups)} groups of layers", "only one kind of attention is served"
        )
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
