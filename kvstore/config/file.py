"""Reads the configuration from one TOML file, validates it once, and explains errors by key.

Not covered: whether folders exist or sockets can be bound. The daemon checks these when it starts.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as by_default
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from kvstore.config.admin import Admin
from kvstore.config.patches import Values, difference, merged, read_changes
from kvstore.config.sections import (
    LIVE,
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
    Tracing,
    section_in,
)
from kvstore.config.tenants import Encryption, Tenant, TenantName, check_apart, check_floors
from kvstore.errors import ConfigError, MisuseError
from kvstore.types import Tier

_NAME = "NAME"
"""Stands for the name of a tenant or device in keys."""

_EVERY_KEY = "`kvstore config example` shows every key"

_BY_NAME = ("tenants", "nvme.devices")
"""Tables with names as keys."""

_ALIKE = 0.7
"""Least similarity (0 to 1) of a known key that is suggested for an unknown one."""


class Config(Section):
    """All sections. Immutable; made by `load`, `parse` or `Source.config`."""

    daemon: Daemon = Field(default_factory=Daemon)
    dram: Dram = Field(default_factory=Dram)
    nvme: Nvme = Field(default_factory=Nvme)
    hbm: Hbm = Field(default_factory=Hbm)
    network: Network = Field(default_factory=Network)
    events: Events = Field(default_factory=Events)
    tracing: Tracing = Field(default_factory=Tracing)
    policy: Policy = Field(default_factory=Policy)
    scrub: Scrub = Field(default_factory=Scrub)
    limits: Limits = Field(default_factory=Limits)
    encryption: Encryption = Field(default_factory=Encryption)
    admin: Admin = Field(default_factory=Admin)
    tenants: Annotated[dict[TenantName, Tenant], Field(max_length=4096, examples=["team-a"]), LIVE] = {}

    def shared_limits(self, kind: Tier, device: str) -> dict[str, int]:
        """Returns the limits in bytes, by name, of the devices that share a tenant's quota with `device`.

        All NVMe devices share one quota. Each pool of GPU memory has a quota of its own.
        """
        single = {Tier.HBM: self.hbm.limit, Tier.DRAM: self.dram.limit}
        return {device: single[kind]} if kind in single else self.nvme.limits

    @model_validator(mode="after")
    def _tenants_fit(self) -> Config:
        check_apart(self.tenants)
        check_floors(self.tenants, "hbm", self.hbm.limit)
        check_floors(self.tenants, "dram", self.dram.limit)
        check_floors(self.tenants, "nvme", sum(self.nvme.limits.values()))
        return self


def changes(old: Config, new: Config, admin: bool = False) -> tuple[list[str], list[str]]:
    """Returns the settings that differ: those that change at run time, as `key = value`, and the other keys.

    Keys of `[admin]` count only if `admin`, because another process uses them.
    """
    before, after = old.model_dump(), new.model_dump()
    changed = _added_and_removed("tenants", before, after)
    changed += _added_and_removed("nvme.devices", before["nvme"], after["nvme"])
    if old.nvme.paths and new.nvme.paths and (old.nvme.path is None) != (new.nvme.path is None):
        changed.append(f"nvme.path is {'new' if old.nvme.path is None else 'gone'}")
        before["nvme"]["path"] = after["nvme"]["path"]
    old_values, new_values = _flat(before), _flat(after)
    differ = [key for key, value in new_values.items() if value != old_values[key]]
    differ = [key for key in differ if admin or not key.startswith("admin.")]
    fixed = [key for key in differ if not _is_live(key)]
    changed += [_line(key, new_values[key]) for key in differ if key not in fixed]
    return changed, fixed


def _added_and_removed(key: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns a line per name added to or removed from a table. Leaves only common names in both tables."""
    table = key.rpartition(".")[2]
    before, after = old[table], new[table]
    changed = [f"{key}.{name} is new" for name in after if name not in before]
    changed += [f"{key}.{name} is gone" for name in before if name not in after]
    both = sorted(set(before) & set(after))
    old[table], new[table] = {name: before[name] for name in both}, {name: after[name] for name in both}
    return changed


def _is_live(key: str) -> bool:
    """Returns whether the key, or a table around it, is marked `LIVE`."""
    model: type[Section] = Config
    for part in key.split("."):
        field = model.model_fields.get(part)
        if field is None:
            continue  # the name of a device
        if LIVE in field.metadata:
            return True
        model = section_in(field.annotation) or model
    return False


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one table of dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _line(key: str, value: Any) -> str:
    return f"{key}: {len(value)}" if key.endswith(".tokens") else f"{key} = {value}"


@dataclass(frozen=True, slots=True)
class Source:
    """The values of a configuration file, and a merge patch of changes since it was read.

    `kept_in` is the file that persists the patch; None: nothing does.
    """

    name: str = "config"
    values: Values = by_default(default_factory=dict)
    changes: Values = by_default(default_factory=dict)
    kept_in: Path | None = None

    @property
    def effective(self) -> Values:
        """The file's values with the changes applied."""
        return merged(self.values, self.changes)

    @property
    def file_policy(self) -> str:
        """The eviction policy in the file; empty if the file has none."""
        return str(self.values.get("policy", {}).get("eviction", ""))

    def changed(self, effective: Values) -> Source:
        """Returns a source of the same file with changes that result in the values `effective`."""
        return replace(self, changes=difference(self.values, effective))

    def config(self) -> Config:
        """Returns the validated effective configuration. Raises ConfigError for the first invalid key."""
        try:
            # An absent section is an empty one. As a default, its class would be compiled by itself too.
            return Config.model_validate({key: {} for key in Config.model_fields} | self.effective)
        except ValidationError as e:
            # A missing key may be misspelled: the unknown key is the better message.
            error = min(e.errors(), key=lambda error: error["type"] == "missing")
            name = f"{self.name} with {self.kept_in or 'its changes'}" if self.changes else self.name
            raise _explain(name, error) from None
        except RecursionError:
            raise ConfigError(f"{self.name} is nested too deeply", _EVERY_KEY) from None


def parse(text: str, source: str = "config") -> Config:
    """Returns the configuration in a TOML text. Raises ConfigError, which names it by `source`."""
    return _source(text, source).config()


def _source(text: str, name: str) -> Source:
    try:
        return Source(name, tomllib.loads(text))
    except ValueError as e:  # invalid TOML, or a number with too many digits
        raise ConfigError(f"{name} is not TOML: {e}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply", _EVERY_KEY) from None


def load(path: Path | None) -> Config:
    """Returns the configuration of the file at `path` with its persisted changes; see `read`."""
    return read(path).config()


def read(path: Path | None) -> Source:
    """Returns the values of the file at `path` and its persisted changes; without a path, the defaults.

    Raises ConfigError. Does not validate the result, see `Source.config`.
    """
    if path is None:
        return Source()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not TOML: byte {e.start} is not UTF-8") from None
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", _unreadable_hint(path, e)) from None
    source = _source(text, str(path))
    kept_in = source.config().daemon.changes
    return source if kept_in is None else replace(source, changes=read_changes(kept_in), kept_in=kept_in)


def _unreadable_hint(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"`kvstore config example > {path}` makes one to start from"
    if isinstance(error, PermissionError):
        return f"run as a user that may read it: ls -l {path}"
    return "name a TOML file"


def _known_keys(model: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner, key = section_in(field.annotation), prefix + name
        yield key
        if inner is not None:
            yield from _known_keys(inner, f"{key}.{_NAME}." if key in _BY_NAME else f"{key}.")


def _explain(source: str, error: Mapping[str, Any]) -> ConfigError:
    place, kind = [part for part in error["loc"] if part != "[key]"], error["type"]
    key, value = ".".join(map(_bare, place)), error["input"]
    named = f"{source}: {key}" if key else source
    if kind == "extra_forbidden":
        return ConfigError(f"{source}: unknown key {key:.120} = {_show(key, value)}", _nearest(place))
    if kind == "missing":
        return ConfigError(f"{named} is missing", _EVERY_KEY)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        table = f"{key}.{_NAME}" if kind == "dict_type" else key
        return ConfigError(f"{named} is {_show(key, value)}", f"it must be a table, written as [{table}]")
    cause: Any = error.get("ctx", {}).get("error")
    if isinstance(cause, MisuseError):
        return ConfigError(f"{named}: {cause.message}", cause.hint)
    return ConfigError(f"{named} is {_show(key, value)}", error["msg"].replace("Input", "it"))


def _bare(part: object) -> str:
    """Returns a part of a key as TOML writes it, quoted if necessary."""
    return str(part) if re.fullmatch(r"[\w-]+", str(part), re.ASCII) else f"{str(part)!r:.80}"


def _nearest(place: list[Any]) -> str:
    """Returns a hint for an unknown key: the known key most similar to it."""
    parts = [part for part in place if not isinstance(part, int)]
    given_name = _NAME
    for table in (named.split(".") for named in _BY_NAME):
        at = len(table)
        if parts[:at] == table and len(parts) > at:
            given_name, parts = str(parts[at]), [*table, _NAME, *parts[at + 1 :]]
    parent, _, name = ".".join(map(str, parts)).rpartition(".")
    known = {key: key.rpartition(".") for key in _known_keys()}
    alike = {key: difflib.SequenceMatcher(None, leaf, name).ratio() for key, (_, _, leaf) in known.items()}

    def rank(key: str) -> tuple[bool, bool, float, bool]:
        section, _, leaf = known[key]
        return bool(section) and leaf == name, section == parent, alike[key], key.startswith(f"{parts[0]}.")

    near = max((key for key in known if alike[key] >= _ALIKE), key=rank, default="")
    return f"did you mean {near.replace(_NAME, _bare(given_name))}?" if near else _EVERY_KEY


def _show(key: str, value: object) -> str:
    if key == "daemon.socket_mode" and type(value) is int:
        return f"{value:#o}"
    try:
        shown = repr(value)
    except RecursionError:
        return "nested too deeply"
    # A token in the wrong place must not appear in a log.
    return f"{re.sub(r'kvs_[A-Za-z0-9_-]*', 'kvs_...', shown):.80}"
