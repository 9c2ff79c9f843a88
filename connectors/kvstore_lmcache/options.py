"""The options of the adapter: `adapter_params` in LMCache's `--l2-adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore import parse_options
from kvstore.errors import ConfigError

_WHERE = "adapter_params"
_MOST_WORKERS = 64


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The parsed options.

    `revision` names the weights of the models. `deadline_s` bounds every lookup, store and load.
    `num_workers` threads load, and as many store. A large load is copied by as many in addition.
    """

    url: str = ""
    deadline_s: float = 5.0
    num_workers: int = 4
    revision: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AdapterOptions:
        """Parses `adapter_params`. Raises ConfigError."""
        options = parse_options(cls, given, _WHERE)
        if not 1 <= options.num_workers <= _MOST_WORKERS:
            hint = f"a whole number from 1 to {_MOST_WORKERS}"
            raise ConfigError(f"{_WHERE}: num_workers is {options.num_workers}", hint)
        if not options.revision:
            # Other weights under the same name of a model would load KV of the old ones.
            raise ConfigError(
                f"{_WHERE}: nothing names the weights: LMCache knows the name of a model alone",
                "set revision, for example to the commit on the hub, and change it with the weights",
            )
        return options
