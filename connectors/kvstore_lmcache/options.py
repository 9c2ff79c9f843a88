"""The options of the adapter: `adapter_params` in LMCache's `--l2-adapter`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.errors import ConfigError

_WHERE = "adapter_params"
_LONGEST_S = 86400


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The parsed options.

    `deadline_s` bounds every lookup, store and load. `num_workers` threads load, and as many store.
    `revision` names the weights: of all models, or by the name of a model. A model in a local folder is named
    by the content of its files where it is left out.
    """

    url: str = ""
    deadline_s: float = 5.0
    num_workers: int = 4
    revision: str | dict[str, str] = field(default="")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AdapterOptions:
        """Parses `adapter_params`. Raises ConfigError."""
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{_WHERE}: unknown key {name!r}", hint)
            wrong, hint = _CHECKS[name]
            if wrong(value):
                raise ConfigError(f"{_WHERE}: {name} is {value!r:.200}", hint)
        return cls(**given)

    def revision_of(self, model: str) -> str:
        """Returns the given name of a model's weights; empty: none is given."""
        return self.revision if isinstance(self.revision, str) else self.revision.get(model, "")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for pair in value.items() for each in pair)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "url": (lambda v: not isinstance(v, str), "an address such as unix:///run/kvstore/kvstore.sock"),
    "deadline_s": (lambda v: not (_is_number(v) and 0 < v < _LONGEST_S), "seconds, more than 0"),
    "num_workers": (lambda v: not (type(v) is int and 1 <= v <= 64), "a whole number from 1 to 64"),
    "revision": (
        lambda v: not (isinstance(v, str) or _is_names(v)),
        "a string, or strings by the name of the model",
    ),
}
