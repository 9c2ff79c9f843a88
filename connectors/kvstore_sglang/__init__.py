"""The SGLang connector: a storage backend of HiCache, for `--hicache-storage-backend dynamic`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_sglang.storage import HiCacheKVStore

__all__ = ["HiCacheKVStore"]


def __getattr__(name: str) -> Any:
    """Imports the backend when SGLang asks for it: `python -m kvstore_sglang` sets an environment first."""
    if name != "HiCacheKVStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_sglang.storage import HiCacheKVStore  # noqa: PLC0415

    return HiCacheKVStore
