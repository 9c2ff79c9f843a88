"""What requests and orchestrators say of the store: read as a whole, or refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvstore.errors import MisuseError
from kvstore_vllm.metrics import Recorder
from kvstore_vllm.options import (
    DEFAULT,
    LIFETIMES_S,
    MOST_S,
    OWN,
    WITHOUT,
    Advice,
    OptionReader,
    Options,
    Scope,
    advice_of,
    lifetime_s,
    parse,
)

TOKEN = "kvs_secret"


def test_requests_without_options_are_served_as_by_default() -> None:
    others = {"do_remote_prefill": True, "remote_block_ids": [1], "kv_hint": {}, "kvstore_": 1}
    assert parse(None) is parse({}) is parse(others) is DEFAULT
    assert parse(others | {"kvstore": {}}) == DEFAULT


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"token": TOKEN}, Options(Scope(TOKEN))),
        ({"ttl_s": 60}, Options(Scope(ttl_s=60.0))),
        ({"ttl_s": 59.9, "token": TOKEN}, Options(Scope(TOKEN, 30.0))),
        ({"store": False}, Options(stores=False)),
        ({"store": True}, DEFAULT),
        ({"pin_s": 0.5}, Options(advice=(Advice(pin_s=0.5),))),
        ({"priority": -1}, Options(advice=(Advice(priority=-1),))),
        ({"priority": 0}, Options(advice=(Advice(priority=0),))),
        ({"next_use_s": 0}, Options(advice=(Advice(next_use_s=0.0),))),
        ({"closed": True}, Options(advice=(Advice(closed=True),))),
        ({"closed": False}, DEFAULT),
        (
            {
                "token": TOKEN,
                "ttl_s": MOST_S,
                "store": False,
                "pin_s": MOST_S,
                "priority": 1,
                "next_use_s": 5,
            },
            Options(
                Scope(TOKEN, MOST_S),
                stores=False,
                advice=(Advice(pin_s=MOST_S, next_use_s=5.0, priority=1),),
            ),
        ),
    ],
)
def test_options_are_read(given: dict[str, Any], options: Options) -> None:
    assert parse({"kvstore": given}) == options


NO_NUMBERS = [None, True, "60", [60], {}, float("nan"), float("inf"), -1, -(10**400), 10**9999]
BAD: list[tuple[Any, str]] = [
    (None, "kvstore is of type NoneType.*an object with token, store"),
    ("token", "kvstore is of type str"),
    ([], "kvstore is of type list"),
    ({"tokens": TOKEN}, "unknown option 'tokens'.*did you mean token"),
    ({"zzz": 1}, "unknown option 'zzz'.*there are token, store, ttl_s, pin_s, priority"),
    ({7: 1}, "unknown option 7"),
    ({"x" * 1000: 1}, "unknown option 'xxx"),
    *[({"token": x}, "token is no token.*kvs_") for x in (None, "", 5, ["kvs_a"], "schlüssel", "x" * 5000)],
    *[({"store": x}, "store is .*true or false") for x in (None, 0, "false")],
    *[({"closed": x}, "closed is .*true or false") for x in (None, 1, "true")],
    *[({"ttl_s": x}, "ttl_s is .*from 1 to 30 days") for x in (*NO_NUMBERS, 0, 0.5, MOST_S + 1)],
    *[({"pin_s": x}, "pin_s is .*more than 0") for x in (*NO_NUMBERS, 0, 0.0, MOST_S + 1)],
    *[({"next_use_s": x}, "next_use_s is .*from 0") for x in (*NO_NUMBERS, MOST_S + 1)],
    *[({"priority": x}, "priority is .*-1, 0 or 1") for x in (None, True, "1", 2, -2, 0.5, 1.0, [])],
    ({"token": TOKEN, "store": False, "x": 1}, "unknown option 'x'"),
]


@pytest.mark.parametrize(("given", "why"), BAD)
def test_wrong_options_are_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(MisuseError, match=f"(?s){why}") as caught:
        parse({"kvstore": given})
    assert TOKEN not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_object_is_refused() -> None:
    with pytest.raises(MisuseError, match="kv_transfer_params is of type list"):
        parse(["kvstore"])


def test_a_lifetime_is_never_longer_than_asked_for() -> None:
    assert list(LIFETIMES_S) == sorted(set(LIFETIMES_S))
    for asked in (1, 1.9, 2, 59, 60, 61, 3600, 86399, 86400, MOST_S):
        assert asked / 2.5 < lifetime_s(asked) <= asked
    assert [lifetime_s(s) for s in LIFETIMES_S] == list(LIFETIMES_S)


def test_a_token_is_in_no_text_about_a_request() -> None:
    assert TOKEN not in repr(parse({"kvstore": {"token": TOKEN, "ttl_s": 60}}))


# -- hints of an orchestrator


def action(kind: str, payload: Any, version: str = "1.0") -> KvHintAction:
    return KvHintAction(action_id="a", action_type=kind, action_version=version, payload=payload)


def hints(*actions: KvHintAction) -> KvHintsEnvelope:
    return KvHintsEnvelope(protocol_version="1.0", message_id="m", actions=list(actions))


DEFERRED = {"execute_at": "request_completion", "include_current_request": True, "block_hashes": ["11"]}


@pytest.mark.parametrize(
    ("kind", "payload", "advice"),
    [
        ("kv.retain", {"priority": 3, "ttl_seconds": 2.5, **DEFERRED}, [Advice(pin_s=2.5)]),
        ("kv.retain", {"priority": 3, **DEFERRED}, [Advice(priority=1)]),
        ("kv.retain", {"priority": 2**63}, [Advice(priority=1)]),
        ("kv.evict", DEFERRED, [Advice(unpin=True, closed=True)]),
        ("kv.evict", {}, [Advice(unpin=True, closed=True)]),
        ("kv.retain", {"scope": "alice", "directives": []}, []),
        (
            "kv.retain",
            {
                "scope": None,
                "directives": [
                    {"start": 0, "end": 64, "priority": 80, "duration": 60.0},
                    {"start": 64, "end": None, "priority": 40},
                    {"covers_output": True, "priority": 0, "duration": 5},
                    {"priority": 1, "duration": 0},
                ],
            },
            [
                Advice(64, pin_s=60.0),
                Advice(priority=1),
                Advice(unpin=True, priority=0),
                Advice(unpin=True),
            ],
        ),
    ],
)
def test_known_actions_are_advice(kind: str, payload: dict[str, Any], advice: list[Advice]) -> None:
    assert advice_of(hints(action(kind, payload))) == (tuple(advice), [])
    assert advice_of(hints(action(kind, payload, "1.7"))) == (tuple(advice), [])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (action("kv.fetch", {"keys": [1]}), "action_type is 'kv.fetch'.*kv.retain, kv.evict"),
        (action("kv.retain", {"priority": 1}, "2.0"), "action_version is '2.0'"),
        (action("kv.retain", {"priority": 1}, ""), "action_version is ''"),
        (action("kv.retain", []), "payload is of type list"),
        (action("kv.retain", {}), "priority is None"),
        (action("kv.retain", {"ttl_seconds": 5}), "priority is None"),
        (action("kv.retain", {"priority": True, "ttl_seconds": 5}), "priority is True"),
        (action("kv.retain", {"priority": 1, "ttl_seconds": float("nan")}), "ttl_seconds is nan"),
        (action("kv.retain", {"priority": 1, "ttl_seconds": 10**9999}), "ttl_seconds is of type int"),
        (action("kv.retain", {"directives": {}}), "directives is no list"),
        (action("kv.retain", {"directives": ["all"]}), "a directive is no object"),
        (action("kv.retain", {"directives": [{"priority": -1}]}), "priority is -1"),
        (action("kv.retain", {"directives": [{"priority": 1, "duration": "1"}]}), "duration is '1'"),
        (action("kv.retain", {"directives": [{"priority": 1, "end": 0}]}), "end is 0"),
        (action("kv.retain", {"directives": [{"priority": 1, "end": 1.5}]}), "end is 1.5"),
        (action("kv.evict", {"include_current_request": False}), "does not include"),
    ],
)
def test_other_actions_are_ignored_one_by_one(wrong: KvHintAction, why: str) -> None:
    good = action("kv.retain", {"priority": 1, "ttl_seconds": 5})
    advice, [ignored] = advice_of(hints(wrong, good))
    assert advice == (Advice(pin_s=5.0),)
    assert re.search(why, ignored), ignored


def test_an_endless_envelope_costs_little() -> None:
    many = [{"priority": 1, "duration": 5}] * 10_000
    advice, [ignored] = advice_of(hints(action("kv.retain", {"directives": many})))
    assert len(advice) == 16
    assert "more than 16" in ignored


# -- the reader


def asked(params: Any = None, kv_hints: Any = None) -> Any:
    return SimpleNamespace(kv_transfer_params=params, kv_hints=kv_hints)


def test_what_is_not_followed_is_counted_and_logged_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    recorder = Recorder(clock=lambda: now[0])
    reader = OptionReader(recorder)
    for _ in range(5):
        assert reader.read(asked({"kvstore": {"tll_s": 60, "token": TOKEN}})) == WITHOUT
    # Another kind has lines of its own.
    served = reader.read(asked({"kvstore": {"store": False}}, hints(action("kv\n.x", {}))))
    assert served == Options(stores=False)
    now[0] = 61.0
    assert reader.read(asked({"kvstore": 5})) == WITHOUT
    # Not even an envelope: nothing is known of the request.
    assert reader.read(asked(None, "hints")) == WITHOUT
    counts = {"request_problems:bad_options": 7, "request_problems:ignored_hints": 1}
    assert (recorder.take(), recorder.take()) == (counts, {})
    lines = [record.getMessage() for record in caplog.records]
    since = [line.rpartition("(")[2] for line in lines]
    assert since == [f"{n} since the last such line)" for n in (1, 1, 5)]
    assert "did you mean ttl_s?" in lines[0]
    assert "\\n" in lines[1]
    assert "\n" not in lines[1]
    assert TOKEN not in caplog.text


def test_advice_of_the_request_and_of_the_orchestrator_are_both_followed() -> None:
    reader = OptionReader(Recorder())
    options = reader.read(asked({"kvstore": {"priority": 1}}, hints(action("kv.evict", {}))))
    assert options == Options(OWN, advice=(Advice(priority=1), Advice(unpin=True, closed=True)))
