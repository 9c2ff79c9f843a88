"""Explains a block for operators: its copies, what keeps it, and the latest decisions about it.

Nothing is changed. Not covered: permissions and the names of namespaces, which the daemon knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Deny, Explained
from kvstore.core.blocks.block_table import HOLE, LIVE, RESERVED
from kvstore.core.residency.decision_log import Decision
from kvstore.core.residency.residency import DEMOTE, PROMOTING, WRITING, Residency
from kvstore.core.reuse.classes import describe
from kvstore.types import EXPLAIN_KEYS

MOST_NAMESPACES = 64
"""Namespaces in one request. More would delay other requests."""

_STATES = {RESERVED: "being written", LIVE: "live", HOLE: "hole"}
_ABSENT = "not stored"


def explain(residency: Residency, event: ev.Explain, now: float) -> None:
    """Answers with the known blocks. Unknown keys are left out."""
    r, namespaces = residency, event.namespaces
    if event.keys.n > EXPLAIN_KEYS or len(namespaces) > MOST_NAMESPACES:
        why = f"{event.keys.n} keys in {len(namespaces)} namespaces"
        hint = f"at most {EXPLAIN_KEYS} keys and {MOST_NAMESPACES} namespaces a call: name tenant or model"
        r.outbox.actions.append(Deny(event.request, why, hint))
        return
    # Records of a closed namespace are skipped, because its number may be reused.
    known = [n for n in namespaces if n in r.namespaces and not r.namespaces[n].closed]
    rows = [r.index.find(n, event.keys).tolist() for n in known]
    blocks = []
    for i, words in enumerate(event.keys.words):
        decisions = r.decisions.of(words, event.keys.size)
        for j, number in enumerate(known):
            row, decided = rows[j][i], decisions.get(number, [])
            if row >= 0 or decided:
                block = {"key": event.keys[i], "namespace": number, "state": _ABSENT}
                block |= _stored(r, row, now) if row >= 0 else {}
                block["decisions"] = [_told(r, d, now) for d in decided]
                blocks.append(block)
    r.outbox.actions.append(Explained(event.request, blocks))


def _stored(r: Residency, row: int, now: float) -> dict[str, Any]:
    blocks = r.blocks
    parent, moving, ends = int(blocks.parent[row]), int(blocks.copy_marks[row]), float(blocks.expires[row])
    going = {PROMOTING: "up", WRITING: "down", DEMOTE: "leaves when it is down"}
    state = _STATES[int(blocks.state[row])]
    if 0 < ends <= now:
        state = "expired"
    return {
        "state": state,
        "copies": [_copy(r, tier, row, now) for tier in range(len(r.tiers)) if blocks.slot[tier, row] >= 0],
        "moving": [name for bit, name in going.items() if moving & bit],
        "parent": blocks.key(parent) if parent >= 0 else b"",
        "parent_state": _STATES[int(blocks.state[parent])] if parent >= 0 else "",
        "children": int(blocks.children[row]),
        "pinned_s": r.pins.ends[row] - now if row in r.pins.ends else None,
        "expires_s": ends - now if ends > 0 else None,
        **_use(r, row, now),
    }


def _use(r: Residency, row: int, now: float) -> dict[str, Any]:
    """Returns the history of a block; none for a block that is being written."""
    one, blocks = np.array([row]), r.blocks
    uses, last = int(r.reuse.history.uses(one)[0]), float(r.reuse.history.last_used(one)[0])
    if blocks.state[row] != LIVE or not uses:
        return {"uses": None, "last_used_s": None, "class": ""}
    kind = describe(int(r.reuse.history.classes(one)[0]))
    return {"uses": uses, "last_used_s": max(0.0, now - last), "class": kind}


def _copy(r: Residency, tier: int, row: int, now: float) -> dict[str, Any]:
    """Returns one copy: its place, its users, and the explanation of the policy."""
    state, slot = r.tiers[tier], int(r.blocks.slot[tier, row])
    pool = state.slots.pool_of(slot)
    place = int(state.slots.place[slot])
    policy = state.policies.get(pool)
    return {
        "tier": state.spec.name,
        "extent": place >> 32,
        "slot": place & 0xFFFFFFFF,
        "users": int(state.slots.refs[slot]),
        "policy": type(policy).__name__.lower(),
        "says": _said(policy, row, now),
    }


def _said(who: Any, row: int, now: float) -> str:
    """Returns the explanation of a policy for a row; "" if it has none."""
    explains = getattr(who, "explain", None)
    said = explains(np.array([row]), now) if explains is not None else None
    return said[0] if said else ""


def _told(r: Residency, decision: Decision, now: float) -> dict[str, Any]:
    tier = decision.tier
    return {
        "what": decision.what.name.lower(),
        "tier": "" if tier is None else r.tiers[tier].spec.name,
        "ago_s": now - decision.at,
        "score": decision.score,
        "class": "" if decision.kind is None else describe(decision.kind),
    }
