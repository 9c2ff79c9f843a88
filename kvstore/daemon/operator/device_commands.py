"""What operators ask about policies, devices and copies between tiers, and have devices do."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from kvstore.core import events as ev
from kvstore.core.blocks.topology import TierState
from kvstore.core.policy import POLICIES
from kvstore.core.transfers.admission import Admission
from kvstore.core.transfers.copy_queue import Transfer
from kvstore.core.transfers.devices import DEMAND, DRAINING, FENCED, PREFETCH, SCRUB, SERVING, WRITE_BACK
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

MOST_AT_ONCE = 64
"""More would hold up everybody else's requests."""

CLASSES = {"demand": DEMAND, "prefetch": PREFETCH, "write_back": WRITE_BACK, "scrub": SCRUB}
_CLASS_NAMES = {kind: name for name, kind in CLASSES.items()}
_DRAM = 0


class DeviceCommands:
    """These calls of one daemon; see Control."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._all = shell.placement.residency.tiers

    @property
    def _tiers(self) -> list[TierState]:
        return [state for state in self._all if not state.gone]

    def policy(self) -> dict[str, Any]:
        """Who goes first: by what policy, what others there are, and what they know in each tier.

        While it is `wanted` to be another than it was, so many pools are left with the one from before.
        """
        placement = self._shell.placement
        switch = placement.policy_migration
        tiers = [
            {
                "tier": state.spec.name,
                "pools": len(state.policies),
                "blocks": sum(generation.segments.known_rows for generation in state.generations),
                "state_bytes": sum(generation.segments.ram_bytes() for generation in state.generations),
                "weighs": bool(getattr(state.generation.make, "weighs", False)),
            }
            for state in self._tiers
        ]
        return {
            "name": switch.name,
            "wanted": switch.wanted,
            "available": sorted(POLICIES),
            "pools_left": switch.pools_left,
            "tiers": tiers,
        }

    def devices(self) -> dict[str, Any]:
        """What every tier lies on."""
        return {"devices": [self._whole(state) for state in self._tiers]}

    def device(self, name: str) -> dict[str, Any]:
        """What one tier lies on."""
        return self._whole(self._all[self._tier(name)])

    def _tier(self, name: str) -> int:
        numbers = {state.spec.name: tier for tier, state in enumerate(self._all) if not state.gone}
        if name not in numbers:
            raise MisuseError(f"there is no device {name!r:.80}", f"there are {', '.join(numbers)}")
        return numbers[name]

    def _whole(self, state: TierState) -> dict[str, Any]:
        device, now = state.device, self._shell.now()
        written = state.admission.written_in_a_day(now)
        return {
            **brief(state),
            "name": state.spec.name,
            "state": "leaving" if state.leaving else device.state,
            "hangs": device.fenced,
            "readable": device.readable,
            "writable": device.takes_writes,
            "bandwidth_bytes_per_s": round(device.bandwidth(now)),
            "written_in_a_day_bytes": written,
            "drive_writes_a_day": written / state.spec.limit_bytes if state.spec.limit_bytes else 0.0,
        }

    def set_device(self, name: str, state: str, instead_of: str | None) -> dict[str, Any]:
        """Has a device serve, drain or be fenced, until that is changed or the daemon restarts.

        Answered by the device; unless it is in another state than `instead_of` (None: whichever).
        """
        tier = self._tier(name)
        if state not in (SERVING, DRAINING, FENCED):
            raise MisuseError(f"there is no state {state!r:.80}", f"{SERVING}, {DRAINING} or {FENCED}")
        if tier == _DRAM and state != SERVING:
            raise MisuseError(f"{name} can't be {state}: all that is read and written passes it")
        if self._all[tier].leaving:
            raise MisuseError(f"{name} is being removed", "it is read until it is empty, and not written")
        before = self._whole(self._all[tier])
        if instead_of is not None and before["state"] != instead_of:
            return {"otherwise": before}
        if tier != _DRAM:
            self._shell.handle(ev.SetDevice(tier, state))
        return self.device(name)

    def transfers(self, after: int = 0, limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Copies between tiers that wait or are under way, with numbers above `after`, `limit` at most."""
        check_limit(limit)
        known = self._shell.placement.copies.under_way
        # They are numbered in the order in which they came.
        some = list(islice((number for number in known if number > after), limit + 1))
        shown = [self._transfer(number, known[number]) for number in some[:limit]]
        return {"transfers": shown, "more": len(some) > limit}

    def _transfer(self, number: int, transfer: Transfer) -> dict[str, Any]:
        space = self._shell.namespaces.at(transfer.namespace)
        return {
            "number": number,
            "source": self._all[transfer.source].spec.name,
            "target": self._all[transfer.target].spec.name,
            "class": _CLASS_NAMES[transfer.kind],
            "state": "moving" if transfer.started else "queued",
            "tenant": self._shell.tenancy.registry.name(transfer.pool.tenant),
            "namespace": "" if space is None else space.fingerprint.hex(),
            "blocks": int(transfer.alive.sum()),
            "bytes": transfer.nbytes,
        }


def brief(state: TierState) -> dict[str, Any]:
    """What is counted of one device."""
    device, admission = state.device, state.admission
    return {
        "tier": state.spec.name,
        "queued_bytes": {name: device.queue.waiting(kind) for name, kind in CLASSES.items()},
        "moving_bytes": {name: device.bytes_moving[kind] for name, kind in CLASSES.items()},
        "moving": device.moving,
        "admission": _admission(admission),
    }


def check_limit(limit: int) -> None:
    """Raises MisuseError for a page that is too large, or none."""
    if not 1 <= limit <= MOST_AT_ONCE:
        raise MisuseError(f"limit is {limit}", f"1 to {MOST_AT_ONCE}")


def _admission(admission: Admission) -> dict[str, Any]:
    rule = admission.rule
    return {
        "mode": rule.mode,
        "threshold": admission.threshold,
        "bytes_a_day": rule.bytes_a_day,
        "written_bytes": admission.written,
        "refused_blocks": admission.refused,
        "spent": admission.spent,
    }
