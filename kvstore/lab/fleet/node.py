"""A node of a fleet: a simulated node beside a network tier, which reports its blocks as KV events.

It does what a daemon does: blocks that the core offers are uploaded, stored blocks beyond the node's own are
downloaded into DRAM, where they evict others. Uploads and downloads take place at once here; the simulation
adds their time. Not covered: hand-offs of blocks that the network has evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy.admission import Rule
from kvstore.lab.capacity import Capacities
from kvstore.lab.fleet.network_tier import NetworkTier
from kvstore.lab.simulated_node import CHAIN, SimulatedNode
from kvstore.types import Tier

SPARE_ROWS = 1 << 13
"""Rows of a node's block table beyond two for each slot. A large table would take address space N times."""
_CLIENT = 1


class Listener(Protocol):
    """Gets the KV events of nodes."""

    def report(self, node: int, tier: int, keys: list[int], gained: bool) -> None:
        """Blocks of a node gained or lost their copy in a tier, by its number."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request. `keys`: one 8-byte key for each full block; `words`: the same as numbers.

    `session`: the conversation that it belongs to.
    """

    number: int
    keys: Keys
    words: list[int]
    tokens: int
    session: int


@dataclass(frozen=True, slots=True)
class Served:
    """What a node had of a prompt. `nvme` of the `local` blocks come from NVMe, `network` from the network.

    `downloaded`: blocks that were transferred for it.
    """

    local: int
    nvme: int
    network: int
    downloaded: int

    @property
    def blocks(self) -> int:
        """All blocks that were served."""
        return self.local + self.network


class FleetNode(SimulatedNode):
    """The node number `number` of a fleet. `listener` None: nobody reads its KV events."""

    def __init__(
        self,
        number: int,
        capacities: Capacities,
        block_bytes: int,
        network: NetworkTier,
        *,
        options: Mapping[str, Any],
        uploads: Rule,
        listener: Listener | None = None,
    ) -> None:
        """`uploads`: which blocks are offered to the network."""
        self._number = number
        self._network = network
        self._listener = listener
        self.uploaded = 0
        super().__init__(capacities, block_bytes, options, SPARE_ROWS)
        if network.exists:
            self._send(ev.SetSharing(uploads))
        if listener is not None:
            self._send(ev.Configure(report_moves=True))

    def read(self, prompt: Prompt, least_network: float, now: float) -> Served:
        """Reads the stored prefix of a prompt, here and on the network. `now`: seconds, monotonic.

        Fewer than `least_network` blocks of the network are faster to compute than to download.
        """
        self.pass_time(now)
        keys = prompt.keys
        here = self._lookup(keys)
        there = self._network.prefix(prompt.words, here) if self._network.exists else 0
        downloaded = 0
        if there and there >= least_network:
            downloaded = self._download(keys, here, here + there)
            self._network.use(prompt.words[here : here + there])
        else:
            there = 0
        tiers = self._read(CHAIN, keys.take(0, here + there))
        local = tiers[:here]
        self.hits += np.bincount(local, minlength=len(self.hits))
        network = max(0, len(tiers) - here)
        self.hits[Tier.NETWORK] += network
        return Served(len(local), int(np.count_nonzero(local == Tier.NVME)), network, downloaded)

    def write(self, prompt: Prompt, served: int, now: float) -> None:
        """Stores the blocks of a prompt after the first `served`, which were computed."""
        self.pass_time(now)
        keys = prompt.keys
        if served < keys.n:
            # Time has passed since the read: blocks may be gone.
            self._put(CHAIN, keys, min(served, self._lookup(keys)))

    def hand_off(self, prompt: Prompt) -> None:
        """Uploads the blocks of a prompt that the network lacks, for another node."""
        self.uploaded += self._network.store(prompt.words)
        self._network.use(prompt.words)

    def receive(self, prompt: Prompt, now: float) -> None:
        """Downloads what this node lacks of a prompt that another node handed off, and reads the prompt."""
        self._download(prompt.keys, self.stored(prompt, now), prompt.keys.n)
        self._read(CHAIN, prompt.keys)

    def stored(self, prompt: Prompt, now: float) -> int:
        """Returns the length of the stored prefix of a prompt on this node."""
        self.pass_time(now)
        return self._lookup(prompt.keys)

    def _download(self, keys: Keys, start: int, end: int) -> int:
        """Stores blocks of the network. Returns how many were transferred; fewer if DRAM has no room."""
        step, downloaded = self.placement.view.limits.reserve_keys, 0
        for at in range(start, end, step):
            part = keys.take(at, min(at + step, end))
            parent = keys[at - 1] if at else b""
            reserved = self._ask(ev.Reserve(0, _CLIENT, CHAIN, part, parent, inf, loading=True))
            n = len(reserved.slots)
            if n:
                self._ask(ev.Commit(0, _CLIENT, reserved.lease, self._nothing[:n], self._written[:n]))
            downloaded += n
            if np.count_nonzero(reserved.status == ac.DENIED):
                break
        return downloaded

    def _observe(self, action: ac.Action) -> None:
        if isinstance(action, ac.OfferBlocks):
            self.uploaded += self._network.store(action.identity.words[:, 0].tolist())
        elif isinstance(action, ac.CopyReport) and self._listener is not None:
            words = action.identity.words[:, 0].tolist()
            self._listener.report(self._number, action.tier, words, action.gained)
