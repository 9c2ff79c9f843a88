"""transformers connector: stored prefixes restored around `model.generate`, new blocks stored after it."""

from kvstore_transformers.prefix import Figures, PrefixCache

__all__ = ["Figures", "PrefixCache"]
