"""Options of a connector, as the configuration of its engine gives them: a dictionary to a dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvstore.errors import ConfigError

_T = TypeVar("_T")
_LONGEST_S = 86400


def parse_options(cls: type[_T], given: Mapping[str, Any], where: str) -> _T:
    """Returns the dataclass `cls` with the options of the dictionary that is called `where`.

    An option has the type of its default, which every field has; a whole number is a float, too. Those whose
    names end with `deadline_s` are seconds above 0. A field with `repr=False` is a secret, and not shown.
    Raises ConfigError for an unknown name or a wrong value.
    """
    known: dict[str, Any] = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {name!r}", hint)
        kind = type(known[name].default)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            shown = repr(value) if known[name].repr else f"of type {type(value).__name__}"
            raise ConfigError(f"{where}: {name} is {shown}", f"a {kind.__name__}")
        if name.endswith("deadline_s") and not 0 < value < _LONGEST_S:
            raise ConfigError(f"{where}: {name} is {value}", "seconds, more than 0")
    return cls(**given)
