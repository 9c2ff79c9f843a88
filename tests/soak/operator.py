"""What happens to a daemon in production: changes by operators, and failures around it."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvstore import Client
from kvstore.errors import KVStoreError

POLICIES = "hazard", "lru", "s3fifo", "arc"
QUOTAS = "64MiB", "128MiB", "256MiB"
_OUTAGE_S = 3.0


class Operator:
    """Does one thing at a time to a daemon that serves. `done` counts what was done, or its error."""

    def __init__(self, url: str, shared: Path, tenants: list[str], seed: int) -> None:
        """`shared`: the folder of the network tier."""
        self._url = url
        self._shared = shared
        self._tenants = tenants
        self._dice = random.Random(seed)
        self.done: Counter[str] = Counter()

    def act(self) -> str:
        """Does one of the things. Returns its name."""
        what = self._dice.choice((self.set_policy, self.set_quota, self.drain_device, self.network_outage))
        try:
            what()
        except KVStoreError as error:
            self.done[f"{what.__name__}: {type(error).__name__}"] += 1
        else:
            self.done[what.__name__] += 1
        return what.__name__

    def set_policy(self) -> None:
        """Another eviction policy."""
        self._change({"policy": {"eviction": self._dice.choice(POLICIES)}})

    def set_quota(self) -> None:
        """Another limit of a tenant."""
        tenant = self._dice.choice(self._tenants)
        self._change({"tenants": {tenant: {"dram": {"limit": self._dice.choice(QUOTAS)}}}})

    def drain_device(self) -> None:
        """The second device is drained for a while."""
        with Client(self._url, deadline_s=10.0) as client:
            client.control("set_device", name="nvme1", state="draining", instead_of=None)
            try:
                time.sleep(_OUTAGE_S)
            finally:
                client.control("set_device", name="nvme1", state="serving", instead_of=None)

    def network_outage(self) -> None:
        """The shared folder is away for a while."""
        away = self._shared.with_name("away")
        self._shared.rename(away)
        time.sleep(_OUTAGE_S)
        # The daemon may have made a new one.
        with suppress(OSError):
            self._shared.rmdir()
        if not self._shared.exists():
            away.rename(self._shared)

    def _change(self, patch: dict[str, object]) -> None:
        with Client(self._url, deadline_s=10.0) as client:
            client.control("change", patch=patch, dry_run=False)
