"""The checker finds each broken invariant: the state is broken on purpose, in one place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core.blocks.block_table import FREE, HOLE, RESERVED
from kvstore.core.blocks.key_batch import Keys
from tests.core.world import World

CHAIN = [b"a", b"b", b"c"]


@pytest.fixture
def w() -> World:
    """A chain and a single block of one namespace, an independent block of another, a lease, and a hole."""
    made = World(4, 4, slots=4)
    made.open(1)
    made.open(2, independent=True)
    assert made.put(0, 1, CHAIN) == 3
    assert made.put(0, 1, [b"long key"]) == 1
    assert made.put(0, 2, [b"x"]) == 1
    assert isinstance(made.acquire(1, 1, CHAIN[:2]), ac.Grant)
    made.p.check()
    return made


def row(w: World, key: bytes, namespace: int = 1) -> int:
    [found] = w.p.residency.index.find(namespace, Keys(key, len(key))).tolist()
    assert found >= 0
    return int(found)


def slot(w: World, key: bytes) -> int:
    return int(w.p.residency.blocks.slot[0, row(w, key)])


def unnamed_row(w: World) -> None:
    w.p.residency.index.remove(np.array([row(w, b"c")]))
    w.p.residency.index.count += 1


def another_key(w: World) -> None:
    w.p.residency.blocks.words[0, row(w, b"c"), 0] += 1


def lost_row(w: World) -> None:
    w.p.residency.blocks.state[row(w, b"c")] = FREE


def miscounted_rows(w: World) -> None:
    w.p.residency.blocks.rows_in[1] += 1


def rows_of_nobody(w: World) -> None:
    w.p.residency.blocks.rows_in[8:10] += np.array([1, -1])  # their sum is right


def live_without_slot(w: World) -> None:
    w.p.residency.blocks.state[row(w, b"long key")] = HOLE


def childless_hole(w: World) -> None:
    at = row(w, b"c")
    w.p.residency.blocks.state[at], w.p.residency.blocks.slot[:, at] = HOLE, -1
    w.p.residency.gaps.holes[1] += 1


def miscounted_holes(w: World) -> None:
    w.p.residency.gaps.holes[1] += 1


def miscounted_children(w: World) -> None:
    w.p.residency.blocks.children[row(w, b"a")] += 1


def a_parent_of_an_independent_block(w: World) -> None:
    w.p.residency.blocks.parent[row(w, b"x", 2)] = row(w, b"a")


def a_parent_that_is_free(w: World) -> None:
    blocks = w.p.residency.blocks
    blocks.parent[row(w, b"long key")] = np.flatnonzero(blocks.state == FREE)[0]


def pinned_without_pin(w: World) -> None:
    w.p.residency.blocks.pinned[row(w, b"a")] = True


def two_owners(w: World) -> None:
    w.p.residency.blocks.slot[0, row(w, b"c")] = slot(w, b"b")


def wrong_owner(w: World) -> None:
    w.p.residency.tiers[0].slots.owner[slot(w, b"c")] = row(w, b"b")


def one_reference_more(w: World) -> None:
    w.p.residency.tiers[0].slots.refs[slot(w, b"b")] += 1


def one_reference_less(w: World) -> None:
    w.p.residency.tiers[0].slots.refs[slot(w, b"b")] -= 1


def free_twice(w: World) -> None:
    members = next(iter(w.p.residency.tiers[0].slots.classes.values()))
    members.stack[members.free - 1] = members.stack[0]


def free_though_used(w: World) -> None:
    members = next(iter(w.p.residency.tiers[0].slots.classes.values()))
    members.stack[0] = slot(w, b"c")


def miscounted_extents(w: World) -> None:
    w.p.residency.tiers[0].extents.holdings.extents[0] += 1


def miscounted_bytes(w: World) -> None:
    w.p.residency.tiers[0].extents.holdings.used[0] += 4096


def reserved_by_nobody(w: World) -> None:
    at = row(w, b"c")
    w.p.residency.blocks.state[at], w.p.residency.blocks.slot[:, at] = RESERVED, -1


def miscounted_loans(w: World) -> None:
    w.p.leases.lent[0, 1] += 4096


def marked_for_a_copy(w: World) -> None:
    w.p.residency.blocks.copy_marks[row(w, b"c")] = 1


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (unnamed_row, "not found by its key"),
        (another_key, "not found by its key"),
        (lost_row, "rows, free rows and index disagree"),
        (miscounted_rows, "rows of a namespace miscounted"),
        (rows_of_nobody, "rows of a namespace miscounted"),
        (live_without_slot, "holes miscounted|a live block without a slot"),
        (childless_hole, "a hole without children"),
        (miscounted_holes, "holes miscounted"),
        (miscounted_children, "children miscounted"),
        (a_parent_of_an_independent_block, "an independent block with a parent"),
        (a_parent_that_is_free, "a parent was freed before its child"),
        (pinned_without_pin, "pins miscounted"),
        (two_owners, "a slot has two owners|presence table"),
        (wrong_owner, "a slot has the wrong owner"),
        (one_reference_more, "references miscounted"),
        (one_reference_less, "references miscounted"),
        (free_twice, "a slot is in two free lists"),
        (free_though_used, "used and free slots are not all slots"),
        (miscounted_extents, "extents of tenants miscounted"),
        (miscounted_bytes, "bytes of tenants miscounted"),
        (reserved_by_nobody, "presence table|reserved without a writer"),
        (miscounted_loans, "bytes lent to other tenants miscounted"),
        (marked_for_a_copy, "wrong copy marks|without a copy"),
    ],
)
def test_a_broken_invariant_is_named(w: World, breaks: Callable[[World], None], named: str) -> None:
    breaks(w)
    with pytest.raises(AssertionError, match=named):
        w.p.check()
