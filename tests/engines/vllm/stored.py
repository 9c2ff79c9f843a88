"""What a daemon has stored of an engine's prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import Client, Layout
from tests.engines.vllm.engine import Engine


def blocks_of(engine: Engine, client: Client, asked: list[int], group: int) -> tuple[list[bytes], Any]:
    """The keys of a prompt's stored blocks of a group, and their namespace."""
    namespace = client.namespace(Layout(**engine("layout", group=group)))
    keys = [bytes.fromhex(key) for key in engine("keys", prompt=asked, group=group)]
    return [key for key, there in zip(keys, namespace.contains(keys), strict=True) if there], namespace


def replace_payloads(engine: Engine, url: str, asked: list[int], zero: bool) -> None:
    """Stores a prompt's blocks of all groups again: the same bytes, or zeros."""
    with Client(url, deadline_s=10.0) as client:
        for group in range(engine("groups")):
            keys, ns = blocks_of(engine, client, asked, group)
            assert keys
            payloads = np.empty((len(keys), ns.layout.block_bytes), np.uint8)
            assert ns.get(keys, payloads) == len(keys)
            ns.invalidate(keys)
            if zero:
                payloads[:] = 0
            assert ns.put(keys, payloads).stored == len(keys)
