"""The llama.cpp connector: prompts and processes share blocks of a sequence's state.

`KVStoreCache` is a cache for llama-cpp-python. `kvstore_llamacpp.proxy` serves llama-server, and needs no
llama-cpp-python: so this module imports it only for those who ask for a name of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_llamacpp.cache import Figures, KVStoreCache

__all__ = ["Figures", "KVStoreCache"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvstore_llamacpp import cache  # noqa: PLC0415

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
