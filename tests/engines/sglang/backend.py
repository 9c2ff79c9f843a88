"""The backend with a door for tests: which namespace it has, and exceptions in its functions.

The folder that `TEST_FOLDER` names has the files `layout-RANK`, `layout-RANK-POOL`, `place`, `raised` and
`escaped`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvstore_sglang.pages
import kvstore_sglang.storage
from kvstore import Client, Namespace
from kvstore_sglang import HiCacheKVStore
from tests.engines.sglang.engine import TEST_FOLDER

PLACES = {
    "decoded": (kvstore_sglang.storage, "_decoded"),
    "layout_of": (kvstore_sglang.storage, "layout_of"),
    "open": (HiCacheKVStore, "_open"),
    "load": (HiCacheKVStore, "_load"),
    "store": (HiCacheKVStore, "_store"),
    "parent": (HiCacheKVStore, "_parent"),
    "pages.ids": (kvstore_sglang.pages.HostPages, "ids"),
    "pages.save": (kvstore_sglang.pages.HostPages, "save"),
    "pages.load": (kvstore_sglang.pages.HostPages, "load"),
    "restorable": (kvstore_sglang.storage, "_restorable"),
    "client.put": (Client, "put"),
    "client.lookup": (Client, "lookup"),
    "namespace.lookup": (Namespace, "lookup"),
    "namespace.acquire": (Namespace, "acquire"),
}
"""The functions that the hooks of SGLang lead to."""


def _raising(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function; it raises instead while the file `place` has this name."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        folder = Path(os.environ[TEST_FOLDER])
        wanted = folder / "place"
        if wanted.exists() and wanted.read_text() == place:
            with (folder / "raised").open("a") as file:
                file.write(f"{place}\n")
            raise RuntimeError(f"injected in {place}")
        return function(*arguments, **options)

    return call


def _watched(hook: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a hook of SGLang. Notes an exception, which SGLang logs alone, in the file `escaped`."""
    try:
        return hook(*arguments, **options)
    except BaseException as error:
        (Path(os.environ[TEST_FOLDER]) / "escaped").write_text(repr(error))
        raise


class Watched(HiCacheKVStore):
    """Writes its layouts to the files `layout-RANK`, and `layout-RANK-POOL` for a pool of windows."""

    def __init__(self, *arguments: Any) -> None:
        for place, (owner, name) in PLACES.items():
            setattr(owner, name, _raising(place, getattr(owner, name)))
        super().__init__(*arguments)

    def batch_exists(self, *arguments: Any) -> int:
        return int(_watched(super().batch_exists, *arguments))

    def batch_get_v1(self, *arguments: Any) -> list[bool]:
        return list(_watched(super().batch_get_v1, *arguments))

    def batch_set_v1(self, *arguments: Any) -> list[bool]:
        return list(_watched(super().batch_set_v1, *arguments))

    def batch_exists_v2(self, *arguments: Any) -> Any:
        return _watched(super().batch_exists_v2, *arguments)

    def batch_get_v2(self, *arguments: Any, **options: Any) -> Any:
        return _watched(super().batch_get_v2, *arguments, **options)

    def batch_set_v2(self, *arguments: Any, **options: Any) -> Any:
        return _watched(super().batch_set_v2, *arguments, **options)

    def _open(self, *pool: Any) -> Any:
        namespace, pages = super()._open(*pool)
        name = f"layout-{self._config.tp_rank + self._config.pp_rank}"
        file = Path(os.environ[TEST_FOLDER]) / "-".join([name, *(each for each in pool if each != "kv")])
        if namespace is not None and not file.exists():
            file.write_text(json.dumps(asdict(namespace.layout)))
        return namespace, pages
