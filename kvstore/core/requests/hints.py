"""Hints of clients about the next use of their blocks. Hints change the order of eviction and nothing else.

Not covered: their effect. `reuse` learns how reliable the hints are; policies order the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.policy import Policy
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.residency.residency import Residency


def hint(leases: LeaseTable, event: ev.Hint, now: float) -> None:
    """Applies a hint. Answers with the number of leading blocks that are stored.

    Other sessions may share the start of a chain, so a hint applies only to the session's own end of it. A
    hint about independent blocks applies to all of them.
    """
    namespace = leases.namespace(event)
    if namespace is None:
        return
    r = leases.residency
    rows = r.prefix(event.namespace, event.keys)
    leases.say(Answer(event.request, len(rows)))
    if not len(rows):
        return
    own = rows
    if not namespace.independent:
        own = own_end(r, r.chains.with_ancestors(rows), goes_on=not event.closed and event.priority >= 0)
    r.reuse.history.set_priority(rows if event.priority > 0 else own, event.priority > 0)
    if event.closed:
        r.reuse.hinted(own, namespace.tenant, None, now)
    elif event.next_use_s is not None:
        r.reuse.hinted(own, namespace.tenant, event.next_use_s, now)
        for policy, some in _each(r, own):
            policy.touch(some, now)
    if event.closed or event.priority < 0:
        for policy, some in _each(r, own):
            policy.cool(some)


def own_end(r: Residency, chain: Rows, goes_on: bool) -> Rows:
    """Returns the readable rows at the end of a chain that no other chain shares.

    With `goes_on`, the last row may have one child. Otherwise no row is returned if it has a child.
    """
    children = r.blocks.children[chain]
    alone = children == 1
    alone[-1] = children[-1] <= int(goes_on)
    alone[:-1] &= r.blocks.parent[chain[1:]] == chain[:-1]
    alone &= r.blocks.state[chain] == LIVE
    shared = np.flatnonzero(~alone)
    return chain[int(shared[-1]) + 1 :] if len(shared) else chain


def _each(r: Residency, rows: Rows) -> Iterator[tuple[Policy, Rows]]:
    """Yields the policies that know some of these rows, with these rows."""
    for tier, state in enumerate(r.tiers):
        held = rows[r.blocks.slot[tier, rows] >= 0]
        for members, some in state.slots.by_class(r.blocks.slot[tier, held].astype(np.int64)):
            yield r.topology.policy(tier, members.pool), state.slots.owner[some].astype(np.int64)
