"""Measures traced requests on the event loop, without OpenTelemetry.

A request is divided into phases, one after another: each `mark` ends one. Their sum is the request's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.types import SLOT_RECORD, Tier
from kvstore.wire import messages as m

MOST_OPEN = 256
"""The most traced requests of one connection without an answer. Further ones are not traced."""

TRACE_BYTES, SPAN_BYTES = 16, 8
"""Lengths of the ids of traces and spans, as in W3C Trace Context."""

PLACEMENT = "placement"
_WAITS = {m.Acquire: "copies", m.Reserve: "room"}
"""What a request waits for whose answer comes after its run, unless a mark says more."""
_OTHER = "completion"

_RESERVED = ("granted", "present", "pending", "denied")
_WHY_CHARS = 200


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request of a tenant. `arrived` is Unix time in s, other times are of `stopwatch`.

    `phases`: name, start, end. `last`: the name of the phase that the answer ends.
    """

    name: str
    tenant: str
    context: m.TraceContext
    arrived: float
    began_s: float
    stopwatch: Callable[[], float]
    attributes: dict[str, Any]
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    last: str = PLACEMENT
    ended_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.ended_s = self.began_s

    def mark(self, phase: str) -> None:
        """Ends a phase, which began with the end of the one before."""
        now = self.stopwatch()
        self.phases.append((phase, self.ended_s, now))
        self.ended_s = now


class ConnectionTraces:
    """The traced requests of one connection. `tenant`: the name of its tenant."""

    def __init__(
        self,
        put: Callable[[RequestTrace], None],
        clock: Callable[[], float],
        stopwatch: Callable[[], float],
    ) -> None:
        """`put` takes answered traces. `clock` returns Unix time in s.

        `stopwatch` returns s and advances while a request runs.
        """
        self.tenant = ""
        self._put = put
        self._clock = clock
        self._stopwatch = stopwatch
        self._next: m.TraceContext | None = None
        self._open: dict[int, RequestTrace] = {}

    def note(self, context: m.TraceContext) -> None:
        """Keeps the context of the next request, None if it is malformed or not sampled."""
        self._next = context if _is_sampled(context) else None

    def of(self, request: int) -> RequestTrace | None:
        """Returns the trace of an unanswered request, None if it is not traced."""
        return self._open.get(request)

    def begin(self, message: Any, waited_s: float) -> None:
        """Begins the trace of a request that was read `waited_s` seconds ago, if it has a context."""
        context, self._next = self._next, None
        if context is None or context.request != message.id or len(self._open) >= MOST_OPEN:
            return
        now, name = self._stopwatch(), type(message).__name__.lower()
        attributes: dict[str, Any] = {}
        if hasattr(message, "key_bytes"):
            attributes["kvstore.keys"] = len(message.keys) // message.key_bytes
        arrived, began_s = self._clock() - waited_s, now - waited_s
        trace = RequestTrace(name, self.tenant, context, arrived, began_s, self._stopwatch, attributes)
        if waited_s:
            trace.mark("queue")
        self._open[message.id] = trace

    def ran(self, message: Any) -> None:
        """Ends the phase in which a request ran, if it is not answered yet."""
        trace = self._open.get(getattr(message, "id", 0))
        if trace is not None:
            trace.mark(PLACEMENT)
            trace.last = _WAITS.get(type(message), _OTHER)

    def answered(self, answer: Any) -> RequestTrace | None:
        """Ends the trace of the request that is answered, and returns it. None: it is not traced."""
        trace = self._open.pop(answer.id, None)
        if trace is not None:
            trace.mark(trace.last)
            trace.attributes |= attributes_of(answer)
            self._put(trace)
        return trace


def _is_sampled(context: m.TraceContext) -> bool:
    ids = len(context.trace) == TRACE_BYTES and len(context.span) == SPAN_BYTES
    return (
        ids and any(context.trace) and any(context.span) and context.flags <= 0xFF and bool(context.flags & 1)
    )


def attributes_of(answer: Any) -> dict[str, Any]:
    """Returns the attributes that tell an answer."""
    match answer:
        case m.Granted():
            slots = np.frombuffer(answer.slots, SLOT_RECORD)
            tiers = np.bincount(slots["tier"], minlength=len(Tier)).tolist()
            by_tier = {f"kvstore.blocks.{tier.name.lower()}": tiers[tier] for tier in Tier if tiers[tier]}
            return {**_found(len(slots)), "kvstore.stored": answer.stored, **by_tier}
        case m.Found():
            return {**_found(answer.value), "kvstore.stored": answer.stored}
        case m.Presence():
            return _found(sum(answer.mask))
        case m.Reserved():
            counts = {f"kvstore.{name}": answer.status.count(n) for n, name in enumerate(_RESERVED)}
            told = {"kvstore.why": answer.why[:_WHY_CHARS]} if answer.why else {}
            return {**counts, **told, "kvstore.outcome": "refused" if counts["kvstore.denied"] else "granted"}
        case m.Value():
            return {"kvstore.value": answer.value}
        case m.Denied() | m.Busy():
            return {"kvstore.outcome": "refused", "kvstore.why": answer.why[:_WHY_CHARS]}
    return {}


def _found(blocks: int) -> dict[str, Any]:
    return {"kvstore.blocks": blocks, "kvstore.outcome": "hit" if blocks else "miss"}
