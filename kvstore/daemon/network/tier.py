"""The network tier: blocks on a backend that several nodes share.

A downloaded block enters the core as a put does: through a reservation, and verified before the commit. An
uploaded block leaves the core through a lease that does not count as a use. So the core does not know the
network, and a slow or failed network delays no request for blocks that are on this node.

The network tier is not a `Tier` of the core. Of `tiers.base.StorageTier` it has `start` and `close` only. It
has no extents and no slots to format, renew, remove, grow or drop. `existence` asks for objects by name, but
compares no checksums as `probe` does. The backend owns its capacity and evicts by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.config import Network
from kvstore.core import events as ev
from kvstore.core.policy.admission import Rule
from kvstore.daemon.network.deletion import Deletion
from kvstore.daemon.network.downloads import Downloads
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.epochs import Epochs
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.daemon.network.requests import NetworkRequests
from kvstore.daemon.network.tasks import Tasks
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import EventLog
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.tiers.dram import DramTier
from kvstore.tiers.network.base import Backend


class NetworkTier:
    """Composes the parts of one daemon's network tier, starts and stops them.

    Callers use the parts: `requests`, `deletion`, `uploads`, `existence`, `eligibility`, `epochs`, `tasks`.
    """

    def __init__(
        self,
        backend: Backend,
        config: Network,
        *,
        core: Executor,
        dram: DramTier,
        namespaces: Namespaces,
        encrypts: Callable[[int], bool],
        event_log: EventLog,
        random_bits: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        """`encrypts` returns whether a tenant's blocks are encrypted at rest. The last two: see `Daemon`."""
        executor = BackendExecutor(core, backend, config.threads, config.timeout, self._health_changed)
        tasks, eligibility = Tasks(core.loop, namespaces), Eligibility(executor, encrypts)
        existence = ExistenceChecks(executor, eligibility, core.now)
        downloads = Downloads(core, dram, executor, eligibility, existence, tasks, config.hedge_after)
        uploads = Uploads(core, dram, namespaces, executor, eligibility, existence, tasks)
        self.requests = NetworkRequests(core, executor, eligibility, existence, tasks, downloads, uploads)
        self.epochs = Epochs(core, executor, eligibility, namespaces, tasks, event_log, random_bits, clock)
        self.deletion = Deletion(executor, eligibility, existence, tasks, uploads, self.epochs)
        eligibility.ask_epochs = self.epochs.ask
        self.epochs.on_known = self.deletion.epoch_known
        self.epochs.on_deleted = self.deletion.retry_later
        self.tasks = tasks
        self.eligibility = eligibility
        self.existence = existence
        self.uploads = uploads
        self._downloads = downloads
        self._executor = executor
        self._core = core
        self._event_log = event_log
        self._config = config
        self._rule: Rule | None = None

    def start(self) -> None:
        """Starts the health checks. The backend is used once it is healthy."""
        self._executor.start()
        self.epochs.start()

    async def close(self, within_s: float) -> None:
        """Cancels all tasks and closes the backend.

        Waits up to `within_s` for calls under way. No memory is touched afterwards by a backend that keeps
        its contract.
        """
        self.tasks.cancel_all()
        await self._executor.close(within_s)

    def reconfigure(self, config: Network) -> None:
        """Applies the settings that can change at run time."""
        self._config = config
        self._executor.timeout_s = config.timeout
        self._downloads.hedge_after_s = config.hedge_after
        self._set_sharing()

    def set_tenant(self, event: ev.SetTenant) -> None:
        """Applies a tenant's weight and bandwidth cap."""
        self._executor.device.queue.set(event.tenant, event.weight, event.rate, event.burst)

    def _health_changed(self, problem: str) -> None:
        self._event_log.add(EntryKind.NETWORK, detail=problem or "in use")
        self.existence.clear()
        self.epochs.check_all()
        self._set_sharing()

    def _set_sharing(self) -> None:
        """Has the core offer blocks for upload while the backend is usable."""
        config = self._config
        rule = Rule(config.admission, config.admission_threshold) if self._executor.usable else None
        if rule != self._rule:
            self._rule = rule
            self._core.handle(ev.SetSharing(rule))

    def status(self) -> dict[str, Any]:
        """Returns the network part of `kvstore status`, as plain values."""
        executor = self._executor
        return {
            "kind": executor.backend.kind,
            "usable": executor.usable,
            "problem": executor.problem,
            "bandwidth_bytes_per_s": round(executor.device.bandwidth(self._core.now())),
            "coming_blocks": len(self._downloads),
            "going_blocks": len(self.uploads),
            "owed_removals": self.deletion.owed,
            "counters": dict(executor.counters),
        }
