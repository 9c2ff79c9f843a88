"""Extents in memory: whose they are after a restart, and changing hands without a byte left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.arena import HEADER, MAGIC, Extent
from kvstore.core.actions import BlockIds, Where
from kvstore.errors import TierError
from kvstore.tiers.base import Owner
from kvstore.tiers.dram import OWNERS, DramTier, Inherited
from kvstore.tiers.ownership import OwnershipTable
from kvstore.types import ALIGN, LABEL_BYTES
from tests.tiers.nvme.at_once import AtOnce

MIB = 1 << 20
EXTENTS = 3
A, B = b"a" * 16, b"b" * 16
SECRET = b"secret of tenant a"


class Keeper:
    """Keeps descriptors as a service manager does."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.deaf = False

    def keep(self, name: str, fd: int) -> None:
        assert name not in self.kept, f"{name} is given twice"
        self.kept[name] = os.dup(fd)

    def forget(self, name: str) -> None:
        if not self.deaf:
            os.close(self.kept.pop(name))

    def handed_over(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.kept.items()}

    @property
    def extents(self) -> list[str]:
        return sorted(self.kept.keys() - {OWNERS})


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    for fd in made.kept.values():
        os.close(fd)


def tier_of(keeper: Keeper, limit: int = EXTENTS * MIB) -> DramTier:
    """The next daemon's tier, with what the keeper has; what follows runs at once."""
    tier = DramTier(limit, MIB, False, keeper, keeper.handed_over())
    tier._jobs = AtOnce()
    return tier


def make(tier: DramTier) -> list[int]:
    """Makes what is missing; the numbers of it."""
    made: list[int] = []
    errors: list[TierError | None] = []
    tier.start(made.append, errors.append)
    assert errors == [None]
    return made


@pytest.fixture
def tier(keeper: Keeper) -> Iterator[DramTier]:
    """Extent 0 is of tenant a and has the secret, the others are nobody's."""
    made = tier_of(keeper)
    assert make(made) == [0, 1, 2]
    made.format(0, ALIGN, Owner(tag=A))
    fill(made, 0)
    yield made
    made.close()


def fill(tier: DramTier, extent: int) -> None:
    where = Where(np.array([extent << 32 | 1], np.uint64))
    [slot] = tier.slots(where)
    slot[: len(SECRET)] = SECRET
    stamp(tier, where)


def stamp(tier: DramTier, where: Where, expires: float | None = None) -> None:
    n = len(where)
    sizes = np.full(n, 3, np.uint8)
    words = np.zeros((n, 8), np.uint64)
    words[:, 0] = np.arange(1, n + 1)
    identity = BlockIds(np.ones(n, np.uint16), words, sizes, np.zeros(n, np.uint64))
    column = None if expires is None else np.full(n, expires)
    versions = np.full(n, 7, np.uint32)
    tier.headers.write(identity, identity, where, versions, {1: bytes(16)}, {1: ALIGN}, column)


def renew(tier: DramTier, number: int) -> int:
    """The new number."""
    ready: list[int] = []
    failed: list[TierError] = []
    tier.renew(number, ready.append, failed.append)
    assert not failed
    [new] = ready
    return new


def contents(tier: DramTier) -> dict[int, bytes]:
    return {number: bytes(extent.view) for number, extent in tier._extents.items()}


class TestRenew:
    def test_a_renewed_extent_is_a_new_extent_of_zeros(self, tier: DramTier, keeper: Keeper) -> None:
        assert renew(tier, 0) == 3
        with pytest.raises(KeyError):
            tier.descriptor(0, writable=False)
        os.close(tier.descriptor(3, writable=True))
        assert keeper.extents == ["dram-000001", "dram-000002", "dram-000003"]
        assert contents(tier)[3][LABEL_BYTES:].count(0) == MIB - LABEL_BYTES
        assert not any(SECRET in data for data in contents(tier).values())

    def test_numbers_are_not_reused(self, tier: DramTier) -> None:
        assert [renew(tier, 0), renew(tier, 3), renew(tier, 4), renew(tier, 2)] == [3, 4, 5, 6]

    def test_numbers_of_refused_extents_are_not_reused(self, tier: DramTier, keeper: Keeper) -> None:
        assert renew(tier, 0) == 3
        again = tier_of(keeper, limit=2 * MIB)
        assert set(contents(again)) == {1, 2}
        assert renew(again, 1) == 4
        again.close()

    def test_old_pages_are_freed_before_new_ones_are_allocated(
        self, tier: DramTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = tier.descriptor(0, writable=False)
        blocks: list[int] = []
        create = Extent.create

        def watched(name: str, nbytes: int) -> Extent:
            blocks.append(os.fstat(old).st_blocks)
            return create(name, nbytes)

        assert os.fstat(old).st_blocks * 512 >= MIB
        monkeypatch.setattr(Extent, "create", watched)
        renew(tier, 0)
        os.close(old)
        assert blocks == [0]

    def test_the_memory_does_not_grow(self, tier: DramTier) -> None:
        old = [tier.descriptor(0, writable=True)]
        maps = [Extent(os.dup(old[0]), MIB)]
        number, before = 0, shared_kib()
        for _ in range(16):
            number = renew(tier, number)
            old.append(tier.descriptor(number, writable=True))
            maps.append(Extent(os.dup(old[-1]), MIB))
        assert shared_kib() - before < 2 * 1024
        assert [os.fstat(fd).st_blocks for fd in old[:-1]] == [0] * 16
        for each in maps:
            each.close()
        for fd in old:
            os.close(fd)

    def test_a_client_that_keeps_its_mappings_sees_zeros_and_reaches_nothing(self, tier: DramTier) -> None:
        reader, writer = tier.descriptor(0, writable=False), tier.descriptor(0, writable=True)
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(reader), str(writer), str(MIB), SECRET.decode()],
            pass_fds=(reader, writer),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            os.close(reader)
            os.close(writer)
            assert client.stdin is not None
            assert client.stdout is not None

            def says(line: str) -> str:
                print(line, file=client.stdin, flush=True)
                return client.stdout.readline().strip()  # type: ignore[union-attr]

            assert says("look") == "secret"
            number = renew(tier, 0)
            assert says("look") == "zeros"
            tier.format(number, ALIGN, Owner(tag=B))
            fill(tier, number)
            assert says("look") == "zeros"
            assert says("write") == "written"
            assert b"intruder" not in contents(tier)[number]
            assert not [data for data in contents(tier).values() if b"intruder" in data]
            client.stdin.close()
            assert client.wait(20) == 0

    def test_an_extent_without_memory_fails_alone(
        self, tier: DramTier, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed: list[TierError] = []
        with monkeypatch.context() as patch:
            patch.setattr(Extent, "populate", refuse)
            tier.renew(0, lambda _: pytest.fail("it is not ready"), failed.append)
        assert [str(error) for error in failed] == ["no memory"]
        assert keeper.extents == ["dram-000001", "dram-000002"]
        assert renew(tier, 1) == 4

    def test_no_extent_is_made_while_the_tier_closes(self, keeper: Keeper) -> None:
        made = DramTier(MIB, MIB, False, keeper)
        made._jobs = AtOnce()
        made.start(lambda _: None, lambda _: None)
        made._jobs.closed = True
        made.renew(0, lambda _: pytest.fail("closed"), lambda _: pytest.fail("closed"))
        made.close()
        assert keeper.extents == []


class Killed(BaseException):
    """The process is gone, here."""


STEPS: dict[str, tuple[Any, str]] = {
    "punch": (Extent, "punch"),
    "forget": (Keeper, "forget"),
    "create": (Extent, "create"),
    "populate": (Extent, "populate"),
    "enter": (OwnershipTable, "add"),
    "keep": (Keeper, "keep"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_nothing_of_it(
    tier: DramTier, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    owner, name = STEPS[step]
    whole = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> None:
        if after:
            whole(*args, **kwargs)
        keeper.deaf = True  # a dead process tells nobody anything, whatever Python still unwinds
        raise Killed

    mapped = Extent(tier.descriptor(0, writable=True), MIB)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            tier.renew(0, lambda _: None, lambda _: None)
    keeper.deaf = False
    again = tier_of(keeper)
    assert SECRET not in bytes(mapped.view)
    found = again.load()
    assert 0 not in found.slot_bytes
    assert not len(found.headers)
    make(again)
    assert len(contents(again)) == EXTENTS
    assert len(keeper.extents) == EXTENTS
    mapped.view[LABEL_BYTES:] = b"!" * (MIB - LABEL_BYTES)
    assert not [n for n, data in contents(again).items() if SECRET in data or b"!" in data]
    mapped.close()
    again.close()


class TestTakingOver:
    def test_owners_of_extents_survive_a_restart(self, tier: DramTier, keeper: Keeper) -> None:
        tier.format(1, 2 * ALIGN, Owner(tag=B))
        found = load(keeper)
        assert found.slot_bytes == {0: ALIGN, 1: 2 * ALIGN, 2: 0}
        assert found.owners == {0: A, 1: B}
        assert (found.extent.tolist(), found.index.tolist()) == ([0], [1])

    def test_a_clients_writes_do_not_change_owner_or_slot_size(self, tier: DramTier, keeper: Keeper) -> None:
        label = tier._extents[0].label
        tier._extents[0].view[8:LABEL_BYTES] = b"\x01" * (LABEL_BYTES - 8)
        assert int(label["number"][0]) != 0
        found = load(keeper)
        assert (found.slot_bytes, found.owners) == ({0: ALIGN, 1: 0, 2: 0}, {0: A})
        label[0] = (MAGIC, 1, 0)
        found = load(keeper)
        assert (found.slot_bytes, found.owners) == ({0: ALIGN, 1: 0, 2: 0}, {0: A})

    def test_one_that_is_half_cut_is_not_used(
        self, tier: DramTier, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(*_: Any) -> None:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(OwnershipTable, "end_cut", killed)
            with pytest.raises(Killed):
                tier.format(1, ALIGN, Owner(tag=B))
        assert load(keeper).slot_bytes == {0: ALIGN, 2: 0}
        assert keeper.extents == ["dram-000000", "dram-000002"]

    def test_extents_of_a_daemon_without_owners_are_the_default_tenants(
        self, tier: DramTier, keeper: Keeper
    ) -> None:
        keeper.forget(OWNERS)
        tier._extents[0].label["slot_bytes"] = ALIGN
        tier._extents[1].label["slot_bytes"] = 1
        found = load(keeper)
        assert (found.slot_bytes, found.owners) == ({0: ALIGN}, {0: bytes(16)})
        assert found.headers["expires"].tolist() == [0.0]
        assert sorted(keeper.kept) == ["dram-000000", OWNERS]
        assert load(keeper).owners == {0: bytes(16)}, "from the table that was made"

    @pytest.mark.parametrize("how", ["magic", "size"])
    def test_with_owners_that_make_no_sense_nothing_is_used(
        self, tier: DramTier, keeper: Keeper, how: str
    ) -> None:
        if how == "magic":
            os.pwrite(keeper.kept[OWNERS], b"KVOWNS99", 0)
        else:
            other = Extent.create("other", 4096)
            keeper.forget(OWNERS)
            keeper.keep(OWNERS, other.fd)
            other.close()
        tier._extents[0].label["slot_bytes"] = ALIGN
        assert load(keeper).slot_bytes == {}
        assert keeper.extents == []
        again = tier_of(keeper)
        assert make(again) == [0, 1, 2]
        again.close()

    def test_a_name_that_is_none_is_not_used(self, tier: DramTier, keeper: Keeper) -> None:
        for name in ("dram-0", "dram-x", "dram-0000001"):
            keeper.keep(name, tier._extents[1].fd)
        keeper.forget("dram-000001")
        assert load(keeper).slot_bytes == {0: ALIGN, 2: 0}
        assert keeper.extents == ["dram-000000", "dram-000002"]

    def test_expiry_survives_a_restart(self, tier: DramTier, keeper: Keeper) -> None:
        stamp(tier, Where(np.array([0 << 32 | 2, 0 << 32 | 3], np.uint64)), expires=1234.5)
        assert load(keeper).headers["expires"].tolist() == [1234.5, 1234.5, 0.0]

    def test_rows_of_removed_extents_are_reused(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(5):
            some = tier_of(keeper)
            make(some)
            some.close()
            for name in keeper.extents:
                keeper.forget(name)
        rows = OwnershipTable(os.dup(keeper.kept[OWNERS]))
        assert len(rows.numbers()) == EXTENTS
        rows.close()


def test_a_full_table_says_so() -> None:
    owners = OwnershipTable.create()
    for number in range(32767):
        owners.add(number)
    with pytest.raises(TierError, match=r"more than 32767 extents \(give"):
        owners.add(32767)
    owners.remove(77)
    owners.add(1 << 20)
    again = OwnershipTable(os.dup(owners.fd))
    assert len(again.numbers()) == 32767
    assert again.usable(1 << 20)
    assert not again.usable(77)
    again.close()
    owners.close()


def test_header_has_room_for_nothing_more() -> None:
    assert HEADER.fields is not None
    assert HEADER.fields["expires"][1] + 8 == HEADER.itemsize


def load(keeper: Keeper) -> Inherited:
    """What the next daemon finds."""
    again = tier_of(keeper)
    found = again.load()
    again.close()
    return found


def refuse(*_: Any) -> None:
    raise TierError("no memory")


def shared_kib() -> int:
    """Shared memory that this process has mapped and touched."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("RssShmem:")]
    return int(line.split()[1])


CLIENT = """
import mmap, sys
reader, writer, nbytes = map(int, sys.argv[1:4])
secret = sys.argv[4].encode()
read = mmap.mmap(reader, nbytes, prot=mmap.PROT_READ)
both = mmap.mmap(writer, nbytes)
for line in sys.stdin:
    if line == "look\\n":
        all_of = (read[:], both[:])
        seen = {"secret" if secret in data else "bytes" if any(data) else "zeros" for data in all_of}
        print(*seen, flush=True)
    else:
        both[:] = (b"intruder" * nbytes)[:nbytes]
        print("written", flush=True)
"""
