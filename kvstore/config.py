"""The one configuration: frozen, read from one TOML file, validated once.

Not covered: whether a folder exists or a socket can be bound. The daemon finds that out when it starts.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kvstore.errors import ConfigError, MisuseError
from kvstore.types import MAX_KEY_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SOCKET_PATH_BYTES = 107
"""The longest Unix socket path that the kernel takes, in bytes."""

_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_HINT = "a whole number of bytes, or one with a unit: 4096, 512MiB, 64GiB, 100GB"
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_HINT = "a number of seconds, or one with a unit: 0.5, 250ms, 5s, 2m"


def parse_size(text: object) -> int:
    """Bytes meant by `4096`, `"512MiB"` or `"100GB"`. Units in any case; raises MisuseError for the rest."""
    size = -1
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,19})\s*([A-Za-z]*)\s*", text)):
        unit = _SIZE_UNITS.get(m[2].lower())
        size = int(m[1]) * unit if unit else -1
    if not 0 <= size < 1 << 63:
        raise MisuseError(f"{text!r:.80} is not a size", _SIZE_HINT)
    return size


def parse_duration(text: object) -> float:
    """Seconds meant by `0.5`, `"250ms"`, `"5s"` or `"2m"`. Raises MisuseError for anything else."""
    seconds = -1.0
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    elif isinstance(text, str) and (m := re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text)):
        scale = _DURATION_UNITS.get(m[2])
        seconds = float(m[1]) * scale if scale else -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise MisuseError(f"{text!r:.80} is not a duration", _DURATION_HINT)
    return seconds


def format_size(n: float) -> str:
    """`n` bytes for people, in binary units with at most one decimal: `512B`, `1.5KiB`, `8GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.95 and above would round to "1024": that is the next unit's 1.
        if abs(n) < 1023.95:
            return f"{n:.1f}".removesuffix(".0") + unit
        n /= 1024
    return f"{n:.1f}".removesuffix(".0") + "TiB"


def _at_least(minimum: int) -> AfterValidator:
    def check(size: int) -> int:
        if size < minimum:
            raise MisuseError(f"{format_size(size)} is too small", f"at least {format_size(minimum)}")
        return size

    return AfterValidator(check)


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise MisuseError(f"{value!r:.80} is not a path", "a string that names a file or folder")
    return Path(value)


def _socket_path(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise MisuseError(
            f"the path is {length} bytes long: {str(path)!r:.160}",
            f"the kernel takes at most {SOCKET_PATH_BYTES} bytes for a socket: use a shorter folder",
        )
    return path


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, written as an integer or as text with a unit."""
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, written as a number or as text with a unit."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Daemon(_Section):
    """The process: its socket, how long a stop may take (seconds), how much it logs."""

    socket: Annotated[Path, BeforeValidator(_path), AfterValidator(_socket_path)] = Path(
        "/run/kvstore/kvstore.sock"
    )
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    stop_timeout: Annotated[Duration, Field(gt=0)] = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Dram(_Section):
    """The shared-memory tier: its hard limit in bytes, headers and rounding included."""

    limit: Annotated[Size, _at_least(2 * MIB)] = GIB
    huge_pages: bool = True


class Nvme(_Section):
    """The disk tier: a folder (None = no such tier), its hard limit in bytes, when blocks go there."""

    path: Annotated[Path, BeforeValidator(_path)] | None = None
    limit: Annotated[Size, _at_least(2 * MIB)] = 8 * GIB
    write_policy: Literal["write_through", "on_evict"] = "write_through"
    io_threads: Annotated[int, Field(ge=1, le=256)] = 4


class Scrub(_Section):
    """How many bytes a second are read again to see whether they are still right; 0: none."""

    rate: Size = 16 * MIB


class Limits(_Section):
    """What one peer, and all of them together, may ask of the daemon."""

    frame_bytes: Annotated[Size, _at_least(64 * KIB), Field(le=GIB)] = 4 * MIB
    batch_keys: Annotated[int, Field(ge=16)] = 4096
    connections: Annotated[int, Field(ge=1, le=65536)] = 1024
    leases_per_connection: Annotated[int, Field(ge=1)] = 1024

    @field_validator("batch_keys")
    @classmethod
    def _fits_a_frame(cls, batch_keys: int, info: ValidationInfo) -> int:
        # A batch within the limit must never be refused for the size of its frame. Twice the longest
        # key leaves room for what travels beside each key.
        need = 2 * MAX_KEY_BYTES * batch_keys
        frame_bytes = info.data.get("frame_bytes", need)
        if need > frame_bytes:
            raise MisuseError(
                f"{batch_keys} keys do not fit a frame of {format_size(frame_bytes)}",
                f"raise limits.frame_bytes to {need}, or ask for {frame_bytes // (2 * MAX_KEY_BYTES)} keys",
            )
        return batch_keys


class Config(_Section):
    """Everything that can be configured. Immutable; made by `load` or `parse`."""

    daemon: Daemon = Daemon()
    dram: Dram = Dram()
    nvme: Nvme = Nvme()
    scrub: Scrub = Scrub()
    limits: Limits = Limits()


_CHANGEABLE = {
    "daemon.stop_timeout",
    "daemon.log_level",
    "nvme.write_policy",
    "scrub.rate",
    "limits.connections",
    "limits.leases_per_connection",
}
"""What a running daemon takes over when it reads its configuration again."""


def changes(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """Which settings differ: those that can change at run time, as `key = value`, and those that cannot."""
    before, after = old.model_dump(), new.model_dump()
    keys = [f"{section}.{name}" for section, values in after.items() for name in values]
    differ = [(k, v) for k in keys if (v := _at(after, k)) != _at(before, k)]
    changed = [f"{key} = {value}" for key, value in differ if key in _CHANGEABLE]
    return changed, [key for key, _ in differ if key not in _CHANGEABLE]


def _at(values: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return values[section][name]


def parse(text: str, source: str = "config") -> Config:
    """The configuration written in `text` (TOML). Raises ConfigError that starts with `source`."""
    try:
        return Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{source} is not TOML: {e}") from None
    except ValidationError as e:
        raise _explain(source, e.errors()[0]) from None


def load(path: Path | None) -> Config:
    """The configuration in the file at `path`; without one, the embedded default. Raises ConfigError."""
    if path is None:
        return Config()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not TOML: byte {e.start} is not UTF-8") from None
    except OSError as e:
        hint = "`kvstore config example` prints one to start from" if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path}: {e.strerror}", hint) from None
    return parse(text, str(path))


def _known_keys() -> Iterator[str]:
    for section, field in Config.model_fields.items():
        yield section
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        yield from (f"{section}.{name}" for name in field.annotation.model_fields)


def _explain(source: str, error: Mapping[str, Any]) -> ConfigError:
    key, value = ".".join(map(str, error["loc"])), error["input"]
    if error["type"] == "extra_forbidden":
        return ConfigError(f"{source}: unknown key {key:.80} = {value!r:.80}", _nearest(key))
    if error["type"] in ("model_type", "model_attributes_type"):
        return ConfigError(f"{source}: {key} is {value!r:.80}", f"a table, written as [{key}]")
    cause: Any = error.get("ctx", {}).get("error")
    if isinstance(cause, MisuseError):
        return ConfigError(f"{source}: {key}: {cause.message}", cause.hint)
    return ConfigError(f"{source}: {key} is {_show(key, value):.80}", error["msg"].replace("Input", "it"))


def _nearest(key: str) -> str:
    known = {dotted: dotted.rpartition(".")[2] for dotted in _known_keys()}
    name = key.rpartition(".")[2]
    near = [dotted for dotted, leaf in known.items() if leaf == name and "." in dotted]
    near = near or difflib.get_close_matches(key, known, 1, 0.7)
    leaves = difflib.get_close_matches(name, known.values(), 1, 0.7)
    near = near or [dotted for dotted, leaf in known.items() if leaf in leaves]
    return f"did you mean {near[0]}?" if near else "`kvstore config example` shows every key"


def _show(key: str, value: object) -> str:
    return f"{value:#o}" if key == "daemon.socket_mode" and type(value) is int else repr(value)


_EXAMPLE = """\
# kvstore configuration. Every key is optional; the values shown are the defaults.
# Sizes: bytes, or text such as "512MiB", "64GiB", "100GB". Durations: seconds, or "250ms", "5s", "2m".

[daemon]
socket = "/run/kvstore/kvstore.sock"  # Unix socket that clients connect to, at most 107 bytes
socket_mode = 0o600                   # its file mode: who may connect
stop_timeout = "10s"                  # how long a stop waits for transfers in flight
log_level = "info"                    # debug, info, warning or error

[dram]
limit = "1GiB"                        # hard limit of shared memory, at least 2MiB
huge_pages = true                     # back it by huge pages where the kernel gives them

[nvme]
# path = "/var/lib/kvstore"           # folder on the device; without one there is no NVMe tier
limit = "8GiB"                        # hard limit on the device, at least 2MiB
write_policy = "write_through"        # write_through: with every put; on_evict: when DRAM lets go of a block
io_threads = 4                        # reads and writes in flight

[scrub]
rate = "16MiB"                        # a second, read again in the background to find what rots; 0: nothing

[limits]
frame_bytes = "4MiB"                  # largest message in either direction
batch_keys = 4096                     # most keys in one request
connections = 1024                    # most clients at once
leases_per_connection = 1024          # most leases that one client holds at once
"""


def example() -> str:
    """A commented TOML file that loads to the defaults."""
    return _EXAMPLE
