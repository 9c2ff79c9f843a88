"""What tenants have and do as such: namespaces opened, published, forgotten; quotas; a tenant's end.

Who may do what with the blocks of whom is decided here and in `requests`; the core only knows numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.config import Config, Tenant
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.capacity.quotas import UNLIMITED, Quota
from kvstore.core.transfers.devices import TierSpec
from kvstore.daemon.operator import resizing
from kvstore.daemon.runtime import policy_state
from kvstore.daemon.tenancy.auth import Authenticator, Principal, Role
from kvstore.daemon.tenancy.namespaces import Domains, NamespaceEntry, Namespaces
from kvstore.errors import ConfigError, KVStoreError, MisuseError, TierError
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import SEAL_BYTES, Layout, Tier

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Asker, Shell

_log = logging.getLogger(__name__)

_LEFT_OVER = 0.001
"""The share of a tenant that is not configured any more: the first to give way, but not without need."""
_BURST_S = 1.0
_MOST_READERS = 64
_RETRY_S = 0.1


class Tenancy:
    """All tenants of one daemon and their namespaces."""

    def __init__(self, config: Config, shell: Shell) -> None:
        self.registry = Authenticator(config)
        self.namespaces = Namespaces()
        self.domains = Domains()
        self._going: Counter[int] = Counter()
        self._deleting: Counter[int] = Counter()
        self._shell = shell

    # -- what each may have

    def check(self, config: Config) -> None:
        """Raises ConfigError if floors, in whole extents, are more than a tier has."""
        for spec, limit in resizing.specs(self._shell, config):
            name, size, there = spec.name, spec.extent_bytes, limit // spec.extent_bytes
            floors = sum(-(-_quota(t, spec, config).floor // size) for t in config.tenants.values())
            if floors > there:
                raise ConfigError(
                    f"floors of {name} take {floors} extents of {size} bytes each, the tier has {there}",
                    "lower floors, or raise the tier's limit",
                )

    def consequences(self, config: Config) -> list[dict[str, Any]]:
        """What tenants would lose to new limits, and could take from others for new floors, in bytes."""
        before, rows = self._shell.config.tenants, []
        for name in dict.fromkeys((*before, *config.tenants)):
            old, new = before.get(name, Tenant()), config.tenants.get(name, Tenant())
            if old.quotas == new.quotas:
                continue
            number = self.registry.number(name)
            for state in self._shell.placement.residency.tiers:
                quota, holdings = _quota(new, state.spec, config), state.extents.holdings
                used, held = (0, 0) if number is None else (holdings.of(number)[0], holdings.held(number))
                lost, lacking = max(0, used - quota.limit), max(0, quota.floor - held)
                if lost or lacking:
                    tier = state.spec.name
                    rows.append(
                        {"tenant": name, "tier": tier, "evicted_bytes": lost, "claimed_bytes": lacking}
                    )
        return rows

    def apply(self, config: Config) -> None:
        """Takes over members and quotas; who is no longer configured keeps what it has, for now."""
        self.registry.reload(config)
        for name in self.registry.names():
            self._set(name, config)
            self.domains.of(self.registry.add(name), name, frozenset())
        for name, tenant in config.tenants.items():
            self._encrypt(name, tenant.encrypt)

    def _encrypt(self, name: str, wanted: bool) -> None:
        """A tenant that has come with a reload, and has nothing yet, is encrypted from now on."""
        number = self.registry.add(name)
        for device in self._shell.devices.values():
            if device.encrypts(name) != wanted:
                if wanted and not self.namespaces.of(number):
                    device.encrypt(name)
                else:
                    _log.warning("needs a restart: tenants.%s.encrypt", name)

    def _set(self, name: str, config: Config) -> None:
        tiers = self._shell.placement.residency.tiers
        number = self.registry.add(name)
        if self._deleting[number]:
            return  # it may have nothing until nothing is left of it
        tenant = config.tenants.get(name)
        if tenant is not None:
            quotas = tuple(_quota(tenant, state.spec, config) for state in tiers)
            rate = float(tenant.bandwidth or 0)
            pin = UNLIMITED if tenant.pin is None else tenant.pin
            event = ev.SetTenant(number, quotas, tenant.share, pin, rate, rate * _BURST_S)
        else:
            share = 1.0 if not config.tenants else _LEFT_OVER
            event = ev.SetTenant(number, tuple(Quota(share=share) for _ in tiers))
        self._shell.handle(event)
        if self._shell.remote is not None:
            self._shell.remote.set_tenant(event)

    def known(self, name: str) -> int | None:
        """The number of a tenant of which something was found, a new one if it is not configured.

        None if no tenant can have this name: then it is damage.
        """
        number = self.registry.number(name)
        if number is None:
            try:
                number = self.registry.add(name)
            except KVStoreError as error:
                _log.error("what is on record of a tenant is forgotten: %s", error)
                return None
            self._set(name, self._shell.config)
            self.domains.of(number, name, frozenset())
        return number

    # -- namespaces

    def open(
        self, who: Principal, layout: Layout, owner: str = "", ttl_s: float = 0.0, waits: bool = False
    ) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        """A namespace of one's own, made if absent, or one that its owner has published.

        A reader makes none unless it `waits` for a block: an absent one has number 0, and is not kept. Blocks
        on a network can't be told without one, so where there is a network tier readers make them too.
        `ttl_s` above 0 changes how long blocks live that are stored from now on; else the default counts.
        """
        if owner:
            number = self.registry.number(owner)
            space = self.namespaces.find(number, layout.fingerprint(owner)) if number is not None else None
            if space is not None and self.may_read(who, space):
                return space, ac.Answer(0, space.number)
            return None, ac.Deny(0, "not published")
        fingerprint = layout.fingerprint(who.name)
        space = self.namespaces.find(who.tenant, fingerprint)
        named = space is not None and space.layout is not None and space.number > 0
        configured = self._shell.config.tenants.get(who.name)
        default = (configured.ttl if configured is not None else None) or 0.0
        if space is None:
            space = NamespaceEntry(0, fingerprint, who.tenant, layout.block_bytes, ttl_s=ttl_s or default)
            space.domain = self.domains.of(who.tenant, who.name, frozenset())
        space.layout = layout
        if named and ttl_s in (0.0, space.ttl_s):
            return space, ac.Answer(0, space.number)
        if not (space.number or waits) and who.role < Role.WRITE and self._shell.remote is None:
            return space, ac.Answer(0, 0)
        space.ttl_s = ttl_s or space.ttl_s
        return self._open(space)

    def _open(self, space: NamespaceEntry) -> tuple[NamespaceEntry | None, ac.Answer | ac.Deny]:
        number = space.number or self.namespaces.new_number()
        event = self._event(space, number)
        event.in_use = self.namespaces.in_use
        answer = self._shell.call(event)
        if isinstance(answer, ac.Deny):
            return None, answer
        if not space.number:
            self._shell.chronicle.opened(number)
        space.number = number
        self.namespaces.add(space)
        self.record(space)
        return space, answer

    def closed(self, number: int) -> None:
        """The core has closed a namespace. Connections that use it again have it opened again."""
        space = self.namespaces.at(number)
        assert space is not None, f"namespace {number} was closed and is not open"
        self._shell.chronicle.closed(number, self.registry.name(space.tenant), space.fingerprint.hex())
        self.namespaces.close(space)
        self.namespaces.remove(space)
        self._free((number,))

    def _event(self, space: NamespaceEntry, number: int) -> ev.OpenNamespace:
        extra = SEAL_BYTES if self._encrypts(self.registry.name(space.tenant)) else 0
        tokens = space.layout.block_tokens if space.layout is not None else 0
        return ev.OpenNamespace(
            0, number, space.block_bytes, space.tenant, space.domain, space.ttl_s, extra, tokens
        )

    def encrypts(self, tenant: int) -> bool:
        """Whether a tenant's blocks are to be read by nobody who has the device, or the network."""
        name = self.registry.name(tenant)
        configured = self._shell.config.tenants.get(name)
        return self._encrypts(name) or (configured is not None and configured.encrypt)

    def _encrypts(self, name: str) -> bool:
        return any(device.encrypts(name) for device in self._shell.devices.values())

    def has_keys(self, name: str) -> bool:
        """Whether namespaces of a tenant can be opened without waiting for a data key to be made."""
        return all(device.has_key(name) for device in self._shell.devices.values())

    def make_keys(self, name: str, ended: Callable[[Exception | None], None]) -> None:
        """Makes the data keys that an encrypted tenant lacks, on threads; `ended` gets an error, if any."""
        lacking = [device for device in self._shell.devices.values() if not device.has_key(name)]
        self._change_keys([(device, device.make_key) for device in lacking], name, ended)

    def _change_keys(
        self,
        changes: Sequence[tuple[NvmeTier, Callable[[str], None]]],
        name: str,
        ended: Callable[[Exception | None], None],
    ) -> None:
        left, failed = len(changes), None

        def changed(error: Exception | None) -> None:
            nonlocal left, failed
            left, failed = left - 1, failed or error
            if not left:
                ended(failed)

        for device, change in changes:
            device.change_key(change, name, partial(self._shell.soon, changed))
        if not changes:
            ended(None)

    def restore(self, space: NamespaceEntry) -> bool:
        """A namespace of which something was found, under its number if it has one; False: no room for it."""
        number = space.number or self.namespaces.new_number()
        event = self._event(space, number)
        # Those that were opened just before get their blocks only later.
        event.may_close = False
        if isinstance(self._shell.call(event), ac.Deny):
            return False
        space.number = number
        self.namespaces.add(space)
        return True

    def record(self, space: NamespaceEntry, devices: Iterable[NvmeTier] | None = None) -> None:
        """Puts a namespace on record, before any block of it; on these devices, or on all."""
        layout = space.layout.to_map() if space.layout is not None else {"block_bytes": space.block_bytes}
        name = self.registry.name(space.tenant)
        readers = tuple(sorted(space.readers))
        for device in self._shell.devices.values() if devices is None else devices:
            record = Namespace(name, layout, space.fingerprint, readers=readers, ttl_s=space.ttl_s)
            device.put_namespace(space.number, record)

    def found(self, number: int, record: Namespace) -> NamespaceEntry | None:
        """The namespace that is on record under a number; None if what is on record makes no sense."""
        tenant = self.known(record.tenant)
        if tenant is None:
            return None
        readers = frozenset(record.readers)
        try:
            layout = Layout(**record.layout) if "model" in record.layout else None
        except (MisuseError, TypeError):
            return None
        block_bytes = int(record.layout["block_bytes"])
        domain = self.domains.of(tenant, record.tenant, readers)
        return NamespaceEntry(
            number, record.fingerprint, tenant, block_bytes, layout, readers, domain, record.ttl_s
        )

    # -- who may see what

    def may_read(self, who: Principal, space: NamespaceEntry) -> bool:
        """Whether a tenant may read a namespace now."""
        return space.tenant == who.tenant or who.name in space.readers

    def may_map(self, who: Principal, extent: int, writable: bool) -> bool:
        """Whether a tenant may map an extent of memory now."""
        tier = self._shell.memory_of(extent)
        if tier is None:
            return False
        pool = self._shell.placement.residency.tiers[tier].extents.pool_at(extent)
        if pool is None:
            return False
        if pool.tenant == who.tenant:
            return True
        return not (tier or writable) and any(
            s.domain == pool.domain and who.name in s.readers for s in self.namespaces
        )

    def publish(self, asker: Asker, request: int, space: NamespaceEntry, readers: Sequence[str]) -> None:
        """From now on these tenants, and no others, may read a namespace; answered when that is durable."""
        names = frozenset(readers) - {self.registry.name(space.tenant)}
        if len(names) > _MOST_READERS:
            why = f"a namespace published to {len(names)} tenants"
            asker.answer(request, ac.Deny(request, why, f"at most {_MOST_READERS}"))
            return
        space.readers = names
        space.domain = self.domains.of(space.tenant, self.registry.name(space.tenant), names)
        self.record(space)
        # Readers may not learn any more what is stored, perhaps.
        self._shell.waits.end(space.number, but=space.tenant)
        self._tell("published", space, f"to {', '.join(sorted(names)) or 'nobody'}")
        self._shell.ask_durably(asker, request, ev.Publish(0, space.number, space.domain))

    # -- ends

    def forget(self, asker: Asker, request: int, spaces: Sequence[NamespaceEntry]) -> None:
        """These namespaces of a tenant are empty from now on; answered when nothing is left, durably."""
        tenant = spaces[0].tenant
        if self._has_much_going(asker, request, tenant):
            return
        for space in spaces:
            self._tell("forgotten", space)
        numbers = self._close(tenant, spaces)
        event = ev.Forget(0, numbers)

        def gone(ended: _Ended) -> None:
            self._gone(tenant, numbers)
            ended(None)

        self._also_there(
            asker, request, spaces, lambda then: self._shell.ask_durably(_Then(then, gone), request, event)
        )
        for space in spaces:
            self._open(space)

    def delete(self, asker: Asker, request: int, name: str) -> None:
        """Nothing is left of a tenant, on any tier; answered when that is durable. Members stay members."""
        tenant = self.registry.number(name)
        assert tenant is not None
        if self._has_much_going(asker, request, tenant):
            return
        spaces = self.namespaces.of(tenant)
        numbers = self._close(tenant, spaces)
        for space in spaces:
            self.namespaces.remove(space)
        self._shell.chronicle.add("deleted", tenant=name, detail=f"{len(spaces)} namespaces")

        def gone(ended: _Ended) -> None:
            self._gone(tenant, numbers)
            policy_state.discard(self._shell)
            devices = self._shell.devices.values() if self._encrypts(name) else ()
            erase = [(device, device.erase_key) for device in devices]
            self._change_keys(erase, name, partial(erased, ended))

        def erased(ended: _Ended, error: Exception | None) -> None:
            if error is None and self._encrypts(name) and self.namespaces.of(tenant):
                # Those that have been opened again meanwhile get a seal by the next key.
                self.make_keys(name, partial(sealed_anew, ended))
            else:
                ended(error)

        def sealed_anew(ended: _Ended, error: Exception | None) -> None:
            try:
                for space in self.namespaces.of(tenant) if error is None else ():
                    self.record(space)
            except TierError as failure:
                error = failure
            ended(error)

        def deleted() -> None:
            self._deleting[tenant] -= 1
            self._set(name, self._shell.config)

        self._deleting[tenant] += 1
        event = ev.ForgetTenant(0, tenant)
        self._also_there(
            asker,
            request,
            spaces,
            lambda then: self._shell.ask_durably(_Then(then, gone, deleted), request, event),
        )

    def _also_there(
        self, asker: Asker, request: int, spaces: Sequence[NamespaceEntry], here: Callable[[Asker], None]
    ) -> None:
        """Forgets namespaces `here`, and on the network, if there is one."""
        if self._shell.remote is None or not spaces:
            here(asker)
        else:
            self._shell.remote.deletion.delete(asker, request, spaces, None, here)

    def _tell(self, what: str, space: NamespaceEntry, detail: str = "") -> None:
        owner, id = self.registry.name(space.tenant), space.fingerprint.hex()
        self._shell.chronicle.add(what, tenant=owner, namespace=id, detail=detail)

    def _has_much_going(self, asker: Asker, request: int, tenant: int) -> bool:
        """Whether a tenant has to wait until more of what it forgot is gone: numbers are all tenants'."""
        most = self._shell.config.limits.namespaces_per_tenant
        if self._going[tenant] < most and not self._deleting[tenant]:
            return False
        asker.answer(request, ac.Deny(request, "namespaces of this tenant are being forgotten", "", _RETRY_S))
        return True

    def _close(self, tenant: int, spaces: Sequence[NamespaceEntry]) -> tuple[int, ...]:
        owner = self.registry.name(tenant)
        for space in spaces:
            self._shell.chronicle.closed(space.number, owner, space.fingerprint.hex())
        numbers = tuple(self.namespaces.close(s) for s in spaces if s.number)
        for number in numbers:
            self._shell.waits.end(number)
        self._going[tenant] += len(numbers)
        return numbers

    def _gone(self, tenant: int, numbers: Sequence[int]) -> None:
        self._going[tenant] -= len(numbers)
        self._free(numbers)

    def _free(self, numbers: Sequence[int]) -> None:
        """Nothing is left of namespaces with these numbers, which may be given again."""
        self._shell.routing.forgotten(numbers)
        for number in numbers:
            self.namespaces.forgotten(number)
            for device in self._shell.devices.values():
                device.forget_namespace(number)


_Ended = Callable[[Exception | None], None]


def _nothing() -> None:
    pass


class _Then:
    """Does something before an answer goes on: `then` calls what it is given when that has ended.

    `at_last` is called in any case.
    """

    def __init__(
        self, asker: Asker, then: Callable[[_Ended], None], at_last: Callable[[], None] = _nothing
    ) -> None:
        self._asker = asker
        self._then = then
        self._at_last = at_last

    def answer(self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Deny) -> None:
        """See Asker."""

        def ended(error: Exception | None) -> None:
            at_last, self._at_last = self._at_last, _nothing
            at_last()
            self._asker.answer(request, action if error is None else refusal(request, error))

        try:
            self._then(ended)
        except Exception as error:
            ended(error)


def refusal(request: int, error: Exception) -> ac.Deny:
    """What somebody is told whose request has failed by this error."""
    if isinstance(error, TierError):
        return ac.Deny(request, error.message, error.hint)
    _log.error("what follows from a request failed", exc_info=error)
    return ac.Deny(request, "internal error", "see the daemon's log")


def _quota(tenant: Tenant, spec: TierSpec, config: Config) -> Quota:
    """A tenant's part of a device: of what it has of the tier, as much as the device is of that."""
    part = tenant.quotas[spec.tier.name.lower()]
    if spec.tier == Tier.NVME:
        limits = config.nvme.limits
    else:
        limits = {spec.name: config.dram.limit if spec.tier == Tier.DRAM else config.hbm.limit}
    mine, total = limits.get(spec.name, 0), sum(limits.values())
    limit = UNLIMITED if part.limit is None else part.limit * mine // total
    return Quota(-(-part.floor * mine // total), limit, tenant.share)
