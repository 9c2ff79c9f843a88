"""What a daemon has stored of an engine's prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import TEST_FOLDER, hicache


def watched(daemon: LocalDaemon, folder: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine whose layout `layout_of` reads. `options`: see `hicache`."""
    folder.mkdir(exist_ok=True)
    backend = "tests.engines.sglang.backend:Watched"
    return {"environment": {TEST_FOLDER: str(folder)}, **hicache(daemon, backend=backend, **options)}


def layout_of(folder: Path, rank: int = 0, pool: str = "") -> Layout:
    """`pool`: "swa" for that of windows."""
    return Layout(**json.loads((folder / "-".join(filter(None, [f"layout-{rank}", pool]))).read_text()))


def keys_of(tokens: list[int], page_tokens: int) -> list[bytes]:
    """SGLang's hashes of the whole pages of a prompt."""
    keys, key = [], b""
    for at in range(0, len(tokens) - page_tokens + 1, page_tokens):
        key = hashlib.sha256(key + np.array(tokens[at : at + page_tokens], "<u4").tobytes()).digest()
        keys.append(key)
    return keys


def zero(daemon: LocalDaemon, layout: Layout, keys: list[bytes]) -> None:
    """Stores zeros instead of a prompt's blocks."""
    with Client(daemon.url, deadline_s=10.0) as client:
        namespace = client.namespace(layout)
        assert namespace.lookup(keys) == len(keys) > 0
        namespace.invalidate(keys)
        zeros = np.zeros((len(keys), layout.block_bytes), np.uint8)
        assert namespace.put(keys, zeros).stored == len(keys)
