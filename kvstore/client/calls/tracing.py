"""Spans of calls, for callers that trace with OpenTelemetry.

A call within a sampled span gets a child span, and the daemon is told its context. Nothing of OpenTelemetry
is imported before the caller has a span: without one, a call costs a look into `sys.modules`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from kvstore.client.calls.call import OPENTELEMETRY, Exchange, Flow, MadeBy
from kvstore.client.estimates import StoredPrefix
from kvstore.client.leases import Lease, PutResult, Reservation

R = TypeVar("R")

_WHY_CHARS = 200


@contextmanager
def trace_parent(headers: Mapping[str, str] | None) -> Iterator[None]:
    """Makes the span that these headers name (W3C `traceparent`) the parent of calls in the `with` block.

    Has no effect without headers, or without OpenTelemetry. Applies to the current thread or task.
    """
    token = None
    if headers:
        with suppress(Exception):  # headers come from strangers
            from opentelemetry import context, propagate  # noqa: PLC0415 - optional

            token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


def traced(exchange: Exchange, flow: Flow[R], made_by: MadeBy) -> Flow[R]:
    """Returns the flow of a call. Within a sampled span, it makes a child span and names it in requests.

    Never raises: a failure of the caller's tracing must not fail a call.
    """
    context = sys.modules.get(OPENTELEMETRY)
    if context is None:
        return flow
    try:
        # An empty context, as outside of all spans, is false.
        if not context.get_current():
            return flow
        span = _start(*made_by)
        if span is None:
            return flow
        exchange.context = _wire_context(span)
    except Exception:
        return flow
    return _followed(exchange, flow, span)


def _start(name: str, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Starts the child of the current span; returns None if that is not sampled."""
    from opentelemetry import trace  # noqa: PLC0415 - optional, and imported already

    parent = trace.get_current_span().get_span_context()
    if not (parent.is_valid and parent.trace_flags.sampled):
        return None
    attributes: dict[str, Any] = {}
    if (layout := getattr(caller, "layout", None)) is not None:
        attributes["kvstore.model"] = layout.model
        asked = inspect.signature(getattr(caller, name)).bind(*args, **kwargs).arguments
        if "keys" in asked:
            attributes["kvstore.keys"] = len(asked["keys"])
    tracer = trace.get_tracer("kvstore")
    return tracer.start_span(f"kvstore.{name}", kind=trace.SpanKind.CLIENT, attributes=attributes)


def _wire_context(span: Any) -> tuple[bytes, bytes, int] | None:
    """Returns trace id, span id and flags for the daemon; None if the span is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return (
        context.trace_id.to_bytes(16, "big"),
        context.span_id.to_bytes(8, "big"),
        context.trace_flags & 0xFF,
    )


def _followed(exchange: Exchange, flow: Flow[R], span: Any) -> Flow[R]:
    """Runs a flow. Ends its span with the outcome."""
    outcome = {"kvstore.outcome": "failed"}
    try:
        result = yield from flow
        outcome = outcome_of(result, exchange.failure)
        return result
    except Exception as error:
        # The text of another error could have an argument of the call.
        outcome = outcome_of(None, exchange.failure or ("failed", type(error).__name__))
        raise
    finally:
        with suppress(Exception):
            span.set_attributes(outcome)
            span.end()


def outcome_of(result: Any, failure: tuple[str, str] | None) -> dict[str, Any]:
    """Returns the attributes of a span that tell the result of a call. See `Exchange.failure`."""
    if failure is not None:
        outcome, why = failure
        return {"kvstore.outcome": outcome, "kvstore.why": why[:_WHY_CHARS]}
    if isinstance(result, Reservation):
        # What is granted is neither stored nor denied yet.
        return {"kvstore.granted": len(result)} | _put(result.result)
    if isinstance(result, PutResult):
        return _put(result)
    if isinstance(result, list) and result and all(isinstance(each, PutResult) for each in result):
        why = next((each.why for each in result if each.why), "")
        stored, present = sum(each.stored for each in result), sum(each.present for each in result)
        return _put(PutResult(stored, present, sum(each.denied for each in result), why))
    blocks = _blocks(result)
    if blocks is None:
        return {}
    return {"kvstore.blocks": blocks, "kvstore.outcome": "hit" if blocks else "miss"}


def _put(result: PutResult) -> dict[str, Any]:
    told = {
        "kvstore.stored": result.stored,
        "kvstore.present": result.present,
        "kvstore.denied": result.denied,
        "kvstore.outcome": "refused" if result.denied else "stored",
    }
    return told | ({"kvstore.why": result.why[:_WHY_CHARS]} if result.why else {})


def _blocks(result: Any) -> int | None:
    """Returns the blocks that a read has found; None for a result of another kind."""
    if isinstance(result, Lease):
        return len(result)
    if type(result) is int:
        return result
    if isinstance(result, np.ndarray):
        return int(np.count_nonzero(result))
    if isinstance(result, tuple) and result and isinstance(result[0], list):
        return sum(each.blocks for each in result[0] if isinstance(each, StoredPrefix))
    return None
