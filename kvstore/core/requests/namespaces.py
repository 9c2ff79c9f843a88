"""Opens namespaces within the limits. At a limit, the oldest unused namespaces are closed."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import events as ev
from kvstore.core.actions import Answer, NamespaceClosed
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.pins import Pins
from kvstore.core.requests.publication import Publication
from kvstore.core.residency.namespace import Namespace
from kvstore.types import Tier, slot_bytes


class NamespaceTable:
    """Opens and closes the namespaces in `Residency.namespaces`."""

    def __init__(self, leases: LeaseTable, pins: Pins, publication: Publication) -> None:
        self._leases = leases
        self._r = leases.residency
        self._pins = pins
        self._publication = publication

    def open(self, event: ev.OpenNamespace, now: float) -> None:
        """See OpenNamespace. Changes the TTL of a namespace that is open."""
        known = self._r.namespaces.get(event.namespace)
        top = self._r.tiers[0].extents
        if not top.geometry(slot_bytes(event.block_bytes)).slots:
            why = f"a block of {event.block_bytes} bytes does not fit into an extent of {top.extent_bytes}"
            self._leases.deny(event.request, why, "raise dram.limit")
        elif known is not None and known.closed:
            self._leases.deny(event.request, "this namespace is being forgotten", "open it again later")
        elif known is not None:
            known.ttl_s = event.ttl_s
            known.has_ttl |= event.ttl_s > 0
            if known.has_ttl:
                self._r.presence.retire(event.namespace)
            known.block_tokens = event.block_tokens
            if event.independent and not known.independent:
                # The headers of kept memory do not tell the kind.
                known.independent = True
                self._r.chains.separate(event.namespace)
            self._leases.say(Answer(event.request, event.namespace))
        elif (full := self._full(event)) is not None:
            self._leases.deny(event.request, *full)
        else:
            self._add(event)
            self._leases.say(Answer(event.request, event.namespace))

    def _add(self, event: ev.OpenNamespace) -> None:
        r, number = self._r, event.namespace
        upper = SlotPool(event.tenant, event.domain, slot_bytes(event.block_bytes))
        lower = SlotPool(event.tenant, event.tenant, slot_bytes(event.block_bytes + event.extra_bytes))
        # What a GPU holds is mapped by its tenant alone, whoever may read the namespace.
        of = {Tier.HBM: upper._replace(domain=event.tenant), Tier.DRAM: upper}
        pools = tuple(of.get(state.spec.tier, lower) for state in r.tiers)
        ends = event.ttl_s > 0
        tokens = event.block_tokens
        r.namespaces[number] = Namespace(
            number,
            event.block_bytes,
            pools,
            event.ttl_s,
            ends,
            block_tokens=tokens,
            independent=event.independent,
        )
        # Another namespace may have had this number.
        r.topology.recompute_s[number] = 0.0
        r.decisions.disown(number)

    def _full(self, event: ev.OpenNamespace) -> tuple[str, str] | None:
        """Closes namespaces where a limit is reached; why there is no room for one more, and a hint."""
        namespaces, limits = self._r.namespaces, self._leases.limits
        if len(namespaces) < min(limits.namespaces // 2, limits.namespaces_per_tenant):
            return None
        mine = [s for s in namespaces.values() if s.pools[0].tenant == event.tenant and not s.closed]
        if not self._make_room(mine, limits.namespaces_per_tenant, event):
            hint = "use fewer layouts, or raise limits.namespaces_per_tenant"
            return f"{len(mine)} namespaces of this tenant are open, and all are in use", hint
        mine = [s for s in mine if s.number in namespaces]
        share = self._share(event) if event.may_close else limits.namespaces
        if share < limits.namespaces and not self._make_room(mine, share, event):
            hint = "use fewer layouts, or raise limits.namespaces"
            return f"this tenant has {len(mine)} namespaces, half of what others leave, all in use", hint
        mine = [s for s in mine if s.number in namespaces]
        if len(namespaces) < limits.namespaces:
            return None
        everybody = [s for s in namespaces.values() if not s.closed]
        # The tenant's own ones go first.
        others = len(everybody) - len(mine)
        if self._make_room(mine, limits.namespaces - others, event):
            return None
        everybody = [s for s in everybody if s.number in namespaces]
        if self._make_room(everybody, limits.namespaces, event):
            return None
        hint = "use fewer layouts, or raise limits.namespaces"
        return f"{len(everybody)} namespaces are open, and all are in use", hint

    def _share(self, event: ev.OpenNamespace) -> int:
        """How many namespaces a tenant may have: half of what others do not use, all where it is alone."""
        most = self._leases.limits.namespaces
        if len(self._pins.pin_bytes) < 2:
            return most
        in_use = self._leases.namespaces_in_use() | event.in_use
        others = [s for s in self._r.namespaces.values() if s.pools[0].tenant != event.tenant]
        used = sum(s.number in in_use or s.closed or not self._is_unused(s) for s in others)
        return max(1, (most - used + 1) // 2)

    def _make_room(self, namespaces: Sequence[Namespace], limit: int, event: ev.OpenNamespace) -> bool:
        """Closes the oldest unused ones of these until fewer than `limit` are left; False if more stay."""
        excess = len(namespaces) - limit + 1
        if excess <= 0 or not event.may_close:
            return excess <= 0
        in_use = self._leases.namespaces_in_use() | event.in_use
        for namespace in namespaces:
            if excess and namespace.number not in in_use and self._is_unused(namespace):
                del self._r.namespaces[namespace.number]
                self._r.presence.retire(namespace.number)
                self._r.gaps.forget(namespace.number)
                self._leases.say(NamespaceClosed(namespace.number))
                excess -= 1
        return not excess

    def _is_unused(self, namespace: Namespace) -> bool:
        """Whether a namespace has no rows, is not published, and nothing of it is being copied or probed."""
        if self._r.blocks.rows_in[namespace.number] or namespace.pools[0].domain != namespace.tenant:
            return False
        return self._publication.is_settled(namespace.number) and not self._leases.copies.concern(
            (namespace.number,)
        )
