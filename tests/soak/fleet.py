"""The engines of a soak: a process for each tenant, killed and started again now and then."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

from bench.harness import PROCESSES
from tests.soak.engines import Report, serve

TENANTS = "amber", "birch", "cedar", "drift", "ember"
_END_WITHIN_S = 10.0


class Fleet:
    """Runs an engine for each tenant during the `with` block, `rate` steps a second each."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self._url = url
        self._rate = rate
        self._dice = random.Random(seed)
        self._started = 0
        self._stop = PROCESSES.Event()
        # A pipe each, because a process that is killed while it writes into a queue blocks the others.
        self._engines: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> Fleet:
        for tenant in TENANTS:
            self._start(tenant)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for process, reports in self._engines.values():
            process.join(_END_WITHIN_S)
            process.kill()
            reports.close()

    def reports(self) -> list[Report]:
        """Returns what the engines have reported since the last call."""
        found: list[Report] = []
        for _, reports in self._engines.values():
            with suppress(EOFError, OSError):
                while reports.poll():
                    found.append(reports.recv())
        return found

    def kill_one(self) -> None:
        """Kills an engine, wherever it is, and starts another one for its tenant."""
        tenant = self._dice.choice(TENANTS)
        process, reports = self._engines[tenant]
        process.kill()
        process.join()
        reports.close()
        self._start(tenant)

    def restart_dead(self) -> list[str]:
        """Starts engines again that have died by themselves. Returns their tenants."""
        dead = [tenant for tenant, (process, _) in self._engines.items() if not process.is_alive()]
        for tenant in dead:
            self._start(tenant)
        return dead

    def _start(self, tenant: str) -> None:
        self._started += 1
        reports, ours = PROCESSES.Pipe(duplex=False)
        arguments = self._url, token_of(tenant), tenant, self._started, self._rate, self._stop, ours
        process = PROCESSES.Process(target=serve, args=arguments, daemon=True)
        process.start()
        ours.close()
        self._engines[tenant] = process, reports


def token_of(tenant: str) -> str:
    """Returns a tenant's token."""
    return f"kvs_soak_{tenant}"
