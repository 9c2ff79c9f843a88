"""Tracks which blocks are in which tier, and announces changes to routers as vLLM KV events.

A router matches prompts by token ids. Only writers know these, and may send them with a reservation. A block
is announced when its tokens are known and its parent has been announced. Its entry is deleted with its last
copy. When a router subscribes, all events are repeated to all subscribers, at most once in 5 s.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvstore.config import Events
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.kv_events.publisher import CLEARED, Event, Publisher, Removed, Stored
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.errors import KVStoreError
from kvstore.types import MOST_TIERS, Tier

_MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK"}
"""Names of media in events. Any other tier is EXTERNAL."""
_MOST_UNSTORED = 1 << 16
"""The most blocks of a topic whose tokens are kept before the blocks are stored. Drops the oldest."""

_BLOCKS_PER_STEP = 256
_STEP_EVERY_S = 0.001
_RETRY_AFTER_S = 0.1
_REPEAT_AFTER_S = 5.0
"""Least time between two repeats of all events."""


@dataclass(slots=True, eq=False)
class _Block:
    """One block of a model. `parent`: hash of its parent, None for a root.

    `copies`: one number for the namespace and tier of each copy. `round`: round of its latest announcement.
    """

    tokens: bytes
    parent: int | None
    copies: list[int]
    round: int = 0


@dataclass(slots=True, eq=False)
class _Topic:
    """One model's blocks by hash. `unstored`: tokens of blocks that are not stored yet, the oldest first.

    `waiting`: blocks by the parent that has not been announced. `events`: not sent yet. `round`: count of
    the announcements of all blocks from the start.
    """

    name: str
    blocks: dict[int, _Block] = field(default_factory=dict)
    unstored: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, set[int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    round: int = 1

    def has_announced(self, name: int) -> bool:
        """Returns whether routers know a block now."""
        block = self.blocks.get(name)
        return block is not None and block.round == self.round


def hash_of(key: bytes) -> int:
    """Returns the hash of a block: the low 64 bits of its key, as in vLLM."""
    return int.from_bytes(key[-8:], "big")


@dataclass(slots=True, eq=False)
class Tracker:
    """The announced blocks of all topics, and their publisher."""

    _core: Executor
    _namespaces: Namespaces
    _authenticator: Authenticator
    _problems: Problems
    _settings: Events
    _publisher: Publisher | None = field(init=False, default=None)
    _topics: dict[str, _Topic] = field(init=False, default_factory=dict)
    _topic_of: dict[int, _Topic | None] = field(init=False, default_factory=dict)
    _flushing: bool = field(init=False, default=False)
    _behind: bool = field(init=False, default=False)
    _repeat_at: float = field(init=False, default=0.0)
    _repeat: asyncio.TimerHandle | None = field(init=False, default=None)
    _repeating: deque[tuple[_Topic, list[int]]] = field(init=False, default_factory=deque)

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
        for namespace in self._namespaces:
            self._topic(namespace.number)

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
        return {"listen": self._publisher.address, "blocks": announced, **self._publisher.counts}

    # -- changes of blocks

    def add_tokens(self, namespace: NamespaceEntry, keys: Keys, tokens: bytes) -> bool:
        """Takes the tokens of blocks that a writer will store. Returns False for a wrong number of tokens."""
        if namespace.layout is None or len(tokens) != 4 * namespace.layout.block_tokens * keys.n:
            return False
        topic = self._topic(namespace.number) if self._publisher is not None else None
        if topic is None:
            return True
        size, fresh = len(tokens) // keys.n, False
        for i in range(keys.n):
            name = hash_of(keys[i])
            if name not in topic.blocks and name not in topic.unstored:
                topic.unstored[name] = tokens[i * size : (i + 1) * size]
                fresh = True
        for name in list(islice(topic.unstored, max(0, len(topic.unstored) - _MOST_UNSTORED))):
            del topic.unstored[name]
        if fresh:
            # Blocks may be stored already, for example since before a restart.
            self._core.handle(ev.Tell(namespace.number, keys))
        return True

    def copies_changed(self, report: ac.CopyReport) -> None:
        """Announces blocks that were added to a tier or removed from it."""
        identity, parents = report.identity, report.parents
        for i, number in enumerate(identity.namespace.tolist()):
            topic = self._topic(number)
            if topic is None:
                continue
            name, copy = hash_of(identity.key(i)), number * MOST_TIERS + report.tier
            if parents is None:
                self._remove(topic, name, copy)
            else:
                self._add(topic, name, copy, hash_of(parents.key(i)) if parents.key_bytes[i] else None)

    def namespaces_freed(self, numbers: Iterable[int]) -> None:
        """Forgets empty namespaces. Other namespaces may get their numbers."""
        for number in numbers:
            self._topic_of.pop(number, None)

    def _topic(self, number: int) -> _Topic | None:
        """Returns the topic of a namespace, made if absent. None if the namespace is not published."""
        if number not in self._topic_of:
            namespace = self._namespaces.at(number)
            if namespace is None or namespace.layout is None:
                return None
            tenants, layout = self._settings.tenants, namespace.layout
            owner = self._authenticator.name(namespace.tenant)
            # All shards of a model have the same blocks: the first is enough.
            published = _is_first(layout.shard) and (tenants is None or owner in tenants)
            self._topic_of[number] = self._topic_for(layout.model) if published else None
        return self._topic_of[number]

    def _topic_for(self, model: str) -> _Topic:
        name = f"kv@{self._settings.node or socket.gethostname()}@{model}"
        if name not in self._topics:
            self._topics[name] = _Topic(name)
            # Routers may know blocks from before a restart of this daemon.
            self._send(self._topics[name], CLEARED)
        return self._topics[name]

    def _add(self, topic: _Topic, name: int, copy: int, parent: int | None) -> None:
        block = topic.blocks.get(name)
        if block is None:
            tokens = topic.unstored.pop(name, None)
            if tokens is None:
                return
            block = topic.blocks[name] = _Block(tokens, parent, [])
        if copy in block.copies:
            return
        media = self._media(block)
        block.copies.append(copy)
        if block.round != topic.round:
            self._announce(topic, name)
        elif self._medium(copy) not in media:
            self._send_stored(topic, name, block, self._medium(copy))

    def _remove(self, topic: _Topic, name: int, copy: int) -> None:
        block = topic.blocks.get(name)
        if block is None or copy not in block.copies:
            return
        block.copies.remove(copy)
        medium = self._medium(copy)
        if block.round == topic.round and medium not in self._media(block):
            last = topic.events[-1] if topic.events else None
            if isinstance(last, Removed) and last.medium == medium:
                last.names.append(name)
            else:
                self._send(topic, Removed([name], medium))
        if not block.copies:
            del topic.blocks[name]
            if block.parent in topic.waiting:
                topic.waiting[block.parent].discard(name)
                if not topic.waiting[block.parent]:
                    del topic.waiting[block.parent]

    def _announce(self, topic: _Topic, name: int) -> None:
        """Announces a block and its waiting children, or lets the block wait for its parent."""
        ready = [name]
        while ready:
            name = ready.pop()
            block = topic.blocks[name]
            if block.parent is not None and not topic.has_announced(block.parent):
                topic.waiting.setdefault(block.parent, set()).add(name)
                continue
            block.round = topic.round
            for medium in sorted(self._media(block)):
                self._send_stored(topic, name, block, medium)
            ready += topic.waiting.pop(name, ())

    def _medium(self, copy: int) -> str:
        return _MEDIA.get(self._core.view.tiers[copy % MOST_TIERS].kind, "EXTERNAL")

    def _media(self, block: _Block) -> set[str]:
        return {self._medium(copy) for copy in block.copies}

    # -- events to send

    def _send_stored(self, topic: _Topic, name: int, block: _Block, medium: str) -> None:
        last = topic.events[-1] if topic.events else None
        if isinstance(last, Stored) and last.takes(block.parent, medium, len(block.tokens)):
            last.names.append(name)
            last.tokens.append(block.tokens)
        else:
            self._send(topic, Stored([name], block.parent, [block.tokens], medium))

    def _send(self, topic: _Topic, event: Event) -> None:
        topic.events.append(event)
        if not self._flushing:
            self._flushing = True
            self._core.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Publishes the events of one turn of the event loop, one batch per topic."""
        self._flushing = False
        assert self._publisher is not None
        for topic in self._topics.values():
            events, topic.events = topic.events, []
            if events and not self._behind and not self._publisher.put(topic.name, events):
                # Subscribers have missed events: all are repeated when there is room.
                self._behind = True
                self._core.loop.call_later(_RETRY_AFTER_S, self._catch_up)

    # -- repeats of all events

    def _catch_up(self) -> None:
        assert self._publisher is not None
        if self._publisher.waiting:
            self._core.loop.call_later(_RETRY_AFTER_S, self._catch_up)
        else:
            self._behind = False
            self._repeat_all()

    def _subscribed(self) -> None:
        """Plans a repeat for a new subscriber. Runs on the publisher's thread."""
        self._core.post(self._plan_repeat)

    def _plan_repeat(self) -> None:
        if self._repeat is None:
            when = max(self._core.now(), self._repeat_at)
            self._repeat = self._core.loop.call_at(when, self._repeat_all)

    def _repeat_all(self) -> None:
        """Sends AllBlocksCleared, and then every block again, in steps."""
        if self._repeating:
            self._repeat = self._core.loop.call_later(_REPEAT_AFTER_S, self._repeat_all)
            return
        self._repeat, self._repeat_at = None, self._core.now() + _REPEAT_AFTER_S
        for topic in self._topics.values():
            topic.events, topic.waiting = [], {}
            topic.round += 1
            self._send(topic, CLEARED)
            self._repeating.append((topic, list(reversed(topic.blocks))))
        self._repeat_step()

    def _repeat_step(self) -> None:
        assert self._publisher is not None
        if self._repeating and not self._publisher.waiting:
            topic, names = self._repeating[0]
            for name in names[-_BLOCKS_PER_STEP:]:
                if name in topic.blocks and not topic.has_announced(name):
                    self._announce(topic, name)
            del names[-_BLOCKS_PER_STEP:]
            if not names:
                self._repeating.popleft()
        if self._repeating:
            self._core.loop.call_later(_STEP_EVERY_S, self._repeat_step)


def _is_first(shard: str) -> bool:
    """Returns whether all ranks in the name of a shard are 0: "0/4", "tp 0/4, pp 0/2"."""
    ranks = re.findall(r"(\d+)/\d+", shard)
    return bool(ranks) and all(int(rank) == 0 for rank in ranks)
