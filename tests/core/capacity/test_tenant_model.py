"""Several tenants against the same plain dictionary: quotas change, extents change hands, others read."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from tests.core.test_model import (
    BLOCK_BYTES,
    INDEPENDENT,
    WAITS,
    Asked,
    Faulty,
    chains,
    clients,
    places,
    some,
)
from tests.core.world import World

OWNER = {1: 1, 2: 2, 3: 1, 4: 2}
SHARED = 70_000
floors = st.integers(0, 2)
rooms = st.sampled_from([0, 1, 4, 100])


class Tenants(Faulty):
    """Namespaces 1 and 3 are one tenant's, 2 and 4 another's, and a third may read what is published."""

    @initialize(
        dram=st.integers(2, 5),
        nvme=st.sampled_from([0, 2, 5]),
        hbm=st.sampled_from([0, 2, (1, 3)]),
        slots=st.sampled_from([2, 4, 7]),
        write_policy=st.sampled_from(["write_through", "on_evict"]),
        policy=st.sampled_from(list(POLICIES)),
    )
    def start(  # type: ignore[override]
        self,
        dram: int,
        nvme: int,
        hbm: int | tuple[int, ...],
        slots: int,
        write_policy: str,
        policy: str,
    ) -> None:
        self.w = World(dram, nvme, slots=slots, write_policy=write_policy, policy=policy, hbm=hbm)
        self.domains = SHARED
        for namespace in OWNER:
            self.open(namespace)

    def open(self, namespace: int) -> None:
        independent = namespace == INDEPENDENT
        self.w.open(namespace, BLOCK_BYTES[namespace], OWNER[namespace], independent=independent)

    @rule(tenant=st.integers(1, 2), of=st.lists(st.tuples(floors, rooms), min_size=3, max_size=3))
    def quota(self, tenant: int, of: list[tuple[int, int]]) -> None:
        quotas = [(floor, None if room == 100 else floor + room) for floor, room in of]
        self.w.tenant(tenant, *quotas[: len(self.w.p.residency.tiers)])

    @rule(namespace=st.sampled_from(list(OWNER)), back=st.booleans())
    def publish(self, namespace: int, back: bool) -> None:
        self.domains += 1
        self.w.publish(namespace, OWNER[namespace] if back else self.domains)

    @rule(client=clients, chain=chains(), wait=st.sampled_from(WAITS), place=places)
    def read_what_is_published(
        self, client: int, chain: tuple[int, list[bytes]], wait: float, place: int
    ) -> None:
        namespace, keys = chain
        if self.w.opened[namespace].domain >= SHARED:
            answer = self.w.acquire(client, namespace, keys, wait, tenant=9, at=self.at(place))
            asked = Asked(client, namespace, keys)
            if answer is None:
                self.asked[self.w.last_request] = asked
            else:
                self.take_grant(asked, answer)

    @precondition(lambda self: self.w.renewals)
    @rule(which=some)
    def extent_is_renewed(self, which: int) -> None:
        self.w.renew(which % len(self.w.renewals))

    @rule(seconds=st.sampled_from([0.01, 0.2, 12.0]))
    def all_goes_well_for_a_while(self, seconds: float) -> None:
        self.w.pass_time(seconds)

    @rule(namespace=st.sampled_from(list(OWNER)))
    def forget_all(self, namespace: int) -> None:
        self.w.ask(ev.Forget(0, (namespace,)))
        self.gone([namespace])
        self.reopen([namespace], self.w.last_request)

    @rule(tenant=st.integers(1, 2))
    def forget_tenant(self, tenant: int) -> None:
        mine = [n for n, owner in OWNER.items() if owner == tenant]
        self.w.ask(ev.ForgetTenant(0, tenant))
        request = self.w.last_request
        self.leases = [x for x in self.leases if x.lease in self.w.p.leases.leases]
        self.rooms = [x for x in self.rooms if x.namespace not in mine]
        self.gone(mine)
        self.reopen(mine, request)
        assert tenant not in self.w.whose.values()
        self.w.tenants.pop(tenant, None)
        self.quota(tenant, [(0, 100)] * 3)

    def gone(self, namespaces: list[int]) -> None:
        """From now on these are misses."""
        self.stored = {who: data for who, data in self.stored.items() if who[0] not in namespaces}
        self.pinned = {who: until for who, until in self.pinned.items() if who[0] not in namespaces}
        for o in self.rooms:
            if o.namespace in namespaces:
                o.dead.update(o.keys)

    def reopen(self, namespaces: list[int], request: int) -> None:
        for _ in range(20):
            for number in list(self.w.probes):
                self.w.probe(number)
            self.w.pass_time(0.2)
        assert request in self.w.answers, "never forgotten"
        for namespace in namespaces:
            self.open(namespace)

    @precondition(lambda self: any(c.target or c.source for c in self.w.copies.values()))
    @rule()
    def device_is_quiet(self) -> None:
        device = self.w.p.residency.tiers[1].device
        self.w.now += 20
        self.w.send(ev.Tick())
        assert device.fenced or not device.moving


profile = settings()
TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=profile.max_examples, stateful_step_count=60)
