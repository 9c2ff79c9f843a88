"""Blocks of a tenant with a floor: no load of others, and no restart that keeps DRAM, may lose one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore import Client
from tests.daemons import names, payloads, room_for
from tests.soak.engines import CHAIN
from tests.soak.fleet import token_of

TENANT = "vault"
KEYS = names(64, TENANT)
_WITHIN_S = 30.0


class Vault:
    """The blocks of the tenant `vault`, whose floor in DRAM they fit into."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._payloads = payloads(KEYS, CHAIN.block_bytes)

    def fill(self) -> None:
        """Stores the blocks that are not stored."""
        self._until_all(lambda space: space.put(KEYS, self._payloads))

    def lost(self) -> int:
        """Returns how many blocks are lost or differ. Asks again for a while: a busy daemon answers late."""
        return self._until_all(lambda space: None)

    def _until_all(self, do: Callable[[Any], Any]) -> int:
        ends, found = time.monotonic() + _WITHIN_S, 0
        with Client(self._url, token_of(TENANT), deadline_s=10.0) as client:
            space = client.namespace(CHAIN)
            while found < len(KEYS) and time.monotonic() < ends:
                do(space)
                out = room_for(len(KEYS), CHAIN.block_bytes)
                n = space.get(KEYS, out)
                found = n if np.array_equal(out[:n], self._payloads[:n]) else 0
        return len(KEYS) - found
