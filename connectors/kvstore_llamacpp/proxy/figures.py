"""What the proxy counts, for operators and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Figures:
    """Counts since the start.

    `requests` took a slot; `read_requests` of them had a prompt that is served from the store. `slow_loads`
    were not done, because evaluation is faster. `refused_restores` were not taken by llama-server.
    `unsaved` slots could not be written to their file.
    """

    requests: int = 0
    read_requests: int = 0
    restored_requests: int = 0
    restored_tokens: int = 0
    slow_loads: int = 0
    refused_restores: int = 0
    saved: int = 0
    unsaved: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    denied_blocks: int = 0
    cancelled: int = 0
    turned_away: int = 0

    def to_map(self, **more: Any) -> dict[str, Any]:
        """Returns plain values, with more of them."""
        return {**asdict(self), **more}
