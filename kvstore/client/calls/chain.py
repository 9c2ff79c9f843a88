"""The keys of one call."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.types import Key, check_keys


class Chain:
    """Keys of one prompt in order: `keys` as passed by the caller, `joined` as sent.

    Each key has `key_bytes` bytes. Raises MisuseError for keys that are empty, too long or not of one length.
    """

    __slots__ = ("joined", "key_bytes", "keys")

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.joined, self.key_bytes = check_keys(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, count: int) -> Chain:
        """Returns at most `count` keys from `start` on, without a second check."""
        if not start and count >= len(self.keys):
            return self
        part = Chain.__new__(Chain)
        part.keys = self.keys[start : start + count]
        part.key_bytes = self.key_bytes
        part.joined = self.joined[start * self.key_bytes : (start + count) * self.key_bytes]
        return part
