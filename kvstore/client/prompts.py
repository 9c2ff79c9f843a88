"""Which requests ask for the same prompt: a prompt counts once in the daemon's hit ratio.

An engine looks a prompt up, perhaps often, then acquires what was found, perhaps in parts, and stores the
rest. All of that is one question. The client tells it by the keys, since it alone sees them all: requests of
one prompt go over several connections, and a long look-up does not send every key. Callers that know better,
such as connectors whose processes share the work, say it with `prompt`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Sequence

from kvstore.errors import MisuseError
from kvstore.types import Key
from kvstore.wire.messages import MAX_PROMPT_BLOCKS

POLL_S = 1.0
"""A look-up of the same keys, by the same thread or task, so soon after the last one is a poll."""
POLLED_S = 60.0
"""A prompt is polled for so long; after that it counts as another one."""
_OPEN = 64
_OPEN_KEYS = 1 << 17


class Question:
    """The questions for one prompt: `keys` from its start, of which the first `found` are known to be stored.

    `at` leading blocks were delivered.
    """

    def __init__(self, keys: Sequence[Key], asks: int, namespace: object = None) -> None:
        self.keys = keys
        self.namespace = namespace
        self.asker = _asker()
        self.found = 0
        self.at = 0
        self.looked_up = False
        self.began_s = self.asked_s = time.monotonic()
        self._asks = min(asks, MAX_PROMPT_BLOCKS)
        self._base = 0

    @classmethod
    def answered(cls, keys: Sequence[Key], prompt: int) -> Question:
        """One whose caller says that it opens a prompt of so many blocks; 0: none, and nothing new is found.

        Raises MisuseError for what can be no number of blocks.
        """
        if not 0 <= prompt <= MAX_PROMPT_BLOCKS:
            raise MisuseError(f"prompt is {prompt!r}", f"0 to {MAX_PROMPT_BLOCKS} blocks, or None")
        question = cls(keys, prompt)
        question.found = 0 if prompt else len(keys)
        return question

    @property
    def asks(self) -> int:
        """Blocks of the prompt, as long as no answer to its first question has come; then 0."""
        return self._asks

    def known(self, at: int = 0) -> int:
        """How many of the keys from `at` on were counted as found; `at` counts from where the call began."""
        return max(0, self.found - self._base - at)

    def hear(self, at: int, stored: int) -> None:
        """An answer says that from `at` on so many blocks are stored."""
        self._asks = 0
        self.found = max(self.found, self._base + at + stored if stored else 0)

    def restart(self) -> None:
        """Positions count from the start of the prompt on."""
        self._base = 0

    def deliver(self, at: int, granted: int) -> None:
        """An answer grants so many blocks from `at` on."""
        self.at = self._base + at + granted

    def begin(self, keys: Sequence[Key], search: bool) -> bool:
        """Whether these keys are a part of the prompt; then positions count from their start on."""
        base = self.place(keys[0], search)
        end = base + len(keys)
        if base < 0 or end > len(self.keys) or self.keys[end - 1] != keys[-1]:
            return False
        if self.at and not base:
            return False  # whoever begins again asks for another prompt
        self._base = base
        return True

    def place(self, key: Key, search: bool) -> int:
        """Where a key is in the prompt, -1 if it is not; without `search` only where one is likely."""
        for place in (self.at, self.found):
            if place < len(self.keys) and self.keys[place] == key:
                return place
        if search:
            with contextlib.suppress(ValueError):
                return self.keys.index(key)
        return -1

    @property
    def is_polled(self) -> bool:
        """Whether the same keys asked now are the same prompt."""
        now = time.monotonic()
        return not self.at and now - self.asked_s <= POLL_S and now - self.began_s <= POLLED_S


class Prompts:
    """The prompts that one client has asked for lately and not finished with."""

    def __init__(self) -> None:
        # Changed by single operations only, so that threads need no lock: what gets lost is one count.
        self._open: list[Question] = []

    def looking(self, namespace: object, keys: Sequence[Key], prompt: int | None) -> Question:
        """The question that a look-up of these keys belongs to."""
        if prompt is not None:
            return Question.answered(keys, prompt)
        question = next(
            (q for q in self._mine(namespace, _asker()) if q.is_polled and _same(q.keys, keys)), None
        )
        if question is None:
            question = self._new(namespace, keys)
        question.asked_s, question.looked_up = time.monotonic(), True
        question.restart()
        return question

    def taking(self, namespace: object, keys: Sequence[Key], prompt: int | None) -> Question:
        """The question that an acquire of these keys belongs to."""
        if prompt is not None:
            return Question.answered(keys, prompt)
        if not keys:
            return Question(keys, 0)
        for question, search in self._likely(namespace):
            # One without a look-up before is a question too, and may be a poll.
            if (question.looked_up or question.at or question.is_polled) and question.begin(keys, search):
                question.asked_s = time.monotonic()
                return question
        return self._new(namespace, keys)

    def taken(self, question: Question) -> None:
        """An acquire has ended: the prompt is over if all that was found has been delivered."""
        if question.at and question.at >= question.found:
            self._close(question)

    def storing(self, namespace: object, keys: Sequence[Key]) -> None:
        """These keys are being stored: whoever asked for them has computed them."""
        if not keys or not self._open:
            return
        for question, search in self._likely(namespace):
            if question.place(keys[0], search) >= 0:
                self._close(question)
                return

    def _mine(self, namespace: object, asker: object) -> list[Question]:
        """A caller's open questions in a namespace, the latest first."""
        return [q for q in reversed(self._open) if q.asker == asker and q.namespace == namespace]

    def _likely(self, namespace: object) -> list[tuple[Question, bool]]:
        """Open questions that a request may belong to, the likeliest first; whether to search their keys."""
        asker = _asker()
        mine = self._mine(namespace, asker)
        others = [q for q in reversed(self._open) if q.asker != asker and q.namespace == namespace]
        return [*((q, False) for q in (*mine, *others)), *((q, True) for q in mine)]

    def _new(self, namespace: object, keys: Sequence[Key]) -> Question:
        question = Question(keys, len(keys), namespace)
        for same in [q for q in self._mine(namespace, question.asker) if _same(q.keys, keys)]:
            self._close(same)
        self._open.append(question)
        while len(self._open) > _OPEN or (
            len(self._open) > 1 and sum(len(q.keys) for q in self._open) > _OPEN_KEYS
        ):
            self._close(self._open[0])
        return question

    def _close(self, question: Question) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(question)


def _same(some: Sequence[Key], others: Sequence[Key]) -> bool:
    """Whether two chains are the same: keys of a chain depend on all keys before them."""
    if len(some) != len(others):
        return False
    return not some or (some[0] == others[0] and some[-1] == others[-1])


def _asker() -> object:
    """The running task or thread. A reference, since numbers of those that have ended are given again."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return weakref.ref(threading.current_thread() if task is None else task)
