"""What happens to a daemon in production: changes by operators, and failures around it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvstore import Client
from kvstore.errors import KVStoreError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually

POLICIES = "hazard", "lru", "s3fifo", "arc"
QUOTAS = "64MiB", "128MiB", "256MiB"
_OUTAGE_S = 3.0


class Operator:
    """Does one thing at a time to a daemon that serves. `done` counts what was done, or its error."""

    def __init__(
        self, daemon: LocalDaemon, data: Path, tenants: list[str], disk: Path | None, seed: int
    ) -> None:
        """`data`: has `shared`, the network tier. `disk`: the second device's file system; None: skipped."""
        self._daemon = daemon
        self._url = daemon.url
        self._data = data
        self._shared = data / "shared"
        self._tenants = tenants
        self._disk = disk
        self._dice = random.Random(seed)
        self._devices = 0
        self.done: Counter[str] = Counter()
        self._things = [self.set_policy, self.set_quota, self.drain_device, self.network_outage]
        self._things += [self.reload, self.swap_device, *([self.fill_disk] if disk is not None else [])]

    def act(self) -> str:
        """Does one of the things. Returns its name."""
        what = self._dice.choice(self._things)
        try:
            what()
        except KVStoreError as error:
            why = error.message.partition(":")[0]
            self.done[f"{what.__name__}: {type(error).__name__}, {why}"] += 1
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

    def reload(self) -> None:
        """The file changes, and the daemon is told by SIGHUP."""
        file, rate = self._daemon.folder / "kvstore.toml", f"{self._dice.randint(1, 64)}MiB"
        file.write_text(re.sub(r'(?m)^rate = ".*"$', f'rate = "{rate}"', file.read_text()))
        os.kill(self._daemon.pid, signal.SIGHUP)
        with Client(self._url, deadline_s=10.0) as client:
            in_use = lambda: client.control("settings", part=["scrub", "rate"])["value"] == rate  # noqa: E731
            eventually(in_use, 20)

    def swap_device(self) -> None:
        """A third device comes, and leaves. A daemon takes a bounded number of devices in its life."""
        self._devices += 1
        path = self._data / f"nvme2-{self._devices}"
        path.mkdir()
        self._change({"nvme": {"devices": {"nvme2": {"path": str(path), "limit": "64MiB"}}}})
        time.sleep(_OUTAGE_S)
        self._change({"nvme": {"devices": {"nvme2": None}}})
        with Client(self._url, deadline_s=10.0) as client:
            eventually(lambda: "nvme2" not in [each["name"] for each in client.status()["tiers"]], 60)
        shutil.rmtree(path)

    def fill_disk(self) -> None:
        """The second device's file system has no room for a while."""
        assert self._disk is not None
        ballast = self._disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        time.sleep(_OUTAGE_S)
        ballast.unlink()

    def _change(self, patch: dict[str, object]) -> None:
        with Client(self._url, deadline_s=10.0) as client:
            client.control("change", patch=patch, dry_run=False)
