"""What is kept of blocks' pasts: how often, how far apart, with how many; whose, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.reuse.classes import HIGH_PRIORITY, SHAPE, describe
from kvstore.core.reuse.curves import span_of
from kvstore.core.reuse.reuse import Reuse
from tests.core.policy.pool import Tier
from tests.core.world import World, joined

ONE, OTHER = 0, 1


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def reuse(rows: int = 200) -> Reuse:
    return Tier(rows).reuse


def words(r: Reuse, row: int) -> str:
    return describe(int(r.history.classes(array(row))[0]))


def chance(r: Reuse, row: int, now: float, tenant: int = ONE) -> float:
    return float(r.chance(array(row), tenant, now)[0])


def test_uses_are_counted_from_the_first_storing_up_to_fifteen() -> None:
    r = reuse()
    r.stored(array(3), ONE, 1.0)
    seen = [(r.history.uses(array(3)).tolist(), words(r, 3).split(",")[0])]
    for i in range(2, 21):
        r.used(array(3), ONE, float(i))
        seen.append((r.history.uses(array(3)).tolist(), words(r, 3).split(",")[0]))
    counts = [*range(1, 16), *[15] * 5]
    names = [
        "used once",
        *["used 2 or 3 times"] * 2,
        *["used 4 to 7 times"] * 4,
        *["used 8 times or more"] * 13,
    ]
    assert seen == [([n], name) for n, name in zip(counts, names, strict=True)]


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (0.0, "up to 4 s"),
        (4.0, "up to 4 s"),
        (4.25, "up to 10 s"),
        (25.0, "up to 25 s"),
        (62.5, "up to 62.5 s"),
        (62.625, "over 62.5 s"),
        (1e6, "over 62.5 s"),
    ],
)
def test_how_far_apart_is_since_the_last_use(apart: float, said: str) -> None:
    r = reuse()
    r.stored(array(0), ONE, 10.0)
    r.used(array(0), ONE, 20.0)
    r.used(array(0), ONE, 20.0 + apart)
    assert words(r, 0) == f"used 2 or 3 times, {said} apart, stored with many others"
    assert r.history.last_used(array(0)).tolist() == [int((20.0 + apart) * 8) / 8]


def test_group_sizes_are_described_relative_to_the_usual_size() -> None:
    r = reuse(20_000)
    at = 0
    for n in [100] * 60 + [20, 40, 300]:
        r.stored(np.arange(at, at + n), ONE, 1.0)
        at += n
    said = [words(r, row).split("stored ")[1] for row in (0, at - 350, at - 320, at - 1)]
    assert said == ["with many others", "with few others", "with some others", "with many others"]
    r.stored(np.arange(at, at + 20), OTHER, 1.0)
    assert words(r, at) == "used once, stored with many others", "as far as this tenant goes"


def test_a_new_block_takes_its_parents_interval() -> None:
    tier = Tier(20)
    r = tier.reuse
    r.stored(array(0, 1), ONE, 0.0)
    r.used(array(0, 1), ONE, 20.0)
    tier.blocks.parent[[5, 6]] = 1, 5
    r.stored(array(5, 6), ONE, 21.0)
    assert words(r, 5) == words(r, 6) == "used once, up to 25 s apart, stored with many others"
    r.stored(array(9), ONE, 21.0)
    assert words(r, 9).startswith("used once, stored"), "it has no parent"
    tier.blocks.parent[10] = 12
    r.stored(array(10), ONE, 21.0)
    assert words(r, 10).startswith("used once, stored"), "nothing is known of its parent"
    r.hinted(array(1), ONE, 100.0, 22.0)
    tier.blocks.parent[11] = 1
    r.stored(array(11), ONE, 23.0)
    assert words(r, 11).startswith("used once, stored"), "what a client said is no interval"


def test_a_block_stored_again_continues_its_history() -> None:
    r = reuse()
    r.stored(array(1, 2), ONE, 0.0)
    for now in (10.0, 20.0, 30.0):
        r.used(array(1), ONE, now)
    before = r.history.classes(array(1)).tolist()
    r.history.leave(array(1, 2))
    r.stored(array(1, 2), ONE, 50.0)
    assert r.history.uses(array(1, 2)).tolist() == [5, 2]
    assert words(r, 1) == "used 4 to 7 times, up to 25 s apart, stored with many others"
    assert words(r, 2) == "used 2 or 3 times, up to 62.5 s apart, stored with many others"
    assert r.history.classes(array(1)).tolist() != before
    for now in range(51, 60):
        r.used(array(1), ONE, float(now))
    r.history.leave(array(1))
    r.stored(array(1), ONE, 60.0)
    assert r.history.uses(array(1)).tolist() == [15]
    # A ghost comes back once.
    r.history.leave(array(2))
    r.stored(array(2), ONE, 61.0)
    assert r.history.uses(array(2)).tolist() == [3]


def test_a_reused_row_has_no_history() -> None:
    tier = Tier(20)
    r = tier.reuse
    r.stored(array(1), ONE, 0.0)
    r.history.set_priority(array(1), True)
    for now in (1.0, 2.0, 3.0):
        r.used(array(1), ONE, now)
    r.history.leave(array(1))
    tier.blocks.words[0][1] = 12345
    r.stored(array(1), ONE, 4.0)
    assert r.history.uses(array(1)).tolist() == [1]
    assert words(r, 1) == "used once, stored with many others"
    assert r.history.kinds(array(1)).tolist() == r.history.classes(array(1)).tolist(), (
        "nobody asked to keep this one longer"
    )


def test_hints_and_counts_survive_as_a_ghost() -> None:
    r = reuse()
    r.stored(array(1), ONE, 0.0)
    r.hinted(array(1), ONE, 100.0, 1.0)
    r.history.leave(array(1))
    r.stored(array(1), ONE, 2.0)
    assert words(r, 1) == "used 2 or 3 times, up to 4 s apart, stored with some others"


def test_a_refilled_hole_continues_its_history() -> None:
    w = World(dram=1, slots=6)
    w.open(1)
    keys = [b"a", b"b", b"c"]
    w.put(0, 1, keys)
    w.get(1, keys)
    w.invalidate(1, [b"a"])
    r = w.p.residency
    [row] = r.index.find(1, joined([b"a"])).tolist()
    assert r.blocks.children[row] == 1, "a hole"
    w.now += 7.0
    w.put(0, 1, keys)
    r.settle()
    assert r.reuse.history.uses(array(row)).tolist() == [3]
    assert words(r.reuse, row) == "used 2 or 3 times, up to 10 s apart, stored with many others"


def test_hinted_blocks_have_their_own_classes() -> None:
    r = reuse()
    r.stored(np.arange(10), ONE, 0.0)
    r.used(np.arange(10), ONE, 5.0)
    for row, next_use_s in enumerate([0.0, 10.0, 10.5, 300.0, 7200.0, 1e9]):
        r.hinted(array(row), ONE, next_use_s, 6.0)
    r.hinted(array(6), ONE, None, 6.0)
    assert [words(r, row) for row in range(7)] == [
        "told: used again within 10 s",
        "told: used again within 10 s",
        "told: used again within 60 s",
        "told: used again within 300 s",
        "told: used again within 7200 s",
        "told: used again within later",
        "told: not used again",
    ]
    assert r.history.uses(np.arange(7)).tolist() == [2] * 7, "to say something is no use"
    assert r.history.last_used(array(0)).tolist() == [6.0]
    r.used(array(0, 6), ONE, 10.0)
    assert {words(r, 0), words(r, 6)} == {"used 2 or 3 times, up to 4 s apart, stored with some others"}
    r.hinted(np.zeros(0, np.int64), ONE, None, 11.0)


def test_how_far_words_come_true_is_learned() -> None:
    """Two groups of blocks, the same but for what was said of them: one comes back as told, one does not."""
    r, now = reuse(20_000), 0.0
    for i in range(150):
        true, false = np.arange(i * 100, i * 100 + 20), np.arange(i * 100 + 20, i * 100 + 40)
        r.stored(np.concatenate((true, false)), ONE, now)
        r.hinted(true, ONE, 10.0, now + 1)
        r.hinted(false, ONE, 60.0, now + 1)
        r.used(true, ONE, now + 9)
        now += 10.0
    last = array(int(true[0]) + 3, int(false[0]))
    r.hinted(last[:1], ONE, 10.0, now)
    r.hinted(last[1:], ONE, 60.0, now)
    assert chance(r, int(last[0]), now) > 0.7
    assert chance(r, int(last[1]), now) < 0.2


def test_a_favour_counts_four_times_until_it_is_taken_back() -> None:
    r = reuse()
    r.stored(array(0, 1), ONE, 0.0)
    r.history.set_priority(array(1), True)
    kinds, since = r.history.kinds(array(0, 1)), r.history.last_used(array(0, 1))
    assert (kinds & HIGH_PRIORITY > 0).tolist() == [False, True]
    assert r.history.classes(array(0, 1)).tolist() == [kinds[0]] * 2
    plain, high = r.density(ONE, kinds, since, 3.0).tolist()
    assert high == pytest.approx(4 * plain)
    r.used(array(1), ONE, 5.0)
    r.hinted(array(1), ONE, 100.0, 6.0)
    assert r.history.kinds(array(1))[0] & HIGH_PRIORITY, "it stays whatever happens"
    r.history.set_priority(array(1), False)
    assert not r.history.kinds(array(1))[0] & HIGH_PRIORITY
    assert words(r, 1) == "told: used again within 300 s"


def teach(r: Reuse, tenant: int, comes_back: bool, at: int) -> None:
    """A hundred batches, used again 5 s later, or not."""
    for i in range(100):
        rows = np.arange(at + 20 * i, at + 20 * (i + 1))
        r.stored(rows, tenant, 10.0 * i)
        if comes_back:
            r.used(rows, tenant, 10.0 * i + 5)


def test_tenants_do_not_learn_from_each_other_and_a_tenant_that_ends_is_forgotten() -> None:
    r = reuse(10_000)
    teach(r, ONE, True, 0)
    untaught = chance(r, 5000, 1000.0, OTHER)
    teach(r, OTHER, False, 2000)
    for tenant, row in ((ONE, 6000), (OTHER, 6001)):
        r.stored(np.arange(row, row + 400, 2), tenant, 1000.0)
    taught = chance(r, 6000, 1001.0, ONE)
    assert taught > 0.7
    assert chance(r, 6001, 1001.0, OTHER) < 0.1
    size = r.ram_bytes
    r.forget(ONE)
    assert r.ram_bytes < size
    assert chance(r, 6000, 1001.0, ONE) == untaught
    assert chance(r, 6001, 1001.0, OTHER) < 0.1
    r.forget(99)


def test_ghosts_are_kept_apart_by_namespace() -> None:
    tier = Tier(20)
    r = tier.reuse
    r.stored(array(1), ONE, 0.0)
    r.history.leave(array(1))
    tier.blocks.namespace[1] = 9
    r.stored(array(1), OTHER, 1.0)
    assert r.history.uses(array(1)).tolist() == [1]


def test_restored_blocks_have_one_use_at_an_unknown_time() -> None:
    r = reuse()
    r.stored(array(1), ONE, 0.0)
    r.used(array(1), ONE, 1.0)
    r.restored(array(1, 2, 3), ONE, 5.0)
    assert r.history.uses(array(1, 2, 3)).tolist() == [2, 1, 1], "what is known is known better"
    assert words(r, 2) == "used once, stored with few others"
    assert r.history.last_used(array(2)).tolist() == [5.0]
    r.used(array(2), ONE, 8.0)
    assert words(r, 2) == "used 2 or 3 times, up to 4 s apart, stored with few others"


def test_every_class_has_words_of_its_own() -> None:
    counts = ("once", "2 or 3 times", "4 to 7 times", "8 times or more")
    gaps = ("", *(f", {gap} apart" for gap in ("up to 4 s", "up to 10 s", "up to 25 s", "up to 62.5 s")))
    gaps = (*gaps, ", over 62.5 s apart")
    amounts = ("few", "some", "many")
    said = [
        f"used {n}{gap}, stored with {amount} others" for n in counts for gap in gaps for amount in amounts
    ]
    told = describe(len(said))
    assert [describe(kind) for kind in range(len(said))] == said
    assert told == "told: used again within 10 s"
    assert all(describe(kind) for kind in range(np.prod(SHAPE)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stored", "used", "told", "gone", "favour", "restored"]),
            st.lists(st.integers(0, 29), min_size=1, max_size=8, unique=True),
            st.sampled_from([0.0, 0.5, 8.0, 100.0]),
        ),
        max_size=50,
    )
)
@settings(max_examples=60)
def test_every_use_is_counted_once_in_the_curves(steps: list[tuple[str, list[int], float]]) -> None:
    """Who joined a class leaves it by its next use, by what is said, or is still there."""
    r, now, there, joins, left = reuse(30), 0.0, dict[int, int](), 0, 0
    uses, past = 0, dict[int, int]()
    for what, some, wait in steps:
        now += wait
        if what in ("stored", "restored"):
            rows = [x for x in some if x not in there] if what == "restored" else some
            getattr(r, what)(array(*some), ONE, now)
            if what == "restored":
                there.update((x, past.pop(x)) for x in rows if x in past)
                rows = [x for x in rows if x not in there]
            back = [x for x in rows if x in there or x in past]
            uses, joins = uses + len(back), joins + len(rows)
            for x in rows:
                there[x] = there[x] + 1 if x in there else past.pop(x) + 1 if x in back else 1
            continue
        rows = [x for x in some if x in there]
        if what == "used":
            r.used(array(*rows), ONE, now)
            uses, joins = uses + len(rows), joins + len(rows)
            there.update((x, there[x] + 1) for x in rows)
        elif what == "told":
            r.hinted(array(*rows), ONE, wait or None, now)
            joins, left = joins + len(rows), left + len(rows)
        elif what == "favour":
            r.history.set_priority(array(*rows), bool(wait))
        else:
            r.history.leave(array(*some))
            past.update((x, there.pop(x)) for x in rows)
    assert r.history.uses(array(*there)).tolist() == [min(n, 15) for n in there.values()]
    curves = r.curves(ONE)
    assert curves.joins == joins == curves._reached[:, 0].sum()
    assert curves._used.sum() == uses
    waiting = curves._waiting[: curves._cohorts].sum(axis=0)
    assert (waiting >= 0).all()
    assert waiting.sum() == joins - uses - left
    at = np.bincount(r.history.classes(array(*there)), minlength=np.prod(SHAPE))
    assert (waiting >= at).all(), "who is there waits for its next use; so do ghosts"
    assert (span_of(now - r.history.last_used(array(*there))) >= 0).all()


# -- from one process to the next


def past(r: Reuse, rows: np.ndarray, now: float) -> list[tuple[int, str, float]]:
    """What is known of each row, and how long ago it was used."""
    ages = (now - r.history.last_used(rows)).tolist()
    return [
        (int(n), describe(int(k)), age)
        for n, k, age in zip(r.history.uses(rows), r.history.classes(rows), ages, strict=True)
    ]


def learned_a_bit(rows: int = 200) -> Reuse:
    """Rows 0 to 9 have come back, 10 to 19 not, 20 to 29 are gone."""
    r = reuse(rows)
    r.stored(np.arange(30), ONE, 5.0)
    for i in range(3):
        r.used(np.arange(10), ONE, 30.0 * (i + 1))
    r.history.leave(np.arange(20, 30))
    return r


@pytest.mark.parametrize("now", [0.0, 12.5, 1e6])
def test_a_later_process_continues_the_statistics(now: float) -> None:
    old, new = learned_a_bit(), reuse()
    learned = old.save(100.0)
    before = past(old, np.arange(20), 100.0)
    new.load(learned, 50.0, now)
    new.restored(np.arange(20), ONE, now)
    new.stored(np.arange(20, 40), ONE, now)
    assert past(new, np.arange(20), now) == [(n, kind, age + 50.0) for n, kind, age in before]
    assert new.history.uses(array(25, 35)).tolist() == [2, 1], "ghosts of before too"
    assert past(old, np.arange(20), 100.0) == before, "that goes on as it was"
    for kind in range(30):
        assert np.array_equal(
            new.curves(ONE).counts().used[kind, 0:1], old.curves(ONE).counts().used[kind, 0:1]
        )
    assert new.curves(OTHER).joins == 0
    new.used(array(0), ONE, now + 1.0)
    assert words(new, 0).startswith("used 4 to 7 times, up to 62.5 s apart")


def test_a_table_of_another_size_is_not_taken_but_curves_are() -> None:
    old, new = learned_a_bit(), Reuse(Tier(200).blocks, 1 << 10, 1)
    new.load(old.save(100.0), 50.0, 0.0)
    new.restored(np.arange(20), ONE, 1.0)
    assert past(new, array(0), 1.0)[0][0] == 1
    assert new.curves(ONE).joins >= 60


def test_times_that_no_ghost_has_room_for_are_not_taken() -> None:
    old, new = learned_a_bit(), reuse()
    new.load(old.save(100.0), 3e8, 0.0)
    new.restored(np.arange(20), ONE, 1.0)
    assert past(new, array(0), 1.0)[0][::2] == (1, 0.0)
    assert chance(new, 0, 1.0) > 0


def test_a_clock_that_went_back_makes_nothing_younger_than_it_was() -> None:
    old, new = learned_a_bit(), reuse()
    new.load(old.save(100.0), -3600.0, 7.0)
    new.restored(np.arange(20), ONE, 7.0)
    assert past(new, np.arange(20), 7.0) == past(old, np.arange(20), 100.0)


def test_independent_blocks_count_as_stored_alone_and_leave_the_mean_of_chains() -> None:
    r = reuse()
    r.stored(array(*range(40)), ONE, 1.0)
    for row in range(40, 140):
        r.stored(array(row), ONE, 1.0, independent=True)
    assert words(r, 100) == "used once, stored with few others"
    r.stored(array(*range(140, 180)), ONE, 1.0)
    assert words(r, 150) == "used once, stored with many others", "the mean is still 40"
    r.stored(array(*range(180, 195)), ONE, 1.0, independent=True)
    assert words(r, 190) == "used once, stored with few others", "together with none, though of one put"


def test_a_block_of_a_chain_follows_it_and_teaches_nothing() -> None:
    r = reuse()
    r.stored(array(*range(40)), ONE, 1.0)
    r.used(array(*range(40)), ONE, 9.0)
    before = r.curves(ONE).counts()
    joins = r.curves(ONE).joins
    r.stored(array(50, 51), ONE, 10.0, independent=True, chain=39)
    assert words(r, 50) == words(r, 39) == "used 2 or 3 times, up to 10 s apart, stored with many others"
    r.used(array(50), ONE, 12.0)
    assert words(r, 50) == "used 2 or 3 times, up to 4 s apart, stored with many others"
    r.hinted(array(51), ONE, 30.0, 12.0)
    assert words(r, 51) == "told: used again within 60 s"
    after = r.curves(ONE).counts()
    assert r.curves(ONE).joins == joins
    assert (after.used == before.used).all()
    assert (after.reached == before.reached).all()


def test_a_block_of_a_chain_leaves_no_ghost_but_a_later_process_knows_it() -> None:
    r = reuse()
    r.stored(array(*range(40)), ONE, 1.0)
    r.stored(array(50, 51), ONE, 2.0, independent=True, chain=39)
    r.history.leave(array(50))
    saved = r.save(3.0)
    assert len(saved.ghosts.words) == 41
    r.stored(array(50), ONE, 4.0, independent=True)
    assert words(r, 50) == "used once, stored with few others", "nothing of its past, and it counts"
    assert r.curves(ONE).joins == 41
    later = reuse()
    later.load(saved, 1.0, 0.0)
    later.restored(array(51), ONE, 1.0)
    assert words(later, 51) == "used once, stored with many others"
