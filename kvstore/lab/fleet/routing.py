"""Routers: which node gets a request.

`events` knows from KV events which blocks each node has in DRAM or NVMe. It prefers the node with the longest
stored prefix, unless waiting there takes longer than what the prefix saves. Events arrive at once and none is
lost. Like a daemon's events, they do not tell what the network has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import MisuseError
from kvstore.lab.fleet.node import Prompt

Waits = npt.NDArray[np.float64]
"""Seconds until each node would begin a request that is sent now, as the router expects."""


class Router(Protocol):
    """Chooses a node for each request. Gets KV events only if it `listens`."""

    listens: bool

    def choose(self, prompt: Prompt, waits: Waits) -> int:
        """Returns the number of the node that gets this request."""

    def stored(self, node: int, prompt: Prompt) -> int:
        """Returns how many leading blocks of a prompt the router believes to be stored on a node."""

    def report(self, node: int, tier: int, keys: list[int], gained: bool) -> None:
        """Blocks of a node gained or lost their copy in a tier, by its number."""


class BlockIndex:
    """The nodes that hold each block in any tier, by the block's key: kept up to date by KV events."""

    def __init__(self) -> None:
        self._tiers: dict[int, dict[int, int]] = {}

    def report(self, node: int, tier: int, keys: Iterable[int], gained: bool) -> None:
        """Notes that blocks gained or lost their copy in a tier of a node."""
        bit = 1 << tier
        for key in keys:
            held = self._tiers.setdefault(key, {})
            tiers = held.get(node, 0)
            held[node] = tiers = tiers | bit if gained else tiers & ~bit
            if not tiers:
                del held[node]
            if not held:
                del self._tiers[key]

    def holders(self, key: int) -> dict[int, int]:
        """Returns the nodes that hold a block, each with the bits of its tiers. Must not be changed."""
        return self._tiers.get(key, _NOBODY)

    def stored(self, node: int, keys: list[int]) -> int:
        """Returns how many leading keys a node holds, if it holds the parents of all its blocks."""
        for at in range(len(keys) - 1, -1, -1):
            if node in self.holders(keys[at]):
                return at + 1
        return 0


_NOBODY: dict[int, int] = {}


class _BlindRouter:
    """A router without KV events."""

    listens = False

    def __init__(self, nodes: int, block_s: float, seed: int) -> None:
        self._nodes = nodes
        self._dice = random.Random(seed)

    def stored(self, node: int, prompt: Prompt) -> int:
        return 0

    def report(self, node: int, tier: int, keys: list[int], gained: bool) -> None:
        raise AssertionError("this router gets no events")


class RandomRouter(_BlindRouter):
    """Sends each request to any node."""

    def choose(self, prompt: Prompt, waits: Waits) -> int:
        return self._dice.randrange(self._nodes)


class ShortestQueueRouter(_BlindRouter):
    """Sends each request to the node with the shortest wait, at random among equal ones."""

    def choose(self, prompt: Prompt, waits: Waits) -> int:
        return _any_of(np.flatnonzero(waits == waits.min()), self._dice)


class StickyRouter(_BlindRouter):
    """Sends all requests of a session to one node, which is any node at first."""

    def __init__(self, nodes: int, block_s: float, seed: int) -> None:
        super().__init__(nodes, block_s, seed)
        self._node_of: dict[int, int] = {}

    def choose(self, prompt: Prompt, waits: Waits) -> int:
        node = self._node_of.get(prompt.session)
        if node is None:
            node = self._node_of[prompt.session] = self._dice.randrange(self._nodes)
        return node


class EventsRouter:
    """Sends each request where it is expected to end first: the wait there less `block_s` a stored block."""

    listens = True

    def __init__(self, nodes: int, block_s: float, seed: int) -> None:
        self._block_s = block_s
        self._dice = random.Random(seed)
        self._index = BlockIndex()

    def choose(self, prompt: Prompt, waits: Waits) -> int:
        least = float(waits.min())
        best, best_s, found = np.flatnonzero(waits == least), least, False
        keys = prompt.words
        for at in range(len(keys) - 1, -1, -1):
            saved_s = (at + 1) * self._block_s
            if best_s < least - saved_s:
                break  # a shorter prefix cannot be better, even without a wait
            held = self._index.holders(keys[at])
            if not held:
                continue
            nodes = np.fromiter(held, np.int64, len(held))
            ends_s = waits[nodes] - saved_s
            soonest = float(ends_s.min())
            if soonest < best_s or (soonest == best_s and not found):
                best, best_s, found = nodes[ends_s == soonest], soonest, True
        return _any_of(best, self._dice)

    def stored(self, node: int, prompt: Prompt) -> int:
        return self._index.stored(node, prompt.words)

    def report(self, node: int, tier: int, keys: list[int], gained: bool) -> None:
        self._index.report(node, tier, keys, gained)


def _any_of(nodes: npt.NDArray[np.int64], dice: random.Random) -> int:
    return int(nodes[dice.randrange(len(nodes))])


ROUTERS: dict[str, Callable[[int, float, int], Router]] = {
    "random": RandomRouter,
    "sticky": StickyRouter,
    "shortest-queue": ShortestQueueRouter,
    "events": EventsRouter,
}
"""The routers by name."""


def router_of(name: str, nodes: int, block_s: float, seed: int) -> Router:
    """Returns a router for this many nodes. `block_s`: seconds that a stored block saves.

    Raises MisuseError for an unknown name.
    """
    if name not in ROUTERS:
        raise MisuseError(f"no routing {name!r:.80}", f"one of {', '.join(ROUTERS)}")
    return ROUTERS[name](nodes, block_s, seed)
