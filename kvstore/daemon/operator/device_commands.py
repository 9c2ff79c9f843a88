"""Operator commands about devices, eviction policy and copies between tiers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from kvstore.core.queues.device_queue import DEMAND, DRAINING, FENCED, PREFETCH, SCRUB, SERVING, WRITE_BACK
from kvstore.core.view import AdmissionStatus, TierView, TransferStatus
from kvstore.daemon.operator.command import MOST_AT_ONCE, check_limit, command
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.tier_set import DRAM
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.errors import MisuseError

CLASSES = {"demand": DEMAND, "prefetch": PREFETCH, "write_back": WRITE_BACK, "scrub": SCRUB}
_CLASS_NAMES = {kind: name for name, kind in CLASSES.items()}


@dataclass(slots=True, eq=False)
class DeviceCommands:
    """Shows and sets the state of devices."""

    _core: Executor
    _namespaces: Namespaces
    _authenticator: Authenticator

    @command
    def policy(self) -> dict[str, Any]:
        """Returns the eviction policy, the available policies, and the policy's state in each tier.

        `pools_left` is above 0 during a change of policy.
        """
        tiers = [{"tier": tier.name, **asdict(tier.policy())} for tier in self._tiers]
        return {**asdict(self._core.view.policy()), "available": sorted(POLICIES), "tiers": tiers}

    @command
    def devices(self) -> dict[str, Any]:
        """Returns the devices of all tiers."""
        return {"devices": [self._shown(tier) for tier in self._tiers]}

    @command
    def device(self, name: str) -> dict[str, Any]:
        """Returns one device."""
        return self._shown(self._tier(name))

    @command
    def set_device(self, name: str, state: str, instead_of: str | None) -> dict[str, Any]:
        """Lets a device serve, drain or be fenced until the next change or restart. Returns the device.

        With `instead_of`, nothing changes unless the device is in that state.
        """
        tier = self._tier(name)
        if state not in (SERVING, DRAINING, FENCED):
            raise MisuseError(f"there is no state {state!r:.80}", f"{SERVING}, {DRAINING} or {FENCED}")
        if tier.number == DRAM and state != SERVING:
            raise MisuseError(f"{name} can't be {state}: all that is read and written passes it")
        if tier.leaving:
            raise MisuseError(f"{name} is being removed", "it is read until it is empty, and not written")
        before = self._shown(tier)
        if instead_of is not None and before["state"] != instead_of:
            return {"otherwise": before}
        if tier.number != DRAM:
            self._core.handle(ev.SetDevice(tier.number, state))
        return self.device(name)

    @command
    def transfers(self, after: int = 0, limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Returns at most `limit` copies between tiers with numbers above `after`, queued or under way."""
        check_limit(limit)
        some = self._core.view.transfers(after, limit + 1)
        return {"transfers": [self._transfer(each) for each in some[:limit]], "more": len(some) > limit}

    @property
    def _tiers(self) -> list[TierView]:
        return [tier for tier in self._core.view.tiers if not tier.gone]

    def _tier(self, name: str) -> TierView:
        by_name = {tier.name: tier for tier in self._tiers}
        if name not in by_name:
            raise MisuseError(f"there is no device {name!r:.80}", f"there are {', '.join(by_name)}")
        return by_name[name]

    def _shown(self, tier: TierView) -> dict[str, Any]:
        health, now = tier.health(), self._core.now()
        written = tier.admission(now).written_per_day_bytes
        limit = tier.spec.limit_bytes
        return {
            **brief(tier, now),
            "name": tier.name,
            "state": "leaving" if tier.leaving else health.state,
            "hangs": health.fenced,
            "readable": health.readable,
            "writable": health.writable,
            "bandwidth_bytes_per_s": round(tier.traffic(now).bandwidth_bytes_per_s),
            "written_in_a_day_bytes": written,
            "drive_writes_a_day": written / limit if limit else 0.0,
        }

    def _transfer(self, transfer: TransferStatus) -> dict[str, Any]:
        namespace, tiers = self._namespaces.at(transfer.namespace), self._core.view.tiers
        return {
            "number": transfer.number,
            "source": tiers[transfer.source].name,
            "target": tiers[transfer.target].name,
            "class": _CLASS_NAMES[transfer.kind],
            "state": "moving" if transfer.started else "queued",
            "tenant": self._authenticator.name(transfer.tenant),
            "namespace": "" if namespace is None else namespace.fingerprint.hex(),
            "blocks": transfer.blocks,
            "bytes": transfer.nbytes,
        }


def brief(tier: TierView, now: float) -> dict[str, Any]:
    """Returns the counters of one device at `now` (s)."""
    traffic = tier.traffic(now)
    return {
        "tier": tier.name,
        "queued_bytes": {name: traffic.queued_bytes[kind] for name, kind in CLASSES.items()},
        "moving_bytes": {name: traffic.moving_bytes[kind] for name, kind in CLASSES.items()},
        "moving": traffic.copies,
        "admission": _admission(tier.admission(now)),
    }


def _admission(status: AdmissionStatus) -> dict[str, Any]:
    return {
        "mode": status.rule.mode,
        "threshold": status.threshold,
        "bytes_a_day": status.rule.bytes_a_day,
        "written_bytes": status.written_bytes,
        "refused_blocks": status.refused_blocks,
        "spent": status.spent,
    }
