"""The transformers connector: restores stored prefixes before `model.generate`, stores new blocks after."""

from kvstore_transformers.blend.chunks import Blend, ChunkCache
from kvstore_transformers.prefix import Figures, PrefixCache

__all__ = ["Blend", "ChunkCache", "Figures", "PrefixCache"]
