"""What clients expect of their blocks. Advice: it changes who goes first, and nothing that is promised.

Not covered: what is learnt from use; hints go there too.
"""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.blocks import Rows
from kvstore.core.ledger import Ledger
from kvstore.core.residency import Residency


def hint(ledger: Ledger, event: ev.Hint, now: float) -> None:
    """Passes a hint on. Answers how many leading blocks it is about."""
    space = ledger.space(event)
    if space is None:
        return
    r = ledger.residency
    rows = r.prefix(event.namespace, event.keys)
    reuse = getattr(r, "reuse", None)
    if reuse is not None and len(rows):
        reuse.hint(rows, event.next_use_s, event.closed, event.priority)
    if (event.closed or event.priority < 0) and len(rows):
        _cool(r, own_end(r, r.with_ancestors(rows)))
    ledger.say(Answer(event.request, len(rows)))


def own_end(r: Residency, chain: Rows) -> Rows:
    """The rows at the end of a chain that no other chain goes through: nothing hangs on them but each other.

    None if the chain goes on beyond its last row.
    """
    hangs = np.append(np.ones(len(chain) - 1, np.int64), 0)
    alone = r.blocks.children[chain] == hangs
    alone[:-1] &= r.blocks.parent[chain[1:]] == chain[:-1]
    shared = np.flatnonzero(~alone)
    return chain[int(shared[-1]) + 1 :] if len(shared) else chain


def _cool(r: Residency, rows: Rows) -> None:
    """Has every tier offer these first when room is needed."""
    for tier, state in enumerate(r.tiers):
        held = rows[r.blocks.slot[tier, rows] >= 0]
        for members, some in state.extents.by_class(r.blocks.slot[tier, held].astype(np.int64)):
            cool = getattr(state.policies.get(members.pool), "cool", None)
            if cool is not None:
                cool(state.extents.owner[some].astype(np.int64))
