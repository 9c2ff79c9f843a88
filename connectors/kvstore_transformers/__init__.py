"""The transformers connector: restores stored prefixes before `model.generate`, stores new blocks after."""

from kvstore_transformers.prefix import Figures, PrefixCache

__all__ = ["Figures", "PrefixCache"]
