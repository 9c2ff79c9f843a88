"""Objects and namespaces whose deletion on the network has begun and is not confirmed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvstore.tiers.network.base import Name

Target = Name | bytes
"""What a deletion is about: one object, or a namespace's fingerprint for all of its objects."""


class PendingDeletions:
    """Targets that must not be read from the network or written to it."""

    def __init__(self) -> None:
        self._running: Counter[Target] = Counter()
        self._to_retry: set[Target] = set()

    def __contains__(self, target: Target) -> bool:
        return self._running[target] > 0 or target in self._to_retry

    def begin(self, targets: Collection[Target]) -> None:
        """A request to delete these targets runs until `end`."""
        self._running.update(targets)

    def end(self, targets: Collection[Target]) -> None:
        """Ends one request to delete these targets."""
        self._running -= Counter(targets)

    @property
    def to_retry(self) -> list[Target]:
        """Targets whose deletion failed."""
        return list(self._to_retry)

    def retry_later(self, targets: Collection[Target]) -> None:
        """Keeps targets whose deletion failed."""
        self._to_retry.update(targets)

    def deleted(self, targets: Collection[Target]) -> None:
        """The backend no longer has these targets."""
        self._to_retry.difference_update(targets)
