"""The connector's modules and SGLang's pool, for tests without an engine."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # SGLang says at import what it does not do on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolTransfer
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from kvstore_sglang import HiCacheKVStore, identity, pages, settings, storage, weights

__all__ = [
    "AsymmetricMHATokenToKVPoolHost",
    "HiCacheFile",
    "HiCacheKVStore",
    "HostTensorAllocator",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPoolHost",
    "PoolHitPolicy",
    "PoolTransfer",
    "identity",
    "pages",
    "settings",
    "storage",
    "weights",
]
