"""The registry of operator commands: a method with the `command` decorator becomes a command of its name.

Each command is in the file of its noun. Arguments and results are plain values. A command that changes
something returns a function that sends the request. The operator gets the answer when the core has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError, validate_call

from kvstore.core import actions as ac
from kvstore.daemon.runtime.ports import Requester
from kvstore.errors import KVStoreError, MisuseError
from kvstore.wire import messages as m

_log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Items on one page. A longer page would delay other requests."""

Later = Callable[[Requester, int], None]
"""Sends a request to the core. The requester gets the answer, with its request number."""

Result = dict[str, Any] | Later | Coroutine[Any, Any, dict[str, Any]]

_strict = cache(validate_call(config={"strict": True}))
"""Returns the method with a check of its arguments, which takes a millisecond to make: once a process."""

_F = TypeVar("_F", bound=Callable[..., Result])


def command(call: _F) -> _F:
    """Makes a method an operator command."""
    call._is_command = True  # type: ignore[attr-defined]
    return call


def check_limit(limit: int) -> None:
    """Raises MisuseError unless a page has 1 to `MOST_AT_ONCE` items."""
    if not 1 <= limit <= MOST_AT_ONCE:
        raise MisuseError(f"limit is {limit}", f"1 to {MOST_AT_ONCE}")


class Operator(Requester, Protocol):
    """An operator's connection."""

    def send(self, message: Any, /) -> None:
        """Sends an answer."""


class Commands:
    """The commands of one daemon, by name."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *nouns: object) -> None:
        """`nouns` are objects with commands."""
        self._loop = loop
        self._calls: dict[str, Callable[..., Result]] = {
            name: partial(_strict(call), noun)
            for noun in nouns
            for name, call in vars(type(noun)).items()
            if getattr(call, "_is_command", False)
        }
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self, operator: Operator, request: int, call: str, arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Runs a command. Returns its result, or None if `operator` gets the answer later.

        Raises MisuseError for an unknown command and for arguments that it does not take.
        """
        known = self._calls.get(call)
        if known is None:
            raise MisuseError(f"there is no call {call!r:.80}", f"there are {', '.join(self._calls)}")
        unnamed = next((name for name in arguments if not isinstance(name, str)), None)
        if unnamed is not None:
            raise MisuseError(f"{call}: {unnamed!r:.80} names no argument", "names are strings")
        try:
            result = known(**arguments)
        except ValidationError as error:
            raise MisuseError(_misfit(call, error)) from None
        if isinstance(result, dict):
            return result
        if isinstance(result, Coroutine):
            task = self._loop.create_task(_answer(operator, request, call, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            result(operator, request)
        return None


async def _answer(
    operator: Operator, request: int, call: str, result: Coroutine[Any, Any, dict[str, Any]]
) -> None:
    try:
        answer = await result
    except ValidationError as error:
        # Arguments of a coroutine are validated when it runs.
        operator.answer(request, ac.Deny(request, _misfit(call, error), ""))
    except KVStoreError as error:
        operator.answer(request, ac.Deny(request, error.message, error.hint))
    except Exception:
        _log.exception("an operator command failed")
        operator.answer(request, ac.Deny(request, "internal error", "see the daemon's log"))
    else:
        operator.send(m.Report(request, answer))


def _misfit(call: str, error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{call}: {'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
