"""The llama.cpp connector: a cache for llama-cpp-python whose entries are blocks that prompts share."""

from kvstore_llamacpp.cache import Figures, KVStoreCache

__all__ = ["Figures", "KVStoreCache"]
