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
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.placement import Limits, Placement
from kvstore.core.residency import TierSpec
from kvstore.errors import TierError
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.posix import PosixEngine
from kvstore.tiers.nvme.tier import NvmeTier, verify
from kvstore.types import Layout, Tier, extent_bytes

_log = logging.getLogger(__name__)

DRAM, NVME = 0, 1
_MIN_BLOCK_BYTES = 16 << 10
_MIN_ROWS, _MAX_ROWS = 1 << 16, 1 << 25


class Asker(Protocol):
    """Whoever sent a request."""

    def answer(self, request: int, action: ac.Grant | ac.Room | ac.Answer | ac.Deny) -> None:
        """Takes the one answer to its request of that number."""


class Shell:
    """The core, its tiers and the namespaces of one daemon."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.instance = secrets.token_bytes(8)
        self.started = time.monotonic()
        self.problems: list[str] = []
        self.now = loop.time
        self._loop = loop
        self._askers: dict[int, tuple[Asker, int]] = {}
        self._last_request = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._ready = asyncio.Event()
        self.nvme: NvmeTier | None = None
        if config.nvme.path is not None:
            engine = PosixEngine(config.nvme.io_threads)
            try:
                size = extent_bytes(config.nvme.limit)
                self.nvme = NvmeTier(config.nvme.path, config.nvme.limit, size, engine)
            except BaseException:
                engine.close()
                raise
        self.dram = DramTier(config.dram.limit, extent_bytes(config.dram.limit), config.dram.huge_pages)
        self.placement = self._make_placement()
        self.namespaces: dict[bytes, int] = {}
        self.fingerprints: dict[int, bytes] = {}
        self.lengths: dict[int, int] = {}
        self._run_by_type: dict[type, Callable[[Any], None]] = {
            ac.Copy: self._copy,
            ac.Stamp: self._stamp,
            ac.Drop: self._drop,
            ac.Probe: self._probe,
            ac.Format: self._format,
        }

    def _make_placement(self) -> Placement:
        config = self.config
        specs = [TierSpec(Tier.DRAM, config.dram.limit, self.dram.extent_bytes, table=True)]
        total = config.dram.limit
        if self.nvme is not None:
            specs.append(TierSpec(Tier.NVME, config.nvme.limit, self.nvme.extent_bytes, table=False))
            total += config.nvme.limit
        return Placement(
            specs,
            max_blocks=min(max(total // _MIN_BLOCK_BYTES, _MIN_ROWS), _MAX_ROWS),
            seed=secrets.randbits(64),
            write_policy=config.nvme.write_policy,
            limits=Limits(
                batch_keys=config.limits.batch_keys,
                leases_per_client=config.limits.leases_per_connection,
            ),
        )

    # -- start and stop

    async def start(self) -> None:
        """Reads back what NVMe holds, starts making extents, returns when the first one can be used."""
        if self.nvme is not None:
            self._restore(self.nvme)
            self.nvme.start(*self._reporters(NVME))
        self.dram.start(*self._reporters(DRAM))
        await self._ready.wait()
        if not self.placement.residency.tiers[DRAM].extents.ready:
            raise TierError(self.problems[-1])

    def _restore(self, nvme: NvmeTier) -> None:
        spaces, formats, restore = nvme.load()
        # A namespace without blocks needs no number: the next new one takes it.
        used = set(np.unique(restore.namespace).tolist())
        for number, space in ((n, s) for n, s in spaces.items() if n in used):
            self._know(number, space.fingerprint, int(space.layout["block_bytes"]))
        for extent, size in sorted(formats.items()):
            self.handle(ev.ExtentReady(NVME, extent, size))
        self.handle(restore)
        if len(restore.index):
            _log.info("%d blocks are back from NVMe", len(restore.index))

    def _know(self, number: int, fingerprint: bytes, block_bytes: int) -> None:
        self.namespaces[fingerprint] = number
        self.fingerprints[number] = fingerprint
        self.lengths[number] = block_bytes
        self.handle(ev.OpenNamespace(0, number, block_bytes))

    def _reporters(self, tier: int) -> tuple[Callable[[int], None], Callable[[TierError | None], None]]:
        """Callbacks for a tier's own thread."""

        def ready(extent: int) -> None:
            self._soon(self._extent_ready, tier, extent)

        def ended(error: TierError | None) -> None:
            self._soon(self._extents_end, tier, error)

        return ready, ended

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        """Runs something on the loop's thread; a result that comes after the end is of no use to anyone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _extent_ready(self, tier: int, extent: int) -> None:
        self.handle(ev.ExtentReady(tier, extent))
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
        """Writes down what only DRAM holds, as far as the time allows, and closes the tiers."""
        ends = time.monotonic() + timeout_s
        self.handle(ev.Flush())
        transfers = self.placement.transfers
        while (transfers.under_way or transfers.backlog) and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        left = len(transfers.under_way) + len(transfers.backlog)
        if left:
            _log.warning("stopped with %d copies unfinished after %.1f s", left, timeout_s)
        if self._timer is not None:
            self._timer.cancel()
        if self.nvme is not None:
            await asyncio.to_thread(self.nvme.close)
        self.dram.close()

    # -- requests

    def ask(self, asker: Asker, request: int, event: Any) -> None:
        """Sends a client's request to the core; its answer goes to `asker.answer`."""
        self._last_request += 1
        event.request = self._last_request
        self._askers[self._last_request] = (asker, request)
        self.handle(event)

    def forget(self, asker: Asker) -> None:
        """Answers to this asker are no longer wanted."""
        for request in [r for r, (who, _) in self._askers.items() if who is asker]:
            del self._askers[request]

    def open_namespace(self, layout: Layout) -> tuple[int, bytes, ac.Answer | ac.Deny]:
        """(number, fingerprint, what the core says) of a layout of the one tenant."""
        fingerprint = layout.fingerprint()
        known = self.namespaces.get(fingerprint)
        if known is not None:
            return known, fingerprint, ac.Answer(0, known)
        number = max(self.fingerprints, default=0) + 1
        answer = self._call(ev.OpenNamespace(0, number, layout.block_bytes))
        if isinstance(answer, ac.Answer):
            self.namespaces[fingerprint] = number
            self.fingerprints[number] = fingerprint
            self.lengths[number] = layout.block_bytes
            if self.nvme is not None:
                self.nvme.put_namespace(number, Namespace("default", layout.to_map(), fingerprint))
        return number, fingerprint, answer

    def _call(self, event: ev.OpenNamespace) -> ac.Answer | ac.Deny:
        """The answer to a request that the core answers at once."""
        [answer] = self.placement.handle(event, self.now())
        assert isinstance(answer, ac.Answer | ac.Deny)
        return answer

    # -- events and actions

    def handle(self, event: ev.Event) -> None:
        """One event through the core, and everything that follows from it."""
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
        self._timer = None if wake is None else self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._wakes_at = None
        self.handle(ev.Tick())

    def _copy(self, copy: ac.Copy) -> None:
        assert self.nvme is not None

        def done(results: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
            self._soon(self.handle, ev.CopyDone(copy.transfer, results))

        if copy.target == NVME:
            self.nvme.write(copy, self.dram.slots(copy.source_where), self.lengths, done)
        else:
            slots = self.dram.slots(copy.target_where)
            self.nvme.read(copy, slots, self.fingerprints, self.lengths, done)

    def _stamp(self, stamp: ac.Stamp) -> None:
        self.dram.stamp(stamp.identity, stamp.where, stamp.version, self.fingerprints, self.lengths)

    def _drop(self, drop: ac.Drop) -> None:
        if drop.tier == DRAM:
            self.dram.void(drop.where)
        elif self.nvme is not None:
            self.nvme.drop(drop.identity)

    def _format(self, action: ac.Format) -> None:
        if action.tier == DRAM:
            self.dram.format(action.extent, action.slot_bytes)
        elif self.nvme is not None:
            self.nvme.format(action.extent, action.slot_bytes)

    def _probe(self, probe: ac.Probe) -> None:
        slots = self.dram.slots(probe.where)

        def look() -> None:
            numbers = probe.identity.namespace.tolist()
            good = [
                verify(probe.identity, i, slots[i], self.fingerprints[n], self.lengths[n])
                for i, n in enumerate(numbers)
            ]
            self._soon(self.handle, ev.ProbeDone(probe.probe, np.array(good, np.bool_)))

        self._loop.run_in_executor(None, look)

    # -- status

    def status(self) -> dict[str, Any]:
        """What `kvstore status` shows: plain values only."""
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
                    "writable": not state.closed_until,
                }
            )
        return {
            "pid": os.getpid(),
            "instance": self.instance.hex(),
            "uptime_s": round(time.monotonic() - self.started, 3),
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
        }
