"""The connector with more time for a lookup: beside other tests, the 50 ms of users can be too short."""

from kvstore_vllm import KVStoreConnector, lookup

__all__ = ["KVStoreConnector"]

lookup.LOOKUP_DEADLINE_S = 0.5
