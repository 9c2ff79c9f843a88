"""A kvstore daemon as L2 of LMCache's server: a plugin adapter, see `adapter`."""

from kvstore_lmcache.adapter import KVStoreAdapter

__all__ = ["KVStoreAdapter"]
