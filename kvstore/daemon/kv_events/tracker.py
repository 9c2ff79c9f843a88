"""Tracks which blocks are in which tier, and announces changes to routers as vLLM KV events.

A router matches prompts by token ids. Only writers know these, and may send them with a reservation. A block
is announced when its tokens are known and its parent has been announced. Its entry is deleted with its last
copy. When a router subscribes, all events are repeated to all subscribers, at most once in a few seconds.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvstore.config import Events
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.block_table import MOST_TIERS
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.kv_events.publisher import CLEARED, Event, Publisher, Removed, Stored
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.errors import KVStoreError
from kvstore.types import Tier

_MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK", Tier.NETWORK: "EXTERNAL"}
_SAID = 1 << 16
"""Blocks whose tokens are known before they are stored: of more, the oldest are never announced."""
_BLOCKS_AT_ONCE = 256
_NEXT_STEP_S = 0.001
_NEXT_TRY_S = 0.1
_REPEAT_AFTER_S = 5.0
"""Least time between two repeats of all events."""


@dataclass(slots=True, eq=False)
class _Block:
    """One block of a model. `parent` is its hash, None for a root; `at`: namespace and tier of each copy.

    `era` is its topic's if it has been announced.
    """

    tokens: bytes
    parent: int | None
    at: list[int]
    era: int = 0


@dataclass(slots=True, eq=False)
class _Topic:
    """One model's blocks by hash. `said`: tokens of those that are not stored yet, the oldest first.

    `waiting`: blocks by the parent that has not been announced. `events`: not sent yet. `era`: how often all
    has been told from the start.
    """

    name: str
    blocks: dict[int, _Block] = field(default_factory=dict)
    said: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, set[int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    era: int = 1

    def has_announced(self, name: int) -> bool:
        """Whether routers know a block now."""
        block = self.blocks.get(name)
        return block is not None and block.era == self.era


def hash_of(key: bytes) -> int:
    """Returns the hash of a block: the low 64 bits of its key, as in vLLM."""
    return int.from_bytes(key[-8:], "big")


class Routing:
    """The announced blocks of all topics, and their publisher."""

    def __init__(
        self,
        core: Executor,
        namespaces: Namespaces,
        authenticator: Authenticator,
        problems: Problems,
        settings: Events,
    ) -> None:
        self._loop = core.loop
        self._core = core
        self._view = core.view
        self._namespaces = namespaces
        self._authenticator = authenticator
        self._problems = problems
        self._settings = settings
        self._node = self._settings.node or socket.gethostname()
        self._publisher: Publisher | None = None
        self._topics: dict[str, _Topic] = {}
        self._of: dict[int, _Topic | None] = {}
        self._flushing = False
        self._behind = False
        self._repeat_at = 0.0
        self._repeat: asyncio.TimerHandle | None = None
        self._again: deque[tuple[_Topic, list[int]]] = deque()

    def start(self) -> None:
        """Starts to publish if this is configured. A failure is reported as a problem."""
        if self._settings.listen is None:
            return
        try:
            self._publisher = Publisher(self._settings.listen, self._settings.replay, self._subscribed)
        except KVStoreError as error:
            self._problems.report(f"no KV events: {error}")
            return
        self._core.handle(ev.Configure(report_moves=True))
        for space in self._namespaces:
            self._topic(space.number)

    def close(self) -> None:
        """Sends waiting events, and ends."""
        if self._publisher is not None:
            self._flush()
            self._publisher.close()

    def status(self) -> dict[str, Any]:
        """Returns the part of `kvstore status`, empty if nothing is published."""
        if self._publisher is None:
            return {}
        announced = sum(len(topic.blocks) for topic in self._topics.values())
        return {"listen": self._publisher.address, "blocks": announced, **self._publisher.figures()}

    # -- what happens

    def hear(self, space: NamespaceEntry, keys: Keys, tokens: bytes) -> bool:
        """Takes the tokens of blocks that a writer will store. Returns False for a wrong number of tokens."""
        if space.layout is None or len(tokens) != 4 * space.layout.block_tokens * keys.n:
            return False
        topic = self._topic(space.number) if self._publisher is not None else None
        if topic is None:
            return True
        size, fresh = len(tokens) // keys.n, False
        for i in range(keys.n):
            name = hash_of(keys[i])
            if name not in topic.blocks and name not in topic.said:
                topic.said[name] = tokens[i * size : (i + 1) * size]
                fresh = True
        for name in list(islice(topic.said, max(0, len(topic.said) - _SAID))):
            del topic.said[name]
        if fresh:
            # What is stored already, from before a restart perhaps, can be announced from now on.
            self._core.handle(ev.Tell(space.number, keys))
        return True

    def moved(self, moved: ac.CopyReport) -> None:
        """Announces blocks that came to a tier or left it."""
        identity, parents = moved.identity, moved.parents
        for i, number in enumerate(identity.namespace.tolist()):
            topic = self._topic(number)
            if topic is None:
                continue
            name, at = hash_of(identity.key(i)), number * MOST_TIERS + moved.tier
            if parents is None:
                self._left(topic, name, at)
            else:
                self._came(topic, name, at, hash_of(parents.key(i)) if parents.key_bytes[i] else None)

    def forgotten(self, numbers: Iterable[int]) -> None:
        """Forgets namespaces of which nothing is left. Other namespaces may get their numbers."""
        for number in numbers:
            self._of.pop(number, None)

    def _topic(self, number: int) -> _Topic | None:
        """Returns the topic of a namespace, made if absent. None if the namespace is not published."""
        if number not in self._of:
            space = self._namespaces.at(number)
            if space is None or space.layout is None:
                return None
            self._of[number] = self._topic_of(space)
        return self._of[number]

    def _topic_of(self, space: NamespaceEntry) -> _Topic | None:
        tenants, layout = self._settings.tenants, space.layout
        assert layout is not None
        owner = self._authenticator.name(space.tenant)
        # All shards of a model have the same blocks: one of them is enough.
        if not layout.shard.startswith("0/") or (tenants is not None and owner not in tenants):
            return None
        name = f"kv@{self._node}@{layout.model}"
        if name not in self._topics:
            topic = self._topics[name] = _Topic(name)
            # What is known from an earlier life of this daemon is void.
            self._add(topic, CLEARED)
        return self._topics[name]

    # -- the book

    def _came(self, topic: _Topic, name: int, at: int, parent: int | None) -> None:
        block = topic.blocks.get(name)
        if block is None:
            tokens = topic.said.pop(name, None)
            if tokens is None:
                return
            block = topic.blocks[name] = _Block(tokens, parent, [])
        if at in block.at:
            return
        media = self._media(block)
        block.at.append(at)
        if block.era != topic.era:
            self._announce(topic, name)
        elif self._medium(at) not in media:
            self._add_stored(topic, name, block, self._medium(at))

    def _left(self, topic: _Topic, name: int, at: int) -> None:
        block = topic.blocks.get(name)
        if block is None or at not in block.at:
            return
        block.at.remove(at)
        medium = self._medium(at)
        if block.era == topic.era and medium not in self._media(block):
            self._add_removed(topic, name, medium)
        if not block.at:
            del topic.blocks[name]
            self._wait_no_more(topic, name, block)

    def _announce(self, topic: _Topic, name: int) -> None:
        """Announces a block and its waiting children, or lets the block wait for its parent."""
        ready = [name]
        while ready:
            name = ready.pop()
            block = topic.blocks[name]
            if block.parent is not None and not topic.has_announced(block.parent):
                topic.waiting.setdefault(block.parent, set()).add(name)
                continue
            block.era = topic.era
            for medium in sorted(self._media(block)):
                self._add_stored(topic, name, block, medium)
            ready += topic.waiting.pop(name, ())

    def _wait_no_more(self, topic: _Topic, name: int, block: _Block) -> None:
        if block.parent in topic.waiting:
            topic.waiting[block.parent].discard(name)
            if not topic.waiting[block.parent]:
                del topic.waiting[block.parent]

    def _medium(self, at: int) -> str:
        return _MEDIA[self._view.tiers[at % MOST_TIERS].kind]

    def _media(self, block: _Block) -> set[str]:
        return {self._medium(at) for at in block.at}

    # -- what is sent

    def _add_stored(self, topic: _Topic, name: int, block: _Block, medium: str) -> None:
        last = topic.events[-1] if topic.events else None
        if isinstance(last, Stored) and last.takes(block.parent, medium, len(block.tokens)):
            last.names.append(name)
            last.tokens.append(block.tokens)
        else:
            self._add(topic, Stored([name], block.parent, [block.tokens], medium))

    def _add_removed(self, topic: _Topic, name: int, medium: str) -> None:
        last = topic.events[-1] if topic.events else None
        if isinstance(last, Removed) and last.medium == medium:
            last.names.append(name)
        else:
            self._add(topic, Removed([name], medium))

    def _add(self, topic: _Topic, event: Event) -> None:
        topic.events.append(event)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hands on what one turn of the loop has brought: a batch a topic."""
        self._flushing = False
        assert self._publisher is not None
        for topic in self._topics.values():
            events, topic.events = topic.events, []
            if events and not self._behind and not self._publisher.put(topic.name, events):
                # Subscribers have missed events: everything is repeated when there is room.
                self._behind = True
                self._loop.call_later(_NEXT_TRY_S, self._catch_up)

    # -- everything from the start

    def _catch_up(self) -> None:
        assert self._publisher is not None
        if self._publisher.waiting:
            self._loop.call_later(_NEXT_TRY_S, self._catch_up)
        else:
            self._behind = False
            self._repeat_all()

    def _subscribed(self) -> None:
        """Plans a repeat for a new subscriber. Runs on the publisher's thread."""
        self._core.post(self._plan_repeat)

    def _plan_repeat(self) -> None:
        if self._repeat is None:
            when = max(self._core.now(), self._repeat_at)
            self._repeat = self._loop.call_at(when, self._repeat_all)

    def _repeat_all(self) -> None:
        """Sends AllBlocksCleared, and then every block again, in steps."""
        if self._again:
            self._repeat = self._loop.call_later(_REPEAT_AFTER_S, self._repeat_all)
            return
        self._repeat, self._repeat_at = None, self._core.now() + _REPEAT_AFTER_S
        for topic in self._topics.values():
            topic.events, topic.waiting = [], {}
            topic.era += 1
            self._add(topic, CLEARED)
            self._again.append((topic, list(reversed(topic.blocks))))
        self._tell_some()

    def _tell_some(self) -> None:
        assert self._publisher is not None
        if self._again and not self._publisher.waiting:
            topic, names = self._again[0]
            for name in names[-_BLOCKS_AT_ONCE:]:
                if name in topic.blocks and not topic.has_announced(name):
                    self._announce(topic, name)
            del names[-_BLOCKS_AT_ONCE:]
            if not names:
                self._again.popleft()
        if self._again:
            self._loop.call_later(_NEXT_STEP_S, self._tell_some)
