"""The catalog of namespaces: opened, recorded on devices, published to other tenants, closed.

The catalog keeps the core, the table of namespaces and the records on NVMe devices in step. Deletion is not
covered here: see `deletion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig, EventLog, Requester
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.tenancy.auth import Authenticator, Principal, Role
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.namespaces import Domains, NamespaceEntry, Namespaces
from kvstore.errors import MisuseError
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ENCRYPTION_BYTES, Layout

_MOST_READERS = 64


class NamespaceCatalog:
    """Opens, finds, publishes and closes namespaces of all tenants."""

    def __init__(
        self,
        core: Executor,
        durable: Durability,
        tiers: TierSet,
        namespaces: Namespaces,
        domains: Domains,
        authenticator: Authenticator,
        data_keys: DataKeys,
        event_log: EventLog,
        config: CurrentConfig,
        *,
        has_network: bool,
    ) -> None:
        self.on_freed: Callable[[Sequence[int]], None] = lambda numbers: None
        """Called with numbers of namespaces of which nothing is left."""
        self.on_closed: Callable[[int, int], None] = lambda number, tenant: None
        """Called when only one tenant, or no tenant (-1), may still wait for blocks of a namespace."""
        self._core = core
        self._durable = durable
        self._view = core.view
        self._tiers = tiers
        self._namespaces = namespaces
        self._domains = domains
        self._authenticator = authenticator
        self._data_keys = data_keys
        self._event_log = event_log
        self._config = config
        self._has_network = has_network

    # -- opening

    def open(
        self, who: Principal, layout: Layout, owner: str = "", ttl_s: float = 0.0, waits: bool = False
    ) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        """Opens a namespace of the principal's tenant, or one that `owner` has published to it.

        Creates an absent namespace of the tenant, unless the principal only reads, does not wait for a block,
        and there is no network tier: then the entry has number 0 and is not kept. With a network tier,
        readers create namespaces too, because their blocks may be on the network. `ttl_s` above 0 sets the
        lifetime of blocks that are stored from now on. 0 keeps the lifetime, which is the tenant's default at
        first.
        """
        if owner:
            return self._open_published(who, layout, owner)
        fingerprint = layout.fingerprint(who.name)
        space = self._namespaces.find(who.tenant, fingerprint)
        named = space is not None and space.layout is not None and space.number > 0
        if space is None:
            configured = self._config().tenants.get(who.name)
            default = (configured.ttl if configured is not None else None) or 0.0
            space = NamespaceEntry(0, fingerprint, who.tenant, layout.block_bytes, ttl_s=ttl_s or default)
            space.domain = self._domains.of(who.tenant, who.name, frozenset())
        space.layout = layout
        if named and ttl_s in (0.0, space.ttl_s):
            return space, ac.Answer(0, space.number)
        if not (space.number or waits) and who.role < Role.WRITE and not self._has_network:
            return space, ac.Answer(0, 0)
        space.ttl_s = ttl_s or space.ttl_s
        return self.reopen(space)

    def _open_published(
        self, who: Principal, layout: Layout, owner: str
    ) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        number = self._authenticator.number(owner)
        space = self._namespaces.find(number, layout.fingerprint(owner)) if number is not None else None
        if space is not None and self.may_read(who, space):
            return space, ac.Answer(0, space.number)
        return None, ac.Deny(0, "not published")

    def reopen(self, space: NamespaceEntry) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        """Opens a namespace in the core and records it. A namespace without a number gets a new one."""
        number = space.number or self._namespaces.new_number()
        event = self._event(space, number)
        event.in_use = self._namespaces.in_use
        answer = self._core.call(event)
        if isinstance(answer, ac.Deny):
            return None, answer
        if not space.number:
            self._event_log.opened(number)
        space.number = number
        self._namespaces.add(space)
        self.record(space)
        return space, answer

    def _event(self, space: NamespaceEntry, number: int) -> ev.OpenNamespace:
        extra = ENCRYPTION_BYTES if self._data_keys.are_used_by(self._authenticator.name(space.tenant)) else 0
        tokens = space.layout.block_tokens if space.layout is not None else 0
        return ev.OpenNamespace(
            0, number, space.block_bytes, space.tenant, space.domain, space.ttl_s, extra, tokens
        )

    # -- recovery

    def restore(self, space: NamespaceEntry) -> bool:
        """Opens a recovered namespace, under its number if it has one. Returns False if limits forbid it."""
        number = space.number or self._namespaces.new_number()
        event = self._event(space, number)
        # Namespaces that were opened just before get their blocks only later.
        event.may_close = False
        if isinstance(self._core.call(event), ac.Deny):
            return False
        space.number = number
        self._namespaces.add(space)
        return True

    def entry_of(self, number: int, tenant: int, record: Namespace) -> NamespaceEntry | None:
        """Returns the entry of a namespace's record. None if the record is damaged."""
        readers = frozenset(record.readers)
        try:
            layout = Layout(**record.layout) if "model" in record.layout else None
        except (MisuseError, TypeError):
            return None
        block_bytes = int(record.layout["block_bytes"])
        domain = self._domains.of(tenant, record.tenant, readers)
        return NamespaceEntry(
            number, record.fingerprint, tenant, block_bytes, layout, readers, domain, record.ttl_s
        )

    def record(self, space: NamespaceEntry, devices: Iterable[NvmeTier] | None = None) -> None:
        """Records a namespace on these devices, or on all, before any block of it."""
        layout = space.layout.to_map() if space.layout is not None else {"block_bytes": space.block_bytes}
        name = self._authenticator.name(space.tenant)
        readers = tuple(sorted(space.readers))
        for device in self._tiers.devices.values() if devices is None else devices:
            record = Namespace(name, layout, space.fingerprint, readers=readers, ttl_s=space.ttl_s)
            device.put_namespace(space.number, record)

    # -- access

    def may_read(self, who: Principal, space: NamespaceEntry) -> bool:
        """Returns whether a principal may read a namespace now."""
        return space.tenant == who.tenant or who.name in space.readers

    def may_map(self, who: Principal, extent: int, writable: bool) -> bool:
        """Returns whether a principal may map a memory extent now."""
        tier = self._tiers.memory_of(extent)
        if tier is None:
            return False
        pool = self._view.tiers[tier].pool_of(extent)
        if pool is None:
            return False
        if pool.tenant == who.tenant:
            return True
        return not (tier or writable) and any(
            s.domain == pool.domain and who.name in s.readers for s in self._namespaces
        )

    def publish(
        self, requester: Requester, request: int, space: NamespaceEntry, readers: Sequence[str]
    ) -> None:
        """Lets these tenants, and no others, read a namespace. The answer comes when this is durable."""
        names = frozenset(readers) - {self._authenticator.name(space.tenant)}
        if len(names) > _MOST_READERS:
            why = f"a namespace published to {len(names)} tenants"
            requester.answer(request, ac.Deny(request, why, f"at most {_MOST_READERS}"))
            return
        owner = self._authenticator.name(space.tenant)
        space.readers = names
        space.domain = self._domains.of(space.tenant, owner, names)
        self.record(space)
        # A tenant that may no longer read must not learn of new blocks.
        self.on_closed(space.number, space.tenant)
        detail = f"to {', '.join(sorted(names)) or 'nobody'}"
        self._event_log.add("published", tenant=owner, namespace=space.fingerprint.hex(), detail=detail)
        self._durable.ask(requester, request, ev.Publish(0, space.number, space.domain))

    # -- closing

    def closed(self, action: ac.NamespaceClosed) -> None:
        """Removes a namespace that the core has closed. Connections that use it again reopen it."""
        number = action.namespace
        space = self._namespaces.at(number)
        assert space is not None, f"namespace {number} was closed and is not open"
        self._event_log.closed(number, self._authenticator.name(space.tenant), space.fingerprint.hex())
        self._namespaces.close(space)
        self._namespaces.remove(space)
        self.free((number,))

    def close(self, spaces: Sequence[NamespaceEntry]) -> tuple[int, ...]:
        """Takes the numbers of namespaces of one tenant away, and returns these. `free` follows later."""
        for space in spaces:
            owner = self._authenticator.name(space.tenant)
            self._event_log.closed(space.number, owner, space.fingerprint.hex())
        numbers = tuple(self._namespaces.close(space) for space in spaces if space.number)
        for number in numbers:
            self.on_closed(number, -1)
        return numbers

    def free(self, numbers: Sequence[int]) -> None:
        """Makes numbers available again, when nothing of their namespaces is left."""
        self.on_freed(numbers)
        for number in numbers:
            self._namespaces.forgotten(number)
            for device in self._tiers.devices.values():
                device.forget_namespace(number)
