from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore import parse_options
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class Options:
    url: str = ""
    secret: str = field(default="", repr=False)
    deadline_s: float = 1.0
    workers: int = 4


def test_options_have_the_types_of_their_defaults() -> None:
    given = {"url": "unix:///s", "deadline_s": 2, "secret": "s"}
    assert parse_options(Options, given, "extra") == Options("unix:///s", "s", 2)
    assert parse_options(Options, {}, "extra") == Options()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uri": ""}, "extra: unknown key 'uri' (did you mean url?)"),
        ({"x": ""}, "extra: unknown key 'x' (there are url, secret, deadline_s, workers)"),
        ({1: ""}, "extra: unknown key 1"),
        ({"url": 1}, "extra: url is 1 (a str)"),
        ({"url": None}, "extra: url is None (a str)"),
        ({"workers": 1.5}, "extra: workers is 1.5 (a int)"),
        ({"workers": True}, "extra: workers is True (a int)"),
        ({"deadline_s": "1"}, "extra: deadline_s is '1' (a float)"),
        ({"deadline_s": 0}, "extra: deadline_s is 0 (seconds, more than 0)"),
        ({"deadline_s": float("nan")}, "extra: deadline_s is nan"),
        ({"deadline_s": float("inf")}, "extra: deadline_s is inf"),
    ],
)
def test_a_wrong_option_is_named(given: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options(Options, given, "extra")
    assert message in str(raised.value)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="secret is of type list") as raised:
        parse_options(Options, {"secret": ["hidden"]}, "extra")
    assert "hidden" not in str(raised.value)
