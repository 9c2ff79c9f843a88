"""What clients expect of their blocks. Advice: it changes who goes first, and nothing that is promised.

Not covered: what comes of it. `reuse` learns how far clients' words come true; policies order blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.blocks.residency import Residency
from kvstore.core.policy import Policy
from kvstore.core.requests.leases import LeaseTable


def hint(leases: LeaseTable, event: ev.Hint, now: float) -> None:
    """Takes a hint in. Answers how many leading blocks it is about.

    Through the start of a chain others go too: what is said of one session is believed of its own blocks.
    """
    space = leases.space(event)
    if space is None:
        return
    r = leases.residency
    rows = r.prefix(event.namespace, event.keys)
    leases.say(Answer(event.request, len(rows)))
    if not len(rows):
        return
    own = own_end(r, r.chains.with_ancestors(rows), goes_on=not event.closed and event.priority >= 0)
    r.reuse.history.set_priority(rows if event.priority > 0 else own, event.priority > 0)
    if event.closed:
        r.reuse.hinted(own, space.tenant, None, now)
    elif event.next_use_s is not None:
        r.reuse.hinted(own, space.tenant, event.next_use_s, now)
        for policy, some in _each(r, own):
            policy.touch(some, now)
    if event.closed or event.priority < 0:
        for policy, some in _each(r, own):
            policy.cool(some)


def own_end(r: Residency, chain: Rows, goes_on: bool) -> Rows:
    """The readable rows at the end of a chain that no other chain goes through.

    With `goes_on` its last row may have a child; else there are none then.
    """
    children = r.blocks.children[chain]
    alone = children == 1
    alone[-1] = children[-1] <= int(goes_on)
    alone[:-1] &= r.blocks.parent[chain[1:]] == chain[:-1]
    alone &= r.blocks.state[chain] == LIVE
    shared = np.flatnonzero(~alone)
    return chain[int(shared[-1]) + 1 :] if len(shared) else chain


def _each(r: Residency, rows: Rows) -> Iterator[tuple[Policy, Rows]]:
    """The policies that know some of these rows, and which."""
    for tier, state in enumerate(r.tiers):
        held = rows[r.blocks.slot[tier, rows] >= 0]
        for members, some in state.extents.by_class(r.blocks.slot[tier, held].astype(np.int64)):
            yield r.topology.policy(tier, members.pool), state.extents.owner[some].astype(np.int64)
