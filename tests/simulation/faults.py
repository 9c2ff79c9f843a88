"""What goes wrong in a run, and how often: each run draws a few kinds of faults, some runs none."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields

CORRUPTING = {"bit_flip", "rot", "torn_write", "lost_write", "misdirected_write", "dram_rot", "liar", "stray"}
"""Faults after which bytes in a slot may be other ones than were put there."""

RATES = (0.02, 0.1, 0.3)


@dataclass
class Faults:
    """Rates, each 0 to 1: of a message, an I/O, a commit, or an operation of a client."""

    # the network
    disconnect: float = 0.0  # the connection breaks in the middle of a message
    slow_message: float = 0.0  # a message takes up to 200 ms
    hang: float = 0.0  # a connection moves nothing for seconds
    no_memory: float = 0.0  # an extent of DRAM beyond the first cannot be made
    # the device
    read_error: float = 0.0
    write_error: float = 0.0
    short_write: float = 0.0  # a part arrives, and it says so
    no_space: float = 0.0
    queue_full: float = 0.0  # a batch is refused with EAGAIN
    slow_io: float = 0.0
    stall: float = 0.0  # the device answers nothing for up to a minute
    sync_error: float = 0.0
    commit_error: float = 0.0
    slow_commit: float = 0.0
    small_disk: float = 0.0  # an extent cannot be allocated
    # what alters bytes
    bit_flip: float = 0.0  # one read is wrong
    rot: float = 0.0  # what is stored changes
    torn_write: float = 0.0  # a part arrives, and nothing says so
    lost_write: float = 0.0
    misdirected_write: float = 0.0
    dram_rot: float = 0.0
    # clients
    liar: float = 0.0  # commits another checksum than that of its bytes, or writes after the commit
    stray: float = 0.0  # fills slots after its connection is gone
    quitter: float = 0.0  # a call is cancelled
    misuse: float = 0.0

    happened: Counter[str] = field(default_factory=Counter)
    over: bool = False

    @classmethod
    def draw(cls, dice: random.Random) -> Faults:
        """A random subset with random rates; nothing at all in one run of six."""
        faults = cls()
        if dice.random() < 1 / 6:
            return faults
        share = dice.choice((0.1, 0.25, 0.5))
        corrupting = dice.random() < 0.4
        for name in NAMES:
            if dice.random() < share and (corrupting or name not in CORRUPTING):
                setattr(faults, name, dice.choice(RATES) if name != "stall" else 0.02)
        return faults

    def hits(self, dice: random.Random, name: str) -> bool:
        """Whether this fault happens now; counted."""
        rate = getattr(self, name)
        if self.over or not rate or dice.random() >= rate:
            return False
        self.happened[name] += 1
        return True

    @property
    def drawn(self) -> set[str]:
        """What may happen in this run."""
        return {name for name in NAMES if getattr(self, name)}

    @property
    def corrupted(self) -> bool:
        """Whether bytes may have changed so far."""
        return any(self.happened[name] for name in CORRUPTING)


NAMES = [f.name for f in fields(Faults) if f.type == "float"]
