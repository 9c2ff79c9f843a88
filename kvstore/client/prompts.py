"""Assigns requests to prompts: the daemon's hit ratio counts each prompt once.

An engine looks up a prompt, perhaps often, then acquires the blocks found, perhaps in parts, and stores the
rest. These requests belong to one prompt. Only the client can recognize them by their keys: they are sent
over several connections, and a long lookup does not send every key. Callers with more information, such as
connectors with several processes, pass `prompt`.

Not covered: the hit ratio, which the daemon computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from kvstore.errors import MisuseError
from kvstore.types import Key
from kvstore.wire.messages import MAX_PROMPT_BLOCKS

POLL_S = 1.0
"""A lookup of the same keys by the same thread or task within this time (s) after the last one is a poll."""
POLLED_S = 60.0
"""Polls within this time (s) after the first lookup belong to its prompt; later ones to another."""
_OPEN = 64
_OPEN_KEYS = 1 << 17
_LONG_KEYS = _OPEN_KEYS // _OPEN
"""Shorter prompts are not counted in keys: all together have no more than `_OPEN_KEYS`."""


class PromptRequests:
    """The requests for one prompt. `keys`: all keys of the prompt.

    `found`: how many leading keys are known to be stored. `delivered`: how many leading blocks were granted.
    `new_blocks`: blocks of the prompt until the daemon has answered the first request; then 0. `base`: the
    position of the current call's first key; methods count positions from there.
    """

    def __init__(
        self, keys: Sequence[Key], blocks: int, namespace: object = None, caller: object = None
    ) -> None:
        self.keys = keys
        self.ends = _ends(keys)
        self.namespace = namespace
        self.caller = caller
        self.found = 0
        self.delivered = 0
        self.looked_up = False
        self.began_s = self.polled_s = time.monotonic()
        self.new_blocks = min(blocks, MAX_PROMPT_BLOCKS)
        self.base = 0

    @classmethod
    def declared(cls, keys: Sequence[Key], blocks: int) -> PromptRequests:
        """Returns a prompt of `blocks` blocks, as declared by the caller; 0: not its first request.

        Raises MisuseError if `blocks` is out of range.
        """
        if not 0 <= blocks <= MAX_PROMPT_BLOCKS:
            raise MisuseError(f"prompt is {blocks!r}", f"0 to {MAX_PROMPT_BLOCKS} blocks, or None")
        requests = cls(keys, blocks)
        requests.found = 0 if blocks else len(keys)
        return requests

    def known(self, at: int = 0) -> int:
        """Returns how many keys from position `at` on the daemon has counted as found."""
        return max(0, self.found - self.base - at)

    def note_answer(self, at: int, stored: int) -> None:
        """Notes an answer: `stored` blocks from position `at` on are stored."""
        self.new_blocks = 0
        self.found = max(self.found, self.base + at + stored if stored else 0)

    def note_delivery(self, at: int, granted: int) -> None:
        """Notes that `granted` blocks from position `at` on were granted."""
        self.delivered = self.base + at + granted

    def continues(self, keys: Sequence[Key], search: bool) -> bool:
        """Returns whether a call for these keys belongs to the prompt; sets `base` if it does."""
        base = self.position(keys[0], search)
        end = base + len(keys)
        if base < 0 or end > len(self.keys) or self.keys[end - 1] != keys[-1]:
            return False
        if self.delivered and not base:
            return False  # A second delivery from the start is another prompt.
        self.base = base
        return True

    def position(self, key: Key, search: bool) -> int:
        """Returns the position of a key in the prompt, or -1. Tries only likely positions unless `search`."""
        for place in (self.delivered, self.found):
            if place < len(self.keys) and self.keys[place] == key:
                return place
        if search:
            with contextlib.suppress(ValueError):
                return self.keys.index(key)
        return -1

    @property
    def is_polled(self) -> bool:
        """Whether a request for the same keys at this time belongs to the prompt."""
        now = time.monotonic()
        return not self.delivered and now - self.polled_s <= POLL_S and now - self.began_s <= POLLED_S


class Prompts:
    """The open prompts of one client: recently requested, and neither delivered nor stored yet."""

    def __init__(self) -> None:
        # Threads need no lock: each change is one operation, and a lost change costs one count.
        self._open: list[PromptRequests] = []
        self._of_ends: dict[object, list[PromptRequests]] = {}

    def of_lookup(self, namespace: object, keys: Sequence[Key], prompt: int | None) -> PromptRequests:
        """Returns the prompt of a lookup."""
        if prompt is not None:
            return PromptRequests.declared(keys, prompt)
        caller = _caller()
        same = self._of_keys(namespace, caller, keys)
        requests = next((p for p in same if p.is_polled), None) if same else None
        if requests is None:
            requests = self._new(namespace, caller, keys, same)
        requests.polled_s, requests.looked_up = time.monotonic(), True
        requests.base = 0
        return requests

    def of_acquire(self, namespace: object, keys: Sequence[Key], prompt: int | None) -> PromptRequests:
        """Returns the prompt of an acquire or get."""
        if prompt is not None:
            return PromptRequests.declared(keys, prompt)
        if not keys:
            return PromptRequests(keys, 0)
        caller = _caller()
        for requests, search in self._candidates(namespace, caller):
            # An acquire without a lookup opens a prompt too, and may be a poll.
            begun = requests.looked_up or requests.delivered or requests.is_polled
            if begun and requests.continues(keys, search):
                requests.polled_s = time.monotonic()
                return requests
        return self._new(namespace, caller, keys, self._of_keys(namespace, caller, keys))

    def end_acquire(self, requests: PromptRequests) -> None:
        """Closes the prompt if all found blocks are delivered."""
        if requests.delivered and requests.delivered >= requests.found:
            self._close(requests)

    def end_by_store(self, namespace: object, keys: Sequence[Key]) -> None:
        """Closes the prompt of stored keys: its blocks have been computed."""
        if not keys or not self._open:
            return
        for requests, search in self._candidates(namespace, _caller()):
            if requests.position(keys[0], search) >= 0:
                self._close(requests)
                return

    def _of_keys(self, namespace: object, caller: object, keys: Sequence[Key]) -> list[PromptRequests]:
        """Returns a caller's open prompts of these keys in a namespace, the latest first."""
        some = self._of_ends.get(_ends(keys), [])
        return [p for p in some[::-1] if p.caller == caller and p.namespace == namespace]

    def _candidates(self, namespace: object, caller: object) -> Iterator[tuple[PromptRequests, bool]]:
        """Yields the possible prompts of a request, the likeliest first; whether to search their keys."""
        latest_first = self._open[::-1]
        for requests in latest_first:
            if requests.namespace == namespace and requests.caller == caller:
                yield requests, False
        for requests in latest_first:
            if requests.namespace == namespace and requests.caller != caller:
                yield requests, False
        for requests in latest_first:
            if requests.namespace == namespace and requests.caller == caller:
                yield requests, True

    def _new(
        self, namespace: object, caller: object, keys: Sequence[Key], same: Sequence[PromptRequests]
    ) -> PromptRequests:
        """Opens a prompt instead of the `same` ones. Closes the oldest if too many are open."""
        requests = PromptRequests(keys, len(keys), namespace, caller)
        for each in same:
            self._close(each)
        self._open.append(requests)
        self._of_ends.setdefault(requests.ends, []).append(requests)
        while len(self._open) > _OPEN:
            self._close(self._open[0])
        if len(keys) > _LONG_KEYS:
            while len(self._open) > 1 and sum(len(p.keys) for p in self._open) > _OPEN_KEYS:
                self._close(self._open[0])
        return requests

    def _close(self, requests: PromptRequests) -> None:
        # Another thread may have closed it.
        with contextlib.suppress(KeyError, ValueError):
            self._open.remove(requests)
            same = self._of_ends[requests.ends]
            same.remove(requests)
            if not same:
                del self._of_ends[requests.ends]


def _ends(keys: Sequence[Key]) -> object:
    """Returns what equal chains have in common. A key depends on all keys before it."""
    # Joined: a key that is not `bytes` may have no hash.
    return (len(keys), b"".join((keys[0], keys[-1]))) if keys else None


def _caller() -> object:
    """Returns a reference to the running task or thread. Their ids are reused after they end."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return weakref.ref(threading.current_thread() if task is None else task)
