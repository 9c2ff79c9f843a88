"""Operator commands about namespaces, and the namespaces that explain requests cover."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvstore.core.actions import Explained
from kvstore.core.insight.hit_counters import ALL_TIERS, DELIVERED, FOUND, MOST, REASONS, REQUESTED
from kvstore.core.view import View
from kvstore.daemon.operator.command import MOST_AT_ONCE, Later, Result, check_limit, command
from kvstore.daemon.operator.metrics import tier_name, tier_names
from kvstore.daemon.tenancy.auth import Authenticator, Principal
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.errors import MisuseError
from kvstore.types import check_tenant


@dataclass(slots=True, eq=False)
class NamespaceCommands:
    """Lists, publishes and empties namespaces."""

    _view: View
    _namespaces: Namespaces
    _authenticator: Authenticator
    _catalog: NamespaceCatalog
    _deletion: Deletion

    @command
    def namespaces(self, tenant: str = "", after: int = 0, limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Returns at most `limit` open namespaces with numbers above `after`, of one tenant or of all."""
        check_limit(limit)
        number = self._authenticator.existing(tenant) if tenant else None
        namespaces = (s for s in self._namespaces if s.number > after and number in (None, s.tenant))
        some = heapq.nsmallest(limit + 1, namespaces, key=lambda namespace: namespace.number)
        shown = [self._shown(namespace) for namespace in some[:limit]]
        return {"namespaces": shown, "more": len(some) > limit}

    @command
    def namespace(self, id: str) -> dict[str, Any]:
        """Returns one namespace."""
        return self._shown(by_id(self._namespaces, id))

    @command
    def publish(self, namespace: str, tenants: tuple[str, ...], instead_of: tuple[str, ...] | None) -> Result:
        """Lets these tenants, and no others, read a namespace. Answers when this is durable.

        With `instead_of`, nothing changes unless the namespace is published to exactly those tenants. The
        answer then names its readers.
        """
        entry = by_id(self._namespaces, namespace)
        if instead_of is not None and set(instead_of) != entry.readers:
            return {"published_to": sorted(entry.readers)}
        readers = [check_tenant(name) for name in tenants]
        return lambda requester, request: self._catalog.publish(requester, request, entry, readers)

    @command
    def forget(self, namespace: str) -> Later:
        """Empties a namespace. Answers with the number of its blocks when nothing is left."""
        entry = by_id(self._namespaces, namespace)
        return lambda requester, request: self._deletion.forget(requester, request, [entry])

    def _shown(self, namespace: NamespaceEntry) -> dict[str, Any]:
        return {
            "number": namespace.number,
            "id": namespace.fingerprint.hex(),
            "tenant": self._authenticator.name(namespace.tenant),
            "layout": namespace.layout.to_map() if namespace.layout is not None else None,
            "block_bytes": namespace.block_bytes,
            "published_to": sorted(namespace.readers),
            "ttl_s": namespace.ttl_s,
            "prompts": self._prompts(namespace),
        }

    def _prompts(self, namespace: NamespaceEntry) -> dict[str, Any]:
        """Returns hit counters of a namespace's prompts, of all tenants."""
        names = tier_names(self._view)
        by_tier: dict[str, Counter[str]] = {FOUND: Counter(), DELIVERED: Counter()}
        for (what, tier), blocks in namespace.hits.items():
            if what in by_tier:
                by_tier[what][tier_name(names, tier)] += min(blocks, MOST)
        counted = {f"{what}_blocks": dict(sums) for what, sums in by_tier.items()}
        totals = {
            f"{what}_blocks": min(namespace.hits[what, ALL_TIERS], MOST) for what in (REQUESTED, *REASONS)
        }
        requested = totals["requested_blocks"]
        ratios = {
            ratio: sum(by_tier[what].values()) / requested if requested else None
            for ratio, what in (("hit_ratio", FOUND), ("delivered_ratio", DELIVERED))
        }
        return totals | counted | ratios


def by_id(namespaces: Namespaces, id: str) -> NamespaceEntry:
    """Returns the open namespace of a fingerprint in hex. Raises MisuseError if there is none."""
    fingerprint = bytes.fromhex(id) if re.fullmatch(r"(?:[0-9a-f]{2})*", id) else b""
    for namespace in namespaces:
        if namespace.number and namespace.fingerprint == fingerprint:
            return namespace
    raise MisuseError(f"there is no namespace {id!r:.80}", "it is open once a client has used it")


# -- explain requests


def namespaces_for(
    who: Principal, authenticator: Authenticator, namespaces: Namespaces, tenant: str, model: str
) -> tuple[int, ...]:
    """Returns the numbers of open namespaces of a tenant and a model, "" for any.

    Only operators get namespaces of other tenants than their own.
    """
    number = authenticator.number(tenant) if tenant else None
    if tenant and number is None:
        return ()
    return tuple(
        namespace.number
        for namespace in namespaces
        if namespace.number
        and (who.operator or namespace.tenant == who.tenant)
        and number in (None, namespace.tenant)
        and (not model or (namespace.layout is not None and namespace.layout.model == model))
    )


def named(
    explained: Explained, authenticator: Authenticator, namespaces: Namespaces
) -> tuple[dict[str, Any], ...]:
    """Returns the blocks of an answer with names instead of the namespace's number."""
    return tuple(_named(block, authenticator, namespaces) for block in explained.blocks)


def _named(block: dict[str, Any], authenticator: Authenticator, namespaces: Namespaces) -> dict[str, Any]:
    rest = {name: value for name, value in block.items() if name != "namespace"}
    namespace = namespaces.at(block["namespace"])
    assert namespace is not None, "the core answers in the same turn of the event loop"
    layout = namespace.layout
    return {
        "tenant": authenticator.name(namespace.tenant),
        "model": layout.model if layout is not None else "",
        "revision": layout.revision if layout is not None else "",
        "shard": layout.shard if layout is not None else "",
        **rest,
    }
