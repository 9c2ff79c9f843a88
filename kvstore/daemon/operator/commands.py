"""What operators ask by name: one function each, plain values in and out. Used by `kvstore.admin`.

What changes something becomes an event for the core, and its answer goes to the asker when there is one.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import ValidationError, validate_call

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.decision_log import EVERY_TIER
from kvstore.core.insight.hit_counters import (
    ALL_TIERS,
    DELIVERED,
    FOUND,
    MOST,
    NETWORK,
    REASONS,
    REQUESTED,
    Amount,
)
from kvstore.daemon.operator.device_commands import MOST_AT_ONCE, DeviceCommands, brief, check_limit
from kvstore.daemon.operator.event_log import MOST_EVENTS
from kvstore.daemon.operator.latency import BOUNDS_S
from kvstore.daemon.runtime.executor import Asker, holding
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import KVStoreError, MisuseError
from kvstore.types import MAX_KEY_BYTES, Tier, check_tenant
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.daemon.operator.settings import LiveConfig
    from kvstore.daemon.runtime.executor import Shell
    from kvstore.daemon.server.server import Server

_log = logging.getLogger(__name__)

LONGEST_S = 86400.0
_MOST_TENANTS = 20
_UNITS = "blocks", "tokens", "bytes"
_REMOVED = "(removed)"
"""Stands for devices that were removed."""

Later = Callable[[Asker, int], None]
"""Has something changed, and its answer given to the asker of that request."""

Said = dict[str, Any] | Later | Coroutine[Any, Any, dict[str, Any]]


class Waiting(Asker, Protocol):
    """An operator's connection."""

    def send(self, message: Any) -> None:
        """Sends an answer."""


class Commands:
    """The calls of one daemon. Each takes arguments by name, and returns a map or how to get one."""

    def __init__(self, server: Server, shell: Shell, settings: LiveConfig, version: str) -> None:
        self._server = server
        self._shell = shell
        self._settings = settings
        self._version = version
        parts = (self.tenants, self.tenant, self.namespaces, self.namespace)
        seen = (self.status, self.figures, self.events, *parts)
        blocks = (self.pin, self.unpin, self.prefetch, self.invalidate)
        wholes = (self.publish, self.forget, self.delete_tenant)
        configured = (self.settings, self.change, self.reload)
        m = self.machinery = DeviceCommands(self._shell)
        machinery = (m.policy, m.devices, m.device, m.set_device, m.transfers)
        calls: tuple[Callable[..., Said], ...] = (*seen, *blocks, *wholes, *configured, *machinery)
        strict = validate_call(config={"strict": True})
        self._calls = {call.__name__: strict(call) for call in calls}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self, asker: Waiting, request: int, call: str, arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The answer; None: `asker` gets it later.

        Raises MisuseError for a call that there is not, and for arguments that it does not take.
        """
        known = self._calls.get(call)
        if known is None:
            raise MisuseError(f"there is no call {call!r:.80}", f"there are {', '.join(self._calls)}")
        unnamed = next((name for name in arguments if not isinstance(name, str)), None)
        if unnamed is not None:
            raise MisuseError(f"{call}: {unnamed!r:.80} names no argument", "names are strings")
        try:
            said = known(**arguments)
        except ValidationError as error:
            raise MisuseError(_misfit(call, error)) from None
        if isinstance(said, dict):
            return said
        if isinstance(said, Coroutine):
            task = self._shell.loop.create_task(_answer(asker, request, call, said))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            said(asker, request)
        return None

    # -- what is seen

    def status(self) -> dict[str, Any]:
        """The daemon as a whole."""
        server = self._server
        first = {"version": self._version, "connections": len(server.table.connections)}
        return {**first, **server.queues(), **self._shell.summary()}

    def figures(self) -> dict[str, Any]:
        """All that is counted and measured, for metrics: of many tenants only those with most."""
        shell, server = self._shell, self._server
        residency = shell.placement.residency
        # Of one that was removed nothing is told any more: its name may be another's.
        names = ["" if state.gone else state.spec.name for state in residency.tiers]
        decided = residency.decisions.blocks_by_what
        return {
            "bounds_s": list(BOUNDS_S),
            "calls": server.services.calls.plain(),
            "copies": [
                {"source": names[source], "target": names[target], **histogram.plain()}
                for (source, target), histogram in shell.tier_actions.copies.items()
                if names[source] and names[target]
            ],
            "loop_lag": server.services.lag.histogram.plain(),
            "decisions": [
                {"what": what.name.lower(), "tier": "" if tier == EVERY_TIER else names[tier], "blocks": n}
                for (what, tier), n in decided.items()
                if tier == EVERY_TIER or names[tier]
            ],
            "devices": [brief(state) for state in residency.tiers if not state.gone],
            "hits": self._hits(names),
            "holdings": self._holdings(names),
        }

    def _hits(self, names: list[str]) -> list[dict[str, Any]]:
        """Sums of prompts by tenant and tier; of tenants beyond the largest together, as of no tenant."""
        counters, registry = self._shell.hits, self._shell.tenancy.registry
        sums = {tenant: counters.of(tenant) for tenant in counters}

        def requested_bytes(tenant: int) -> int:
            return sums[tenant].get((REQUESTED, ALL_TIERS), Amount()).nbytes

        most = heapq.nlargest(_MOST_TENANTS, sums, key=requested_bytes)
        rows: dict[tuple[str, str, str], Amount] = {}
        for tenant, columns in sums.items():
            name = registry.name(tenant) if tenant in most else ""
            for (what, tier), amount in columns.items():
                row = name, what, _tier_name(names, tier)
                rows[row] = rows.get(row, Amount()).plus(amount)
        # What does not fit into a message would take all other figures with it.
        return [
            {"tenant": tenant, "what": what, "tier": tier}
            | {unit: min(n, MOST) for unit, n in zip(_UNITS, amount, strict=True)}
            for (tenant, what, tier), amount in sorted(rows.items())
        ]

    def _holdings(self, names: list[str]) -> list[dict[str, Any]]:
        """What tenants have of each tier, those with most by name, all others together as of no tenant."""
        tiers = self._shell.placement.residency.tiers
        registry = self._shell.tenancy.registry
        used = np.zeros(len(registry.names()), np.int64)
        for state in tiers:
            mine = state.extents.holdings.used[: len(used)]
            used[: len(mine)] += mine
        most = np.sort(np.argsort(-used, kind="stable")[:_MOST_TENANTS]).tolist()
        rows = []
        for name, state in ((name, state) for name, state in zip(names, tiers, strict=True) if name):
            holdings = state.extents.holdings
            left_used = int(holdings.used.sum())
            left_floor = int(holdings.floor.sum()) * holdings.extent_bytes
            for tenant in most:
                has = holding(state, tenant)
                rows.append({"tenant": registry.name(tenant), "tier": name, **has})
                left_used, left_floor = left_used - has["used_bytes"], left_floor - has["floor_bytes"]
            if len(used) > len(most):
                row = {"tenant": "", "tier": name, "used_bytes": left_used}
                rows.append(row | {"floor_bytes": left_floor, "limit_bytes": None})
        return rows

    def events(
        self, after: int = 0, limit: int = MOST_EVENTS, tenant: str = "", what: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """What happened after the event of number `after`, the oldest first: see `Chronicle.page`."""
        if not 1 <= limit <= MOST_EVENTS:
            raise MisuseError(f"limit is {limit}", f"1 to {MOST_EVENTS}")
        return self._shell.chronicle.page(after, limit, self._number(tenant) if tenant else None, what)

    def tenants(self, after: str = "", limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Tenants whose names come after `after`, `limit` of them at most."""
        check_limit(limit)
        names = sorted(self._shell.tenancy.registry.names())
        start = bisect_right(names, after)
        shown = [self._shell.tenant(name) for name in names[start : start + limit]]
        return {"tenants": shown, "more": len(names) > start + limit}

    def tenant(self, name: str) -> dict[str, Any]:
        """One tenant."""
        self._number(name)
        return self._shell.tenant(name)

    def _number(self, tenant: str) -> int:
        number = self._shell.tenancy.registry.number(tenant)
        if number is None:
            raise MisuseError(f"there is no tenant {tenant!r:.80}", "`kvstore tenant list` names them")
        return number

    def namespaces(self, tenant: str = "", after: int = 0, limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Open namespaces with numbers above `after`, `limit` of them at most; of one tenant, or all."""
        check_limit(limit)
        asked = self._number(tenant) if tenant else None
        spaces = (s for s in self._shell.namespaces if s.number > after and asked in (None, s.tenant))
        some = heapq.nsmallest(limit + 1, spaces, key=lambda space: space.number)
        shown = [self._namespace(space) for space in some[:limit]]
        return {"namespaces": shown, "more": len(some) > limit}

    def namespace(self, id: str) -> dict[str, Any]:
        """One namespace."""
        return self._namespace(self._space(id))

    def _namespace(self, space: NamespaceEntry) -> dict[str, Any]:
        return {
            "number": space.number,
            "id": space.fingerprint.hex(),
            "tenant": self._shell.tenancy.registry.name(space.tenant),
            "layout": space.layout.to_map() if space.layout is not None else None,
            "block_bytes": space.block_bytes,
            "published_to": sorted(space.readers),
            "ttl_s": space.ttl_s,
            "prompts": self._prompts(space),
        }

    def _prompts(self, space: NamespaceEntry) -> dict[str, Any]:
        """Blocks of a namespace's prompts, whoever asked for them."""
        names = ["" if state.gone else state.spec.name for state in self._shell.placement.residency.tiers]
        by_tier: dict[str, Counter[str]] = {FOUND: Counter(), DELIVERED: Counter()}
        for (what, tier), blocks in space.hits.items():
            if what in by_tier:
                by_tier[what][_tier_name(names, tier)] += min(blocks, MOST)
        counted = {f"{what}_blocks": dict(sums) for what, sums in by_tier.items()}
        totals = {f"{what}_blocks": min(space.hits[what, ALL_TIERS], MOST) for what in (REQUESTED, *REASONS)}
        requested = totals["requested_blocks"]
        ratios = {
            ratio: sum(by_tier[what].values()) / requested if requested else None
            for ratio, what in (("hit_ratio", FOUND), ("delivered_ratio", DELIVERED))
        }
        return totals | counted | ratios

    def _space(self, id: str) -> NamespaceEntry:
        """The namespace of this fingerprint, in hex: unlike its number, it stays what it is."""
        fingerprint = bytes.fromhex(id) if re.fullmatch(r"(?:[0-9a-f]{2})*", id) else b""
        for space in self._shell.namespaces:
            if space.number and space.fingerprint == fingerprint:
                return space
        raise MisuseError(f"there is no namespace {id!r:.80}", "it is open once a client has used it")

    # -- the configuration

    async def settings(self, part: tuple[str, ...] = ()) -> dict[str, Any]:
        """What is set of a part of the configuration; see Settings.shown."""
        return await self._settings.shown(part)

    async def change(
        self, patch: dict[str, Any], part: tuple[str, ...] = (), expected: str = "", dry_run: bool = False
    ) -> dict[str, Any]:
        """Changes settings, and keeps that; see Settings.change."""
        return await self._settings.change(patch, part, expected, dry_run)

    async def reload(self) -> dict[str, Any]:
        """Reads the configuration again; see Settings.reload."""
        return await self._settings.reload()

    # -- what is changed

    def pin(self, namespace: str, keys: bytes, key_bytes: int, ttl_s: float) -> Later:
        """Keeps blocks for so long; answered by how many."""
        return self._about(ev.Pin, namespace, keys, key_bytes, self._shell.now() + _seconds(ttl_s))

    def unpin(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Keeps them no longer; answered by how many."""
        return self._about(ev.Unpin, namespace, keys, key_bytes)

    def prefetch(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Brings a prefix up, as far as there is room; answered by how many blocks are or will be there."""
        return self._about(ev.Prefetch, namespace, keys, key_bytes, self._space(namespace).tenant)

    def _about(
        self, event: Callable[..., Any], namespace: str, keys: bytes, key_bytes: int, *more: Any
    ) -> Later:
        made = event(0, self._space(namespace).number, _keys(keys, key_bytes), *more)
        return lambda asker, request: self._shell.ask(asker, request, made)

    def invalidate(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Forgets blocks; answered by how many, when that is durable."""
        space, some = self._space(namespace), _keys(keys, key_bytes)
        return lambda asker, request: self._shell.invalidate(asker, request, space, some)

    def publish(self, namespace: str, tenants: tuple[str, ...], instead_of: tuple[str, ...] | None) -> Said:
        """Lets these tenants, and no others, read a namespace; answered when it holds.

        Unless it is published to others than `instead_of` (None: whoever): then to whom it is.
        """
        space = self._space(namespace)
        if instead_of is not None and set(instead_of) != space.readers:
            return {"published_to": sorted(space.readers)}
        readers = [check_tenant(name) for name in tenants]
        return lambda asker, request: self._shell.tenancy.publish(asker, request, space, readers)

    def forget(self, namespace: str) -> Later:
        """Empties a namespace; answered by how many blocks went, when nothing is left."""
        space = self._space(namespace)
        return lambda asker, request: self._shell.tenancy.forget(asker, request, [space])

    def delete_tenant(self, name: str) -> Later:
        """Deletes all that a tenant has stored; answered by how many blocks, when nothing is left."""
        self._number(name)
        return lambda asker, request: self._shell.tenancy.delete(asker, request, name)


def _tier_name(names: list[str], number: int) -> str:
    """How a column's tier is called: "" for all of them."""
    if number < 0:
        return Tier.NETWORK.name.lower() if number == NETWORK else ""
    return names[number] or _REMOVED


def _misfit(call: str, error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{call}: {'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"


async def _answer(asker: Waiting, request: int, call: str, said: Coroutine[Any, Any, dict[str, Any]]) -> None:
    try:
        answer = await said
    except ValidationError as error:
        # Arguments of these are looked at when they run.
        asker.answer(request, ac.Deny(request, _misfit(call, error), ""))
    except KVStoreError as error:
        asker.answer(request, ac.Deny(request, error.message, error.hint))
    except Exception:
        _log.exception("a call of an operator failed")
        asker.answer(request, ac.Deny(request, "internal error", "see the daemon's log"))
    else:
        asker.send(m.Report(request, answer))


def _keys(keys: bytes, key_bytes: int) -> Keys:
    if not 1 <= key_bytes <= MAX_KEY_BYTES or len(keys) % key_bytes or not keys:
        raise MisuseError(f"{len(keys)} bytes of keys of {key_bytes}", f"1 to {MAX_KEY_BYTES} bytes each")
    return Keys(keys, key_bytes)


def _seconds(ttl_s: float) -> float:
    if not 0 < ttl_s <= LONGEST_S:
        raise MisuseError(f"ttl_s is {ttl_s:g}", f"more than 0, and at most {LONGEST_S:g}")
    return ttl_s
