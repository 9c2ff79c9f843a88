"""What a request says of the store: `kv_transfer_params` of its body, and `kv_hints` of an orchestrator.

A request that says something wrong is served without the store; it never fails. Hints that are unknown or
wrong are ignored. Both are counted, and logged at most once a minute. No log contains a token.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.errors import MisuseError
from kvstore_vllm.metrics import Recorder

KEY = "kvstore"
"""The key of the store's options in `kv_transfer_params`. Other keys are those of other connectors."""

_DAY_S = 86400
MOST_S = 30 * _DAY_S
"""The longest time that an option may name, in seconds."""

LIFETIMES_S = (
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200,
    _DAY_S, 2 * _DAY_S, 4 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S, MOST_S,
)  # fmt: skip
"""The lifetimes of blocks, in seconds. Each has namespaces of its own, so there are few of them."""

_MOST_ADVICE = 16
_MOST_TOKEN_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose blocks a request finds and stores: the tenant of `token` ("": the engine's), and their lifetime.

    `ttl_s`: one of `LIFETIMES_S`; 0: as configured.
    """

    token: str = field(default="", repr=False)
    ttl_s: float = 0.0


OWN = Scope()
"""The scope of requests that name none."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What will become of a request's stored blocks, from its end on. `Namespace.pin` and `hint` take it.

    `end`: the prefix that it is about, in tokens; None: prompt and answer.
    """

    end: int | None = None
    pin_s: float = 0.0
    unpin: bool = False
    next_use_s: float | None = None
    closed: bool = False
    priority: int | None = None

    @property
    def hints(self) -> bool:
        """Whether it says something beside pins."""
        return self.next_use_s is not None or self.closed or self.priority is not None


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says of the store. `loads`, `stores`: it may."""

    scope: Scope = OWN
    loads: bool = True
    stores: bool = True
    advice: tuple[Advice, ...] = ()


DEFAULT = Options()
WITHOUT = Options(loads=False, stores=False)
"""The options of a request that is served without the store."""


class OptionReader:
    """Reads the options of requests. Counts and logs what is not followed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def read(self, request: Any) -> Options:
        """Returns the options of vLLM's request. Raises nothing."""
        if request.kv_transfer_params is None and request.kv_hints is None:
            return DEFAULT
        try:
            options = parse(request.kv_transfer_params)
            advice, ignored = advice_of(request.kv_hints)
        except Exception as error:
            # Whatever it is, the request must not be served as the engine's tenant.
            self._recorder.problem("bad_options", f"a request is served without the store: {error}")
            return WITHOUT
        for each in ignored:
            self._recorder.problem("ignored_hints", f"a KV hint is ignored: {each}")
        return replace(options, advice=options.advice + advice) if advice else options


# -- options


def parse(params: Any) -> Options:
    """Returns the options in `kv_transfer_params`. Raises MisuseError for unknown names and wrong values."""
    if params is None:
        return DEFAULT
    if not isinstance(params, dict):
        raise MisuseError(f"kv_transfer_params is of type {type(params).__name__}", "an object")
    if KEY not in params:
        return DEFAULT
    given = params[KEY]
    if not isinstance(given, dict):
        raise MisuseError(
            f"kv_transfer_params.{KEY} is of type {type(given).__name__}",
            f"an object with {', '.join(_OPTIONS)}",
        )
    for name, value in given.items():
        if name not in _OPTIONS:
            near = difflib.get_close_matches(str(name)[:80], _OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_OPTIONS)}"
            raise MisuseError(f"kv_transfer_params.{KEY}: unknown option {_shown(name)}", hint)
        is_good, possible = _OPTIONS[name]
        if not is_good(value):
            # A token must not get into a log, nor may any text of unknown length.
            shown = "no token" if name == "token" else _shown(value)
            raise MisuseError(f"kv_transfer_params.{KEY}: {name} is {shown}", possible)
    scope = Scope(given.get("token", ""), lifetime_s(given["ttl_s"]) if "ttl_s" in given else 0.0)
    advice = Advice(
        pin_s=float(given.get("pin_s", 0.0)),
        next_use_s=float(given["next_use_s"]) if "next_use_s" in given else None,
        closed=given.get("closed", False),
        priority=given.get("priority"),
    )
    return Options(
        scope, stores=given.get("store", True), advice=(advice,) if advice.pin_s or advice.hints else ()
    )


def lifetime_s(ttl_s: float) -> float:
    """Returns the longest lifetime of `LIFETIMES_S` that is not longer than `ttl_s`, 1 s or more."""
    return float(LIFETIMES_S[bisect_right(LIFETIMES_S, ttl_s) - 1])


def _shown(value: object) -> str:
    """Returns a value for a message: short, whatever was sent."""
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # a number with thousands of digits
        return f"of type {type(value).__name__}"


def _is_number(value: object, least: float, most: float = MOST_S) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _is_time(value: object) -> bool:
    """Whether a value is more than 0 s and at most 30 days."""
    return value != 0 and _is_number(value, 0)


def _is_token(value: object) -> bool:
    # An empty token would be that of the engine's user.
    return isinstance(value, str) and value.isascii() and 0 < len(value) <= _MOST_TOKEN_CHARS


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_OPTIONS: dict[str, tuple[Callable[[object], bool], str]] = {
    "token": (_is_token, "`kvstore tenant token NAME` prints one: kvs_..."),
    "store": (_is_bool, "true or false"),
    "ttl_s": (lambda value: _is_number(value, 1), "seconds, from 1 to 30 days"),
    "pin_s": (_is_time, "seconds, more than 0 and at most 30 days"),
    "priority": (lambda value: isinstance(value, int) and _is_number(value, -1, 1), "-1, 0 or 1"),
    "next_use_s": (lambda value: _is_number(value, 0), "seconds, from 0 to 30 days"),
    "closed": (_is_bool, "true or false"),
}


# -- hints of an orchestrator


def advice_of(envelope: Any) -> tuple[tuple[Advice, ...], list[str]]:
    """Returns the advice in vLLM's KvHintsEnvelope, or None, and why other actions in it are ignored.

    Known are version 1 of `kv.retain`, in vLLM's form (directives about ranges of tokens) and in Dynamo's
    (one priority and TTL), and of `kv.evict`. They are about the blocks of the request that brings them:
    the block hashes of other requests that Dynamo adds do not name stored blocks.
    """
    advice: list[Advice] = []
    ignored: list[str] = []
    for action in envelope.actions if envelope is not None else ():
        try:
            advice += _ACTIONS[_known(action)](action.payload)
        except MisuseError as error:
            ignored.append(str(error))
    ignored += [f"more than {_MOST_ADVICE} directives of one request"] * (len(advice) > _MOST_ADVICE)
    return tuple(advice[:_MOST_ADVICE]), ignored


def _known(action: Any) -> str:
    """Returns the type of an action. Raises MisuseError if it is unknown, or of an unknown version."""
    name, version = action.action_type, action.action_version
    if name not in _ACTIONS:
        raise MisuseError(f"action_type is {_shown(name)}", f"there are {', '.join(_ACTIONS)}")
    if version.partition(".")[0] != "1":
        raise MisuseError(f"{name}: action_version is {_shown(version)}", "1.x")
    if not isinstance(action.payload, dict):
        raise MisuseError(f"{name}: payload is of type {type(action.payload).__name__}", "an object")
    return str(name)


def _retain(payload: dict[str, Any]) -> list[Advice]:
    directives = payload.get("directives")
    if directives is None:
        return [_retained(payload, "ttl_seconds")]
    if not isinstance(directives, list):
        raise MisuseError("kv.retain: directives is no list", "a list of objects")
    return [_retained(each, "duration") for each in directives[: _MOST_ADVICE + 1]]


def _retained(directive: Any, lifetime: str) -> Advice:
    """Returns the advice of one directive, whose key `lifetime` is the time to retain the blocks, in seconds.

    A prefix is of use as a whole only, so a directive is about everything before its `end`.
    """
    if not isinstance(directive, dict):
        raise MisuseError("kv.retain: a directive is no object", f"an object with priority, {lifetime}")
    priority, pin_s, end = directive.get("priority"), directive.get(lifetime), directive.get("end")
    if not (isinstance(priority, int) and _is_number(priority, 0, 2**64)):
        raise MisuseError(f"kv.retain: priority is {_shown(priority)}", "0 releases, others protect")
    if not (pin_s is None or _is_number(pin_s, 0)):
        raise MisuseError(f"kv.retain: {lifetime} is {_shown(pin_s)}", "seconds, from 0 to 30 days")
    if not (end is None or (isinstance(end, int) and _is_number(end, 1, 2**40))):
        raise MisuseError(f"kv.retain: end is {_shown(end)}", "a number of tokens, or null")
    if not priority:
        return Advice(end, unpin=True, priority=0)
    if pin_s is None:
        return Advice(end, priority=1)
    # Nothing is retained for 0 s.
    return Advice(end, pin_s=float(pin_s), unpin=not pin_s)


def _evict(payload: dict[str, Any]) -> list[Advice]:
    """The session is over: its blocks are evicted first."""
    if payload.get("include_current_request", True) is not True:
        raise MisuseError(
            "kv.evict: it does not include the current request", "blocks of others are not named"
        )
    return [Advice(unpin=True, closed=True)]


_ACTIONS: dict[str, Callable[[dict[str, Any]], list[Advice]]] = {"kv.retain": _retain, "kv.evict": _evict}
