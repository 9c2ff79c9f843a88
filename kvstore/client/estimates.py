"""What a lookup says and asks of load times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The number of leading blocks that are stored, and of those among them that are worth loading."""

    blocks: int = 0
    worth_loading: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether some stored blocks are not worth loading."""
        return self.worth_loading < self.blocks

    @classmethod
    def shortest(cls, some: Sequence[StoredPrefix]) -> StoredPrefix:
        """Returns what all of these have."""
        return cls(min(each.blocks for each in some), min(each.worth_loading for each in some))

    def times(self, step: int) -> StoredPrefix:
        """Returns the prefix of which this is every `step`-th block."""
        return StoredPrefix(self.blocks * step, self.worth_loading * step)

    def then(self, more: StoredPrefix) -> StoredPrefix:
        """Returns this prefix with the blocks behind it. None of them is worth loading if it is cut."""
        worth = self.worth_loading + (0 if self.is_cut else more.worth_loading)
        return StoredPrefix(self.blocks + more.blocks, worth)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a lookup says of its caller, so that the daemon can tell what is worth loading.

    `recompute_s`: the time (s) to compute one block (0: unknown). `load_s`: how long (s) the caller waits for
    blocks (0: as long as for the answer). `have`: the number of leading blocks that the caller has.
    """

    recompute_s: float = 0.0
    load_s: float = 0.0
    have: int = 0

    @property
    def exact(self) -> bool:
        """Whether each key must be asked: a sample would count fewer blocks."""
        return bool(self.recompute_s) and not self.load_s


UNKNOWN = Estimate()
"""All stored blocks count."""
