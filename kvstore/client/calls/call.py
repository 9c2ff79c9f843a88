"""`call` turns one method into a method of the blocking client and one of the asyncio client.

A method marked with `call` checks its arguments and returns a `Call`: the flow that makes the call, its
deadline and its miss. `Blocking` and `Awaiting` replace these methods in their subclasses by methods that
perform the call and return its result, or a coroutine of it.

Type checkers see a descriptor: ParamSpec carries the parameters of the method, and the overloads of `__get__`
choose between the result and a coroutine by the class of the object. No second list of signatures exists, and
no generated file. `help()` and `inspect` see plain functions.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from kvstore.client.connection import BaseConnection
from kvstore.client.protocol import ProtocolState

P = ParamSpec("P")
R = TypeVar("R")

Flow = Generator[Any, Any, R]
"""The steps of a call: request messages, `Pipeline`, `Work`, `Connect`. The result of each is sent back in.

Exceptions of a step are raised in the flow. The flow returns the result of the call.
"""


MadeBy = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""The name of a method, its object and its arguments."""

OPENTELEMETRY = "opentelemetry.context"
"""A process that makes spans has imported this module."""


class Step:
    """Base of steps other than request messages."""

    __slots__ = ()


@dataclass(slots=True)
class Work(Step):
    """Runs `call`, which copies bytes and may take long: outside the event loop if there is one."""

    call: Callable[[], Any]


@dataclass(slots=True)
class Pipeline(Step):
    """Sends requests before any of them is answered; the result is the list of their answers."""

    messages: Sequence[Any]


@dataclass(slots=True)
class Connect(Step):
    """Opens a connection to the daemon; the result is the connection."""


class Exchange:
    """A running call: its connection and its deadline, in monotonic seconds.

    A reservation needs the connection of its call again and sets `kept`: no other call gets the connection
    until `resume` has driven one more flow on it, or `finish` is called.

    `context`: trace id, span id and flags of the call's span, for the daemon; None: it is not traced.
    `failure`: outcome and reason behind a miss, not the exception: that would keep the arguments of the call.
    """

    __slots__ = (
        "_give_back",
        "_resume",
        "connection",
        "context",
        "ends_s",
        "failure",
        "kept",
        "protocol",
    )

    def __init__(
        self,
        ends_s: float,
        resume: Callable[[Exchange, Flow[Any], Any], Any],
        give_back: Callable[[BaseConnection], None],
    ) -> None:
        self.connection: BaseConnection
        self.protocol: ProtocolState
        self.ends_s = ends_s
        self.kept = False
        self.context: tuple[bytes, bytes, int] | None = None
        self.failure: tuple[str, str] | None = None
        self._resume = resume
        self._give_back = give_back

    def use(self, connection: BaseConnection) -> None:
        """Sets the connection of the call."""
        self.connection, self.protocol = connection, connection.protocol
        self.protocol.context = self.context

    def left_s(self) -> float:
        """Returns the seconds that the daemon may take: the time left, less a margin for the answer."""
        return max(0.0, (self.ends_s - time.monotonic()) * 0.9 - 0.002)

    def post(self, message: Any) -> None:
        """Sends a message without an answer. Never waits."""
        self.connection.post(message)

    def resume(self, flow: Flow[R], lost: R) -> Any:
        """Drives a later flow of this call; returns its result, or an awaitable of it.

        `lost` is the result if the connection or the daemon fails.
        """
        return self._resume(self, flow, lost)

    def finish(self) -> None:
        """Returns a kept connection to the client."""
        if self.kept:
            self.kept = False
            self._give_back(self.connection)


@dataclass(slots=True)
class Call(Generic[R]):
    """One call. `flow` makes it on a connection; `miss` returns the result if the daemon is away or refuses.

    Without `miss` the failure is raised. `deadline_s` None: the deadline of the client. `made_by` is for
    the span of the call; None if OpenTelemetry is not imported.
    """

    flow: Callable[[Exchange], Flow[R]]
    deadline_s: float | None = None
    miss: Callable[[], R] | None = None
    made_by: MadeBy | None = None


class Blocking:
    """Base of classes with blocking calls. `_perform` makes a call and returns its result."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _bind_calls(cls, call.blocking)


class Awaiting:
    """Base of classes with awaited calls. `_perform` makes a call and returns a coroutine of its result."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _bind_calls(cls, call.awaiting)


class call(Generic[P, R]):
    """Marks a method that returns a `Call` as a call of both clients."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Call[R]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> call[P, R]: ...
    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Awaiting, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, instance: object, owner: type) -> Any:
        """Returns the descriptor. For type checkers: `Blocking` and `Awaiting` replace it by a method."""
        return self

    def blocking(self) -> Callable[..., R]:
        """Returns the method of a blocking client."""
        describe, name = self._describe, self._describe.__name__

        @wraps(describe)
        def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            call = describe(self, *args, **kwargs)
            if OPENTELEMETRY in sys.modules:
                call.made_by = name, self, args, kwargs
            result: R = self._perform(call)
            return result

        self._sign(method)
        return method

    def awaiting(self) -> Callable[..., Coroutine[Any, Any, R]]:
        """Returns the method of an asyncio client. It checks its arguments when it is awaited."""
        describe, name = self._describe, self._describe.__name__

        @wraps(describe)
        async def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            call = describe(self, *args, **kwargs)
            if OPENTELEMETRY in sys.modules:
                call.made_by = name, self, args, kwargs
            result: R = await self._perform(call)
            return result

        self._sign(method)
        return method

    def _sign(self, method: Any) -> None:
        """Replaces the annotation Call[X] by X, for `help()` and `inspect`."""
        signature = inspect.signature(self._describe)
        result = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
        method.__annotations__ = {**self._describe.__annotations__, "return": result}
        method.__signature__ = signature.replace(return_annotation=result)


def _bind_calls(cls: type, method_of: Callable[[call[Any, Any]], Any]) -> None:
    """Replaces the calls that a class inherits by methods."""
    named = {name: each for base in reversed(cls.__mro__) for name, each in vars(base).items()}
    for name, each in named.items():
        if isinstance(each, call):
            setattr(cls, name, method_of(each))


def returns(value: R) -> Flow[R]:
    """Returns a flow without steps."""
    return value
    yield


def side_by_side(flows: Sequence[Flow[Any]]) -> Flow[list[Any]]:
    """Runs flows of requests; returns their results. Each round trip has the next request of every flow."""
    results: list[Any] = [None] * len(flows)
    replies: dict[int, Any] = dict.fromkeys(range(len(flows)))
    while replies:
        steps = dict[int, Any]()
        for number, reply in replies.items():
            try:
                steps[number] = flows[number].send(reply)
            except StopIteration as end:
                results[number] = end.value
        several = [step.messages if isinstance(step, Pipeline) else [step] for step in steps.values()]
        answers = iter((yield Pipeline([each for some in several for each in some])) if steps else ())
        replies = {
            number: [next(answers) for _ in step.messages] if isinstance(step, Pipeline) else next(answers)
            for number, step in steps.items()
        }
    return results
