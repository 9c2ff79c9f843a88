"""The one configuration: frozen, read from one TOML file, validated once.

Not covered: whether a folder exists or a socket can be bound. The daemon finds that out when it starts.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as by_default
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from kvstore.config.admin import Admin
from kvstore.config.patches import Values, difference, merged, read_changes
from kvstore.config.sections import (
    Daemon,
    Dram,
    Events,
    Hbm,
    Limits,
    Network,
    Nvme,
    Policy,
    Scrub,
    Section,
)
from kvstore.config.tenants import Encryption, Tenant, TenantName, check_apart, check_floors
from kvstore.errors import ConfigError, MisuseError

_SOME = "NAME"
"""Stands for a tenant's or device's name in keys."""

_EVERY_KEY = "`kvstore config example` shows every key"

_BY_NAME = ("tenants", "nvme.devices")


class Config(Section):
    """Everything that can be configured. Immutable; made by `load` or `parse`."""

    daemon: Daemon = Daemon()
    dram: Dram = Dram()
    nvme: Nvme = Nvme()
    hbm: Hbm = Hbm()
    network: Network = Network()
    events: Events = Events()
    policy: Policy = Policy()
    scrub: Scrub = Scrub()
    limits: Limits = Limits()
    encryption: Encryption = Encryption()
    admin: Admin = Admin()
    tenants: Annotated[dict[TenantName, Tenant], Field(max_length=4096)] = {}

    @model_validator(mode="after")
    def _tenants_fit(self) -> Config:
        check_apart(self.tenants)
        check_floors(self.tenants, "hbm", self.hbm.limit)
        check_floors(self.tenants, "dram", self.dram.limit)
        check_floors(self.tenants, "nvme", sum(self.nvme.limits.values()))
        return self


_CHANGEABLE = {
    "daemon.stop_timeout",
    "daemon.log_level",
    "dram.limit",
    "hbm.limit",
    "network.admission",
    "network.admission_threshold",
    "network.hedge_after",
    "network.timeout",
    "nvme.admission",
    "nvme.admission_threshold",
    "nvme.limit",
    "nvme.prefetch_blocks",
    "nvme.write_budget",
    "nvme.write_policy",
    "policy.eviction",
    "scrub.rate",
    "limits.connections",
    "limits.leases_per_connection",
    "limits.namespaces",
    "limits.namespaces_per_tenant",
    "limits.queued_requests",
    "admin.requests_per_s",
    "admin.tokens",
}
"""What a running daemon takes over when it reads its configuration again, besides all of its tenants."""

_CHANGEABLE_OF_DEVICES = ("limit", "write_budget")


def changes(old: Config, new: Config, admin: bool = False) -> tuple[list[str], list[str]]:
    """Which settings differ: those that can change at run time, as `key = value`, and those that cannot.

    What serves REST is another process: its own part counts if `admin`.
    """
    before, after = old.model_dump(), new.model_dump()
    changed = _come_and_gone("tenants", before, after)
    changed += _come_and_gone("nvme.devices", before["nvme"], after["nvme"])
    flat, will_be = _flat(before), _flat(after)
    differ = [key for key in will_be if will_be[key] != flat[key] and (admin or not key.startswith("admin."))]
    fixed = [key for key in differ if not _can_change(key)]
    changed += [_line(key, will_be[key]) for key in differ if key not in fixed]
    return changed, fixed


def _come_and_gone(key: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What has come by name to a table, and what has gone; leaves those in both that are in both."""
    name = key.rpartition(".")[2]
    before, after = old[name], new[name]
    changed = [f"{key}.{one} is new" for one in after if one not in before]
    changed += [f"{key}.{one} is gone" for one in before if one not in after]
    both = sorted(set(before) & set(after))
    old[name], new[name] = {one: before[one] for one in both}, {one: after[one] for one in both}
    return changed


def _can_change(key: str) -> bool:
    if key.startswith("nvme.devices."):
        return key.rpartition(".")[2] in _CHANGEABLE_OF_DEVICES
    return key in _CHANGEABLE or key.startswith("tenants.")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _line(key: str, value: Any) -> str:
    return f"{key}: {len(value)}" if key.endswith(".tokens") else f"{key} = {value}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration is from: what its file has, and changes since (a merge patch), kept in a file."""

    name: str = "config"
    values: Values = by_default(default_factory=dict)
    changes: Values = by_default(default_factory=dict)
    kept_in: Path | None = None

    @property
    def effective(self) -> Values:
        """What holds."""
        return merged(self.values, self.changes)

    @property
    def file_policy(self) -> str:
        """The eviction policy that the file names; "" if it names none."""
        return str(self.values.get("policy", {}).get("eviction", ""))

    def changed(self, effective: Values) -> Source:
        """The same file with such changes that this is what holds."""
        return replace(self, changes=difference(self.values, effective))

    def config(self) -> Config:
        """What holds, as a configuration. Raises ConfigError for what can't be."""
        try:
            return Config.model_validate(self.effective)
        except ValidationError as e:
            # What is missing may have been misspelt, and then that is what to say.
            error = min(e.errors(), key=lambda error: error["type"] == "missing")
            name = f"{self.name} with {self.kept_in or 'its changes'}" if self.changes else self.name
            raise _explain(name, error) from None
        except RecursionError:
            raise ConfigError(f"{self.name} is nested too deeply", _EVERY_KEY) from None


def parse(text: str, source: str = "config") -> Config:
    """The configuration written in `text` (TOML). Raises ConfigError that starts with `source`."""
    return _source(text, source).config()


def _source(text: str, name: str) -> Source:
    try:
        return Source(name, tomllib.loads(text))
    except ValueError as e:  # TOML that can't be parsed, or a number of too many digits
        raise ConfigError(f"{name} is not TOML: {e}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply", _EVERY_KEY) from None


def load(path: Path | None) -> Config:
    """The configuration in the file at `path`, with the changes that are kept beside it; see read."""
    return read(path).config()


def read(path: Path | None) -> Source:
    """What the file at `path` has, and its changes; without one, nothing but defaults. Raises ConfigError.

    Not whether that makes a configuration: see Source.config.
    """
    if path is None:
        return Source()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not TOML: byte {e.start} is not UTF-8") from None
    except OSError as e:
        hint = "`kvstore config example` prints one to start from" if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path}: {e.strerror}", hint) from None
    source = _source(text, str(path))
    kept_in = source.config().daemon.changes
    return source if kept_in is None else replace(source, changes=read_changes(kept_in), kept_in=kept_in)


def _known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner, key = _model_in(field.annotation), prefix + name
        yield key
        if inner is not None:
            yield from _known_keys(inner, f"{key}.{_SOME}." if key in _BY_NAME else f"{key}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, by itself, in a list or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def _explain(source: str, error: Mapping[str, Any]) -> ConfigError:
    place, kind = [part for part in error["loc"] if part != "[key]"], error["type"]
    key, value = ".".join(map(_bare, place)), error["input"]
    named = f"{source}: {key}" if key else source
    if kind == "extra_forbidden":
        return ConfigError(f"{source}: unknown key {key:.120} = {_show(key, value)}", _nearest(place))
    if kind == "missing":
        return ConfigError(f"{named} is missing", _EVERY_KEY)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        table = f"{key}.{_SOME}" if kind == "dict_type" else key
        return ConfigError(f"{named} is {_show(key, value)}", f"a table, written as [{table}]")
    cause: Any = error.get("ctx", {}).get("error")
    if isinstance(cause, MisuseError):
        return ConfigError(f"{named}: {cause.message}", cause.hint)
    return ConfigError(f"{named} is {_show(key, value)}", error["msg"].replace("Input", "it"))


def _bare(part: object) -> str:
    """A part of a key as TOML writes it: what is not plain is quoted."""
    return str(part) if re.fullmatch(r"[\w-]+", str(part), re.ASCII) else f"{str(part)!r:.80}"


def _nearest(place: list[Any]) -> str:
    parts = [part for part in place if not isinstance(part, int)]
    called = _SOME
    for table in (named.split(".") for named in _BY_NAME):
        at = len(table)
        if parts[:at] == table and len(parts) > at:
            called, parts = str(parts[at]), [*table, _SOME, *parts[at + 1 :]]
    key = ".".join(map(str, parts))
    parent, _, name = key.rpartition(".")
    known = {dotted: dotted.rpartition(".")[2] for dotted in _known_keys()}
    near = [dotted for dotted, leaf in known.items() if leaf == name and "." in dotted]
    near.sort(key=lambda dotted: not dotted.startswith(f"{parent}."))
    siblings = {leaf: dotted for dotted, leaf in known.items() if dotted.rpartition(".")[0] == parent}
    near = near or [siblings[leaf] for leaf in difflib.get_close_matches(name, siblings, 1, 0.7)]
    leaves = difflib.get_close_matches(name, known.values(), 1, 0.7)
    near = near or [dotted for dotted, leaf in known.items() if leaf in leaves]
    near.sort(key=lambda dotted: not dotted.startswith(f"{parts[0]}."))
    if not near:
        return _EVERY_KEY
    return f"did you mean {near[0].replace(_SOME, _bare(called))}?"


def _show(key: str, value: object) -> str:
    if key == "daemon.socket_mode" and type(value) is int:
        return f"{value:#o}"
    try:
        shown = repr(value)
    except RecursionError:
        return "nested too deeply"
    # A token that was put in the wrong place must not end up in a log.
    return f"{re.sub(r'kvs_[A-Za-z0-9_-]*', 'kvs_...', shown):.80}"
