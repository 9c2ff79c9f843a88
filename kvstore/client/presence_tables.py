"""Presence tables of the daemon that are mapped into this process, and what they say.

Not covered: when a table is asked for, and what a lookup makes of it (`calls.presence`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from kvstore import native
from kvstore.arena import Mapping
from kvstore.types import PRESENCE_HIDDEN, PRESENCE_RETIRED, PRESENCE_TIER, Key

ABSENT = 0xFF
"""Instead of a tier: the key is not stored."""

_AGAIN_S = 1.0
"""The daemon is asked for a table of a namespace at most once in this time (s)."""

HEARD_S = 1.0
"""Tables answer within this time (s) after an answer of the daemon. Then a request shows whether it runs."""

_OWN = bytes(flags if flags == ABSENT else flags & PRESENCE_TIER for flags in range(256))
_FOREIGN = bytes(ABSENT if flags & PRESENCE_HIDDEN else tier for flags, tier in enumerate(_OWN))


class PresenceTable:
    """The table of one namespace. `network`: keys that it does not have may be on the network.

    `foreign`: the namespace is another tenant's. `slot_bytes`: the size of its slots in DRAM.
    """

    def __init__(self, mapping: Mapping, foreign: bool, network: bool, slot_bytes: int) -> None:
        self.network = network
        self.slot_bytes = slot_bytes
        self._meaning = _FOREIGN if foreign else _OWN
        self._memory = mapping.view
        self._head = mapping.view[:24].cast("Q")

    @property
    def is_retired(self) -> bool:
        """Whether the table is not updated any more."""
        return self._head[0] == PRESENCE_RETIRED

    def find(self, keys: Sequence[Key], leading: bool) -> bytes | None:
        """Returns the tier of each key, or ABSENT; with `leading`, of the keys before the first absent one.

        None: only the daemon can tell.
        """
        assert native.presence is not None
        try:
            flags = native.presence(self._memory, keys if type(keys) is list else list(keys), leading)
        except (TypeError, ValueError):
            return None  # the request checks the keys
        if flags is None:
            return None
        tiers = flags.translate(self._meaning)
        end = tiers.find(ABSENT) if leading else -1
        return tiers if end < 0 else tiers[:end]

    def find_prefix(self, keys: Sequence[Key], step: int) -> bytes | None:
        """Returns the tiers of the keys before the first absent one.

        In a table without gaps, this looks at every `step`-th key, and at those between the last one found
        and the next. The others get the tier of the next one looked at. None: only the daemon can tell.
        """
        if step <= 1 or not self._head[2]:
            return self.find(keys, leading=True)
        some = self.find(keys[step - 1 :: step], leading=True)
        if some is None:
            return None
        at = len(some) * step
        rest = self.find(keys[at : at + step - 1], leading=True)
        return None if rest is None else np.frombuffer(some, np.uint8).repeat(step).tobytes() + rest

    def places(self, keys: Sequence[Key]) -> tuple[bytes, bytes] | None:
        """Returns the tiers of the keys before the first absent one, and where in DRAM each was last.

        A place is a u64, see `SLOT_RECORD`. None: only the daemon can tell.
        """
        assert native.places is not None
        try:
            found = native.places(self._memory, keys if type(keys) is list else list(keys))
        except (TypeError, ValueError):
            return None
        if found is None:
            return None
        tiers = found[0].translate(self._meaning)
        end = tiers.find(ABSENT)
        return tiers if end < 0 else tiers[:end], found[1]


class PresenceTables:
    """The tables of one run of the daemon, by the fingerprint of the namespace."""

    def __init__(self) -> None:
        self._heard_s = -math.inf
        self._tables: dict[bytes, PresenceTable] = {}
        self._asked_s: dict[bytes, float] = {}

    def heard(self) -> None:
        """Notes that the daemon has answered."""
        self._heard_s = time.monotonic()

    @property
    def are_current(self) -> bool:
        """Whether the daemon has answered just now. One that hangs has tables, but serves no block."""
        return time.monotonic() - self._heard_s < HEARD_S

    def get(self, namespace: bytes) -> PresenceTable | None:
        """Returns the table of a namespace if it is mapped. Forgets a retired one."""
        table = self._tables.get(namespace)
        if table is not None and table.is_retired:
            self._tables.pop(namespace, None)
            return None
        return table

    def may_ask(self, namespace: bytes) -> bool:
        """Returns whether to ask the daemon for a table: none is mapped, none was asked for recently."""
        now = time.monotonic()
        if self.get(namespace) is not None or now < self._asked_s.get(namespace, -_AGAIN_S) + _AGAIN_S:
            return False
        self._asked_s = {name: at for name, at in self._asked_s.items() if now < at + _AGAIN_S}
        self._asked_s[namespace] = now
        return True

    def add(self, namespace: bytes, table: PresenceTable) -> None:
        """Keeps a mapped table. Forgets retired ones: their namespaces may never be asked about again."""
        self._tables = {name: each for name, each in self._tables.items() if not each.is_retired}
        self._tables[namespace] = table
