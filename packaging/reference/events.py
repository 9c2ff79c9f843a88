"""Every event of the event log, from the kinds that the code can write."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.residency.decision_log import CAPACITY, DecisionKind
from kvstore.daemon.operator.event_log import MOST_ENTRIES
from kvstore.daemon.runtime.entry_kinds import EntryKind
from reference.text import cell


def page() -> Iterator[str]:
    """Yields the page: decisions about blocks, then entries about the daemon."""
    yield "# Events\n\nGenerated from the code. `kvstore events`, `kvstore why` and `GET /v1/events` show"
    yield f"events; `--what` selects kinds. The log has the latest {CAPACITY:,} decisions about blocks, and"
    yield f"at least the latest {MOST_ENTRIES:,} other events. The log starts empty with the daemon.\n"
    yield "\n## Decisions about blocks\n\nEach names the tier, the tenant, the namespace and the key.\n"
    yield "| event | meaning |\n|---|---|"
    for decision in DecisionKind:
        yield f"| `{decision.name.lower()}` | {cell(decision.meaning)} |"
    yield "\n## The daemon, its devices, namespaces and tenants\n"
    yield "| event | meaning |\n|---|---|"
    for entry in EntryKind:
        yield f"| `{entry.value}` | {cell(entry.meaning)} |"


def missing() -> Iterator[str]:
    """Yields the kinds of events without a meaning."""
    for kind in (*DecisionKind, *EntryKind):
        if not kind.meaning:
            yield f"{kind.name.lower()} has no meaning: add it to {type(kind).__name__}"
