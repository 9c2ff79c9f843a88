"""Runs engines and an operator against one daemon, and watches it."""

from __future__ import annotations

import hashlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from kvstore import Client
from kvstore.errors import KVStoreError
from kvstore.lab.local_daemon import LocalDaemon
from tests.soak.fleet import TENANTS, Fleet, token_of
from tests.soak.operator import Operator
from tests.soak.outcome import Life, Outcome, Plan
from tests.soak.picture import write
from tests.soak.samples import sample
from tests.soak.vault import TENANT, Vault
from tests.tiers.nvme.disks import Ext4

_SAMPLE_EVERY_S = 1.0
_ACT_EVERY_S, _KILL_ENGINE_EVERY_S = 12.0, 20.0


def run(plan: Plan, out: Path | None, stream: TextIO) -> Outcome:
    """Runs the plan. Writes samples and a picture to the folder `out`, if there is one.

    A run that is interrupted has failed, but tells what it has seen.
    """
    outcome = Outcome(plan)
    try:
        _live(plan, outcome, stream)
    except (KeyboardInterrupt, SystemExit):
        outcome.failures.append("it was interrupted")
    outcome.judge()
    if out is not None:
        write(out, [(life.times_s, life.samples) for life in outcome.lives])
    return outcome


def _live(plan: Plan, outcome: Outcome, stream: TextIO) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as raw, _second_disk(Path(raw), stream) as disk:
        folder = Path(raw)
        settings = _settings(folder, disk or folder)
        with (
            LocalDaemon(settings, supervised=True) as daemon,
            Fleet(daemon.url, plan.rate, plan.seed) as fleet,
        ):
            operator = Operator(daemon, folder, list(TENANTS), disk, plan.seed)
            outcome.done = operator.done
            watch = _Watch(daemon, folder, fleet, operator, outcome, stream)
            dice = random.Random(plan.seed)
            for number in range(plan.lives):
                if number:
                    watch.end_life(dice.choice(("killed", "handed over", "stopped")))
                watch.live(plan.life_s(number))


@contextmanager
def _second_disk(folder: Path, stream: TextIO) -> Iterator[Path | None]:
    """Yields the folder of a small file system; None, and says so, if this user may not mount one."""
    disk = Ext4(folder / "disk", 176 << 20)
    if not disk.make():
        print("no disk fills up: this user may not mount a file system", file=stream)
        yield None
        return
    try:
        yield disk.folder
    finally:
        disk.unmount()


class _Watch:
    """Samples a daemon, and makes things happen to it."""

    def __init__(
        self,
        daemon: LocalDaemon,
        folder: Path,
        fleet: Fleet,
        operator: Operator,
        outcome: Outcome,
        stream: TextIO,
    ) -> None:
        self._daemon = daemon
        self._folder = folder
        self._fleet = fleet
        self._operator = operator
        self._outcome = outcome
        self._stream = stream
        self._vault = Vault(daemon.url)
        self._vault.fill()

    def live(self, seconds: float) -> None:
        """Watches the daemon for one life."""
        life = Life()
        self._outcome.lives.append(life)
        started = act_at = time.monotonic()
        kill_at = started + _KILL_ENGINE_EVERY_S
        acting = threading.Thread(target=self._operator.act)
        acting.start()
        while (now := time.monotonic()) < started + seconds:
            if now >= act_at + _ACT_EVERY_S and not acting.is_alive():
                acting, act_at = threading.Thread(target=self._operator.act), now
                acting.start()
            if now >= kill_at:
                self._fleet.kill_one()
                self._outcome.counts["engines killed"] += 1
                kill_at = now + _KILL_ENGINE_EVERY_S
            self._collect(life)
            self._sample(life)
            if self._stream.isatty():
                hits = self._outcome.counts["hits"]
                said = f"{now - started:6.0f} s of life {len(self._outcome.lives)}, {hits:,} hits"
                print(f"\r{said}", end="", flush=True, file=self._stream)
            time.sleep(_SAMPLE_EVERY_S)
        acting.join()
        self._look_into_vault("at the end of a life")

    def end_life(self, how: str) -> None:
        """Ends the daemon in one of three ways, and starts it again. Only a stop loses DRAM."""
        self._outcome.counts[f"daemons {how}"] += 1
        if how == "handed over":
            self._daemon.restart()
        else:
            self._daemon.kill() if how == "killed" else self._daemon.stop()
            self._daemon.start()
        if how == "stopped":
            self._vault.fill()
        else:
            self._look_into_vault(f"after the daemon was {how}")

    def _look_into_vault(self, when: str) -> None:
        self._outcome.counts["looks into the vault"] += 1
        if lost := self._vault.lost():
            self._outcome.failures.append(f"{lost} blocks within a floor are lost {when}")

    def _collect(self, life: Life) -> None:
        for report in self._fleet.reports():
            self._outcome.counts += report.counts
            self._outcome.failures += report.wrong
            life.gets += [(time.monotonic(), ms) for ms in report.get_ms]
        self._outcome.failures += [
            f"the engine of {tenant} has died" for tenant in self._fleet.restart_dead()
        ]

    def _sample(self, life: Life) -> None:
        try:
            with Client(self._daemon.url, deadline_s=10.0) as client:
                status = client.status()
            life.samples.append(sample(self._daemon.pid, self._folder, status))
        except (KVStoreError, OSError) as error:
            self._outcome.failures.append(f"the daemon does not answer: {error}")
            return
        life.times_s.append(time.monotonic())
        life.counters = dict(status["counters"])


def _settings(folder: Path, second: Path) -> dict[str, dict[str, Any]]:
    """Returns the daemon's configuration: small tiers, which soon are full, as are all tables.

    `second`: where the second device has its folder.
    """
    (folder / "shared").mkdir()
    settings: dict[str, dict[str, Any]] = {
        "dram": {"limit": "256MiB", "huge_pages": False},
        "nvme": {"path": folder / "nvme", "limit": "256MiB"},
        "nvme.devices.nvme1": {"path": second / "nvme1", "limit": "128MiB"},
        "network": {"url": f"file://{folder / 'shared'}", "limit": "512MiB", "timeout": "500ms"},
        "scrub": {"rate": "1MiB"},
        "limits": {"namespaces_per_tenant": 32},
    }
    for tenant in (*TENANTS, TENANT):
        digest = hashlib.sha256(token_of(tenant).encode()).hexdigest()
        settings[f"tenants.{tenant}.dram"] = {"limit": "128MiB", "floor": "32MiB" if tenant == TENANT else 0}
        settings[f"[tenants.{tenant}.tokens]"] = {"hash": f"sha256:{digest}", "role": "admin"}
    return settings
