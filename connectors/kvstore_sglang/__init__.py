"""The SGLang connector: a storage backend of HiCache, for `--hicache-storage-backend dynamic`."""

from kvstore_sglang.storage import HiCacheKVStore

__all__ = ["HiCacheKVStore"]
