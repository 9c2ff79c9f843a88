"""The catalog of namespaces: opened, recorded on devices, published to other tenants, closed.

The catalog keeps the core, the table of namespaces and the records on NVMe devices in step. Deletion is not
covered here: see `deletion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.entry_kinds import EntryKind
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


@dataclass(slots=True, eq=False)
class NamespaceCatalog:
    """Opens, finds, publishes and closes namespaces of all tenants."""

    _core: Executor
    _durable: Durability
    _tiers: TierSet
    _namespaces: Namespaces
    _domains: Domains
    _authenticator: Authenticator
    _data_keys: DataKeys
    _event_log: EventLog
    _config: CurrentConfig
    _has_network: bool
    _epochs: dict[bytes, bytes] = field(default_factory=dict, init=False)
    on_freed: Callable[[Sequence[int]], None] = lambda numbers: None
    """Called with numbers of namespaces of which nothing is left."""
    on_opened: Callable[[], None] = lambda: None
    """Called when a namespace has got a number."""
    on_closed: Callable[[int, int], None] = lambda number, tenant: None
    """Called when only one tenant, or no tenant (-1), may still wait for blocks of a namespace."""

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
        namespace = self._namespaces.find(who.tenant, fingerprint)
        named = namespace is not None and namespace.layout is not None and namespace.number > 0
        if namespace is None:
            configured = self._config().tenants.get(who.name)
            default = (configured.ttl if configured is not None else None) or 0.0
            namespace = NamespaceEntry(0, fingerprint, who.tenant, layout.block_bytes, ttl_s=ttl_s or default)
            namespace.domain = self._domains.of(who.tenant, who.name, frozenset())
        namespace.layout = layout
        if named and ttl_s in (0.0, namespace.ttl_s):
            return namespace, ac.Answer(0, namespace.number)
        if not (namespace.number or waits) and who.role < Role.WRITE and not self._has_network:
            return namespace, ac.Answer(0, 0)
        namespace.ttl_s = ttl_s or namespace.ttl_s
        return self.reopen(namespace)

    def _open_published(
        self, who: Principal, layout: Layout, owner: str
    ) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        number = self._authenticator.number(owner)
        namespace = self._namespaces.find(number, layout.fingerprint(owner)) if number is not None else None
        if namespace is not None and self.may_read(who, namespace):
            return namespace, ac.Answer(0, namespace.number)
        return None, ac.Deny(0, "not published")

    def reopen(self, namespace: NamespaceEntry) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        """Opens a namespace in the core and records it. A namespace without a number gets a new one."""
        is_new = not namespace.number
        answer = self._open(namespace, self._namespaces.in_use)
        if isinstance(answer, ac.Deny):
            return None, answer
        if is_new:
            self._event_log.opened(namespace.number)
        self.record(namespace)
        if is_new:
            self.on_opened()
        return namespace, answer

    def _open(self, namespace: NamespaceEntry, in_use: frozenset[int] | None) -> ac.Answer | ac.Deny:
        """Opens a namespace in the core, which may close those that are not `in_use`; None: none."""
        encrypted = self._data_keys.are_used_by(self._authenticator.name(namespace.tenant))
        event = ev.OpenNamespace(
            0,
            namespace.number or self._namespaces.new_number(),
            namespace.block_bytes,
            namespace.tenant,
            namespace.domain,
            namespace.ttl_s,
            ENCRYPTION_BYTES if encrypted else 0,
            namespace.layout.block_tokens if namespace.layout is not None else 0,
            in_use is not None,
            in_use or frozenset(),
            namespace.independent,
        )
        answer = self._core.call(event)
        if not isinstance(answer, ac.Deny):
            namespace.number = event.namespace
            self._namespaces.add(namespace)
        return answer

    # -- recovery

    def restore(self, namespace: NamespaceEntry) -> bool:
        """Opens a recovered namespace, under its number if it has one. Returns False if limits forbid it."""
        # The core must not close namespaces that were opened just before: they get their blocks only later.
        return not isinstance(self._open(namespace, None), ac.Deny)

    def keep_epoch(self, record: Namespace) -> None:
        """Keeps the epoch of a namespace without blocks on a device, for blocks that are found in DRAM.

        If devices have different ones, the earliest counts.
        """
        earlier = self._epochs.get(record.fingerprint, record.epoch)
        self._epochs[record.fingerprint] = min(earlier, record.epoch)

    def restored(self, tenant: int, fingerprint: bytes, block_bytes: int) -> int:
        """Returns the number of a namespace found in DRAM. Opens it if absent; 0 if that is impossible."""
        namespace = self._namespaces.find(tenant, fingerprint)
        if namespace is None:
            domain = self._domains.of(tenant, self._authenticator.name(tenant), frozenset())
            namespace = NamespaceEntry(0, fingerprint, tenant, block_bytes, domain=domain)
            namespace.epoch = self._epochs.get(fingerprint) or None
            if not self.restore(namespace):
                return 0
            self.record(namespace)
        return namespace.number if namespace.block_bytes == block_bytes else 0

    def entry_of(self, number: int, tenant: int, record: Namespace) -> NamespaceEntry | None:
        """Returns the entry of a namespace's record. None if the record is damaged."""
        readers = frozenset(record.readers)
        try:
            layout = Layout(**record.layout) if "model" in record.layout else None
        except (MisuseError, TypeError):
            return None
        block_bytes = int(record.layout["block_bytes"])
        domain = self._domains.of(tenant, record.tenant, readers)
        entry = NamespaceEntry(
            number, record.fingerprint, tenant, block_bytes, layout, readers, domain, record.ttl_s
        )
        entry.epoch = record.epoch or None
        return entry

    def record(self, namespace: NamespaceEntry, devices: Iterable[NvmeTier] = ()) -> None:
        """Records a namespace on these devices, without any on all, before any block of it."""
        layout = (
            namespace.layout.to_map()
            if namespace.layout is not None
            else {"block_bytes": namespace.block_bytes}
        )
        name = self._authenticator.name(namespace.tenant)
        readers, epoch = tuple(sorted(namespace.readers)), namespace.epoch or b""
        record = Namespace(
            name, layout, namespace.fingerprint, readers=readers, ttl_s=namespace.ttl_s, epoch=epoch
        )
        for device in devices or self._tiers.devices.values():
            device.put_namespace(namespace.number, record)

    def record_all(self, devices: Iterable[NvmeTier]) -> None:
        """Records all namespaces on these devices."""
        for namespace in self._namespaces:
            self.record(namespace, devices)

    # -- access

    def may_read(self, who: Principal, namespace: NamespaceEntry) -> bool:
        """Returns whether a principal may read a namespace now."""
        return namespace.tenant == who.tenant or who.name in namespace.readers

    def may_map(self, who: Principal, extent: int, writable: bool) -> bool:
        """Returns whether a principal may map a memory extent now."""
        tier = self._tiers.memory_of(extent)
        pool = self._core.view.tiers[tier].pool_of(extent) if tier is not None else None
        if pool is None:
            return False
        if pool.tenant == who.tenant:
            return True
        return not (tier or writable) and any(
            s.domain == pool.domain and who.name in s.readers for s in self._namespaces
        )

    def publish(
        self, requester: Requester, request: int, namespace: NamespaceEntry, readers: Sequence[str]
    ) -> None:
        """Lets these tenants, and no others, read a namespace, and answers when this is durable."""
        names = frozenset(readers) - {self._authenticator.name(namespace.tenant)}
        if len(names) > _MOST_READERS:
            why = f"a namespace published to {len(names)} tenants"
            requester.answer(request, ac.Deny(request, why, f"at most {_MOST_READERS}"))
            return
        owner = self._authenticator.name(namespace.tenant)
        namespace.readers = names
        namespace.domain = self._domains.of(namespace.tenant, owner, names)
        self._domains.tidy(self._domains_in_use)
        self.record(namespace)
        # A tenant that may no longer read must not learn of new blocks.
        self.on_closed(namespace.number, namespace.tenant)
        detail = f"to {', '.join(sorted(names)) or 'nobody'}"
        self._event_log.add(
            EntryKind.PUBLISHED, tenant=owner, namespace=namespace.fingerprint.hex(), detail=detail
        )
        self._durable.ask(requester, request, ev.Publish(0, namespace.number, namespace.domain))

    def _domains_in_use(self) -> set[int]:
        return {each.domain for each in self._namespaces} | self._core.view.tiers[0].domains()

    # -- closing

    def closed(self, action: ac.NamespaceClosed) -> None:
        """Removes a namespace that the core has closed. Connections that use it again reopen it."""
        number = action.namespace
        namespace = self._namespaces.at(number)
        assert namespace is not None, f"namespace {number} was closed and is not open"
        self._event_log.closed(
            number, self._authenticator.name(namespace.tenant), namespace.fingerprint.hex()
        )
        self._namespaces.close(namespace)
        self._namespaces.remove(namespace)
        self.free((number,))

    def close(self, namespaces: Sequence[NamespaceEntry]) -> tuple[int, ...]:
        """Takes the numbers of namespaces of one tenant away, and returns these. `free` follows later."""
        for namespace in namespaces:
            owner = self._authenticator.name(namespace.tenant)
            self._event_log.closed(namespace.number, owner, namespace.fingerprint.hex())
        numbers = tuple(self._namespaces.close(namespace) for namespace in namespaces if namespace.number)
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
