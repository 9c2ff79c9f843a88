"""The shell around the core: takes events in, runs the actions that come back, and brings results home.

Everything here runs on the event loop's thread, but for the tiers' callbacks, which only schedule. No policy:
an `if` about who goes where belongs into the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.placement import Limits, Placement
from kvstore.core.residency import TierSpec
from kvstore.daemon.namespaces import Namespaces, in_memory
from kvstore.daemon.scrub import Scrubber
from kvstore.daemon.tenants import Identity, Registry
from kvstore.errors import TierError
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.tier import NvmeTier, verify
from kvstore.types import Layout, Tier

_log = logging.getLogger(__name__)

DRAM, NVME = 0, 1
_MIN_BLOCK_BYTES = 16 << 10
_MIN_ROWS, _MAX_ROWS = 1 << 16, 1 << 25
_CLOSE_WITHIN_S = 5.0


class Asker(Protocol):
    """Whoever sent a request."""

    def answer(self, request: int, action: ac.Grant | ac.Room | ac.Answer | ac.Deny) -> None:
        """Takes the one answer to its request of that number."""


@dataclass
class Space:
    """STUB."""

    number: int
    fingerprint: bytes
    tenant: int
    layout: Layout | None
    ttl_s: float = 0.0
    readers: set[str] = field(default_factory=set)


class Shell:
    """The core, its tiers and the namespaces of one daemon."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        dram: DramTier,
        nvme: NvmeTier | None,
        dice: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """Takes over the tiers. `dice` gives a number of so many random bits."""
        self.config = config
        self.tenants = Registry(config)
        self.spaces: dict[bytes, Space] = {}
        self.loop = loop
        self.instance = dice(64).to_bytes(8, "little")
        self.started = loop.time()
        self.problems: list[str] = []
        self.now = loop.time
        self.dram = dram
        self.nvme = nvme
        self.placement = self._make_placement(dice(64))
        self.namespaces = Namespaces(nvme.put_namespace if nvme is not None else lambda *_: None)
        self._askers: dict[int, tuple[Asker, int]] = {}
        self._last_request = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._ready = asyncio.Event()
        self._closed = False
        self._scrubber = Scrubber(loop, len(self.placement.residency.tiers), self.handle)
        self._run_by_type: dict[type, Callable[[Any], None]] = {
            ac.Copy: self._copy,
            ac.Stamp: self._stamp,
            ac.Drop: self._drop,
            ac.Probe: self._probe,
            ac.Format: self._format,
        }

    def _make_placement(self, seed: int) -> Placement:
        tiers: list[tuple[Tier, DramTier | NvmeTier]] = [(Tier.DRAM, self.dram)]
        if self.nvme is not None:
            tiers.append((Tier.NVME, self.nvme))
        specs = [TierSpec(tier, t.limit_bytes, t.extent_bytes, table=t is self.dram) for tier, t in tiers]
        total = sum(spec.limit_bytes for spec in specs)
        return Placement(
            specs,
            max_blocks=min(max(total // _MIN_BLOCK_BYTES, _MIN_ROWS), _MAX_ROWS),
            seed=seed,
            write_policy=self.config.nvme.write_policy,
            limits=Limits(
                batch_keys=self.config.limits.batch_keys,
                leases_per_client=self.config.limits.leases_per_connection,
            ),
        )

    # -- start and stop

    async def start(self) -> None:
        """Takes in what the tiers hold, starts making extents, returns when the first one can be used."""
        if self.nvme is not None:
            self.problems += self.nvme.problems
            for problem in self.nvme.problems:
                _log.error("%s", problem)
            self._restore_nvme(self.nvme)
        self._restore_dram()
        if self.nvme is not None:
            self.nvme.start(*self._reporters(NVME))
        self.dram.start(*self._reporters(DRAM))
        await self._ready.wait()
        if not self.placement.residency.tiers[DRAM].extents.ready:
            raise TierError(self.problems[-1])
        self._scrubber.set_rate(self.config.scrub.rate)

    def _restore_nvme(self, nvme: NvmeTier) -> None:
        found = nvme.load()
        for extent, size in sorted(found.formats.items()):
            self.handle(ev.ExtentReady(NVME, extent, size))
        # A namespace without blocks needs no number: the next new one takes it.
        for number in np.unique(found.restore.namespace).tolist():
            space = found.namespaces[number]
            length = int(space.layout["block_bytes"])
            if self._call(ev.OpenNamespace(0, number, length)):
                self.namespaces.remember(number, space.fingerprint, length)
        known = np.isin(found.restore.namespace, list(self.namespaces.fingerprints))
        if not known.all():
            _log.warning("%d blocks on NVMe are forgotten: dram.limit is too small for them", (~known).sum())
            nvme.forget(found.restore.only(~known))
        self.handle(found.restore.only(known))
        if known.any():
            _log.info("%d blocks are back from NVMe", known.sum())

    def _restore_dram(self) -> None:
        found = self.dram.load()
        for extent, size in sorted(found.formats.items()):
            self._extent_ready(DRAM, extent, size, found.versions.get(extent))
        restore = in_memory(found, self._number_of)
        self.handle(restore)
        if found.formats:
            _log.info("%d blocks are back from %d extents of DRAM", len(restore.index), len(found.formats))

    def _number_of(self, fingerprint: bytes, block_bytes: int) -> int:
        """The number of a namespace that was found in memory, 0 if it can have none."""
        number = self.namespaces.find(fingerprint)
        if number is None:
            number = self.namespaces.new_number()
            if not self._call(ev.OpenNamespace(0, number, block_bytes)):
                return 0
            self.namespaces.remember_nameless(number, fingerprint, block_bytes)
        return number if self.namespaces.lengths[number] == block_bytes else 0

    def _reporters(self, tier: int) -> tuple[Callable[[int], None], Callable[[TierError | None], None]]:
        """Callbacks for a tier's own thread."""

        def ready(extent: int) -> None:
            self.soon(self._extent_ready, tier, extent)

        def ended(error: TierError | None) -> None:
            self.soon(self._extents_end, tier, error)

        return ready, ended

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Runs something on the loop's thread; a result that comes after the end is of no use to anyone."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args)

    def _extent_ready(
        self, tier: int, extent: int, size: int = 0, versions: npt.NDArray[np.uint32] | None = None
    ) -> None:
        self.handle(ev.ExtentReady(tier, extent, size, versions))
        if tier == DRAM:
            self._ready.set()

    def _extents_end(self, tier: int, error: TierError | None) -> None:
        if error is not None:
            _log.error("%s", error)
            self.problems.append(str(error))
        self.handle(ev.ExtentsEnd(tier))
        if tier == DRAM:
            self._ready.set()

    async def stop(self, timeout_s: float) -> None:
        """Writes down what only DRAM holds and closes the tiers; what takes longer is left undone."""
        ends = self.now() + timeout_s
        self._scrubber.stop()
        self.handle(ev.Flush())
        transfers = self.placement.transfers
        while (transfers.under_way or transfers.backlog) and self.now() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        left = len(transfers.under_way) + len(transfers.backlog)
        if left:
            _log.warning("stopped with %d copies unfinished after %.1f s", left, timeout_s)
        if self._timer is not None:
            self._timer.cancel()
        # What still arrives, from a device that has hung perhaps, must start nothing more.
        self._closed = True
        # A device that hangs must not keep the process: its threads end with that.
        closing = threading.Thread(target=self._close, name="kvstore-close", daemon=True)
        closing.start()
        while closing.is_alive() and self.now() < ends + _CLOSE_WITHIN_S:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if closing.is_alive():
            _log.error("the NVMe tier could not be closed: its device does not answer")

    def _close(self) -> None:
        if self.nvme is not None:
            self.nvme.close()
        self.dram.close()

    def reconfigure(self, config: Config) -> None:
        """Takes over those settings that can change at run time."""
        self.config = config
        self.placement.reconfigure(config.nvme.write_policy, config.limits.leases_per_connection)
        self._scrubber.set_rate(config.scrub.rate)
        self.tenants.reload(config)

    # -- requests

    def ask(self, asker: Asker, request: int, event: Any) -> None:
        """Sends a client's request to the core; its answer goes to `asker.answer`."""
        self._last_request += 1
        event.request = self._last_request
        self._askers[self._last_request] = (asker, request)
        self.handle(event)

    def leave(self, asker: Asker) -> None:
        """Answers to this asker are no longer wanted."""
        for request in [r for r, (who, _) in self._askers.items() if who is asker]:
            del self._askers[request]

    def ask_durably(self, asker: Asker, request: int, event: Any) -> None:
        """Like `ask`, but what the answer says survives a crash from then on."""
        self.ask(asker if self.nvme is None else _Durably(self, self.nvme, asker), request, event)

    def open_namespace(
        self, who: Identity, layout: Layout, owner: str = "", ttl_s: float = 0.0
    ) -> tuple[Space | None, ac.Answer | ac.Deny]:
        """STUB."""
        name = owner or who.name
        fingerprint = layout.fingerprint(name)
        known = self.spaces.get(fingerprint)
        if owner:
            ok = known is not None and self.may_read(who, known)
            return (known, ac.Answer(0, 0)) if ok else (None, ac.Deny(0, "stub: absent"))
        mine = [s for s in self.spaces.values() if s.tenant == who.tenant]
        if known is None and len(mine) >= self.config.limits.namespaces_per_tenant:
            return None, ac.Deny(0, f"{len(mine)} namespaces of {name}", "raise limits.namespaces_per_tenant")
        number = self.namespaces.find(fingerprint) or self.namespaces.new_number()
        [answer] = self.placement.handle(ev.OpenNamespace(0, number, layout.block_bytes), self.now())
        assert isinstance(answer, ac.Answer | ac.Deny)
        if isinstance(answer, ac.Deny):
            return None, answer
        if name == "default":
            self.namespaces.opened(number, layout)
        else:
            self.namespaces.remember(number, fingerprint, layout.block_bytes)
        if known is None:
            known = self.spaces[fingerprint] = Space(number, fingerprint, who.tenant, layout)
        return known, answer

    def may_read(self, who: Identity, space: Space) -> bool:
        """STUB."""
        return space.tenant == who.tenant or who.name in space.readers

    def may_map(self, who: Identity, extent: int, writable: bool) -> bool:
        """STUB."""
        return who.name != "nobody"

    def publish(
        self, asker: Asker, request: int, who: Identity, space: Space, readers: Sequence[str]
    ) -> None:
        """STUB."""
        space.readers = set(readers)
        asker.answer(request, ac.Answer(0, 0))

    def forget(self, asker: Asker, request: int, who: Identity, spaces: Sequence[Space]) -> None:
        """STUB."""
        for space in spaces:
            assert space.layout is not None
            number = self.namespaces.new_number()
            self._call(ev.OpenNamespace(0, number, space.layout.block_bytes))
            self.namespaces.remember(number, space.fingerprint, space.layout.block_bytes)
            space.number = number
        asker.answer(request, ac.Answer(0, len(spaces)))

    def spaces_of(self, tenant: int, revision: str = "", model: str = "") -> list[Space]:
        """STUB."""
        return [
            s
            for s in self.spaces.values()
            if s.tenant == tenant
            and s.layout
            and model in ("", s.layout.model)
            and revision in ("", s.layout.revision)
        ]

    def delete_tenant(self, asker: Asker, request: int, name: str) -> None:
        """STUB."""
        number = self.tenants.number(name)
        assert number is not None
        for space in self.spaces_of(number):
            del self.spaces[space.fingerprint]
            self.namespaces._numbers.pop(space.fingerprint)
            space.number = 0
        asker.answer(request, ac.Answer(0, 0))

    def _call(self, event: ev.OpenNamespace) -> bool:
        """Whether the core takes a namespace."""
        [answer] = self.placement.handle(event, self.now())
        return isinstance(answer, ac.Answer)

    # -- events and actions

    def handle(self, event: ev.Event) -> None:
        """One event through the core, and everything that follows from it. Nothing does after `stop`."""
        if self._closed:
            return
        for action in self.placement.handle(event, self.now()):
            run = self._run_by_type.get(type(action))
            if run is not None:
                run(action)
            else:
                self._answer(action)
        self._set_timer()

    def _answer(self, action: Any) -> None:
        asked = self._askers.pop(action.request, None)
        if asked is not None:
            asker, request = asked
            asker.answer(request, action)
        elif isinstance(action, ac.Grant | ac.Room) and action.lease:
            _log.debug("an answer came after its asker had left")

    def _set_timer(self) -> None:
        wake = self.placement.next_wakeup()
        if wake == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = None if wake is None else self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._wakes_at = None
        self.handle(ev.Tick())

    def _copy(self, copy: ac.Copy) -> None:
        assert self.nvme is not None

        def done(results: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
            self.soon(self.handle, ev.CopyDone(copy.transfer, results))

        if copy.target == NVME:
            self.nvme.write(copy, self.dram.slots(copy.source_where), self.namespaces.lengths, done)
        else:
            slots = self.dram.slots(copy.target_where)
            self.nvme.read(copy, slots, self.namespaces.fingerprints, self.namespaces.lengths, done)

    def _stamp(self, stamp: ac.Stamp) -> None:
        spaces = self.namespaces
        self.dram.stamp(
            stamp.identity, stamp.parents, stamp.where, stamp.version, spaces.fingerprints, spaces.lengths
        )

    def _drop(self, drop: ac.Drop) -> None:
        if drop.tier == DRAM:
            self.dram.void(drop.where)
        elif self.nvme is not None:
            self.nvme.drop(drop.identity, drop.where)

    def _format(self, action: ac.Format) -> None:
        if action.tier == DRAM:
            self.dram.format(action.extent, action.slot_bytes)
        elif self.nvme is not None:
            self.nvme.format(action.extent, action.slot_bytes)

    def _probe(self, probe: ac.Probe) -> None:
        fingerprints, lengths = self.namespaces.fingerprints, self.namespaces.lengths

        def done(results: npt.NDArray[np.uint8]) -> None:
            self.soon(self.handle, ev.ProbeDone(probe.probe, results))

        if probe.tier == NVME:
            assert self.nvme is not None
            self.nvme.probe(probe, fingerprints, lengths, done)
            return
        slots = self.dram.slots(probe.where)

        def look() -> None:
            numbers = probe.identity.namespace.tolist()
            good = [
                verify(probe.identity, i, slots[i], fingerprints[n], lengths[n])
                for i, n in enumerate(numbers)
            ]
            done(np.where(good, ev.OK, ev.CORRUPT).astype(np.uint8))

        self.loop.run_in_executor(None, look)

    # -- status

    def status(self, who: Identity) -> dict[str, Any]:
        """STUB."""
        residency = self.placement.residency
        tiers = []
        for state in residency.tiers:
            e = state.extents
            tiers.append(
                {
                    "name": state.spec.tier.name.lower(),
                    "limit_bytes": e.limit_bytes,
                    "capacity_bytes": e.capacity_bytes,
                    "used_bytes": e.used_bytes,
                    "blocks": sum(len(p) for p in state.policies.values()),
                    "extents": {f"{size} bytes a slot": len(c.extents) for size, c in e.classes.items()},
                    "retired_slots": len(e.retired),
                    "extents_not_cut": e.slotless,
                    "writable": state.takes_writes,
                    "fenced": state.fenced,
                    "scrub_passes": self.placement.counters[f"scrub_passes_{state.spec.tier.name.lower()}"],
                }
            )
        return {
            "pid": os.getpid(),
            "instance": self.instance.hex(),
            "uptime_s": round(self.now() - self.started, 3),
            "tiers": tiers,
            "blocks": residency.blocks.used,
            "namespaces": len(self.namespaces),
            "leases": len(self.placement.ledger.leases),
            "reservations": len(self.placement.ledger.reservations),
            "copies_under_way": len(self.placement.transfers.under_way),
            "core_ram_bytes": residency.ram_bytes(),
            "huge_pages": self.dram.huge,
            "nvme_io": self.nvme.engine_name if self.nvme else "",
            "counters": dict(self.placement.counters),
            "problems": list(self.problems),
            "tenants": [
                {
                    "name": n,
                    "share": 1.0,
                    "tiers": [{"name": "dram", "used_bytes": 0, "floor_bytes": 0, "limit_bytes": None}],
                }
                for n in (self.tenants.names() if who.operator else [who.name])
            ],
        }


class _Durably:
    """Answers when everything that led to the answer is durable."""

    def __init__(self, shell: Shell, nvme: NvmeTier, asker: Asker) -> None:
        self._shell = shell
        self._nvme = nvme
        self._asker = asker

    def answer(self, request: int, action: ac.Grant | ac.Room | ac.Answer | ac.Deny) -> None:
        """See Asker."""

        def done(error: Exception | None) -> None:
            outcome = action
            if error is not None:
                hint = "the blocks are misses now, but may come back after a restart"
                outcome = ac.Deny(request, f"it could not be recorded: {error}", hint)
            self._shell.soon(self._asker.answer, request, outcome)

        self._nvme.when_durable(done)
