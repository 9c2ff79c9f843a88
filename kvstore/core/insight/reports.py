"""Reports of where blocks are, for routers and for downloads that wait for a block."""

from __future__ import annotations

from kvstore.core import events as ev
from kvstore.core.residency.residency import Residency


def tell(residency: Residency, event: ev.Tell) -> None:
    """Reports the tiers that hold these keys, as CopyReport, as if the blocks had just arrived."""
    rows = residency.index.find(event.namespace, event.keys)
    rows = rows[rows >= 0]
    for tier in range(len(residency.tiers)):
        residency.outbox.report(tier, rows[residency.blocks.slot[tier, rows] >= 0], gained=True)


def watch(residency: Residency, event: ev.Watch | ev.Unwatch) -> None:
    """Counts or discounts one watcher of the keys that start like this one."""
    watched, word = residency.outbox.awaited, int.from_bytes(event.key[:8], "little")
    watched[word] += 1 if isinstance(event, ev.Watch) else -1
    if not watched[word]:
        del watched[word]
