"""JSON merge patches (RFC 7396) of the configuration, and the file that persists them.

Not covered: whether a patched configuration is valid. `Source.config` validates it.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.config.sections import FIRST_DEVICE, NvmeDevice
from kvstore.errors import ConfigError

Values = dict[str, Any]
"""Tables and values of TOML or JSON."""


def merged(values: Values, patch: Values) -> Values:
    """Returns `values` with a merge patch applied: tables are merged, other values replaced, None removes."""
    out = {name: value for name, value in values.items() if name not in patch}
    for name, value in patch.items():
        if isinstance(value, dict):
            before = values.get(name)
            out[name] = merged(before if isinstance(before, dict) else {}, value)
        elif value is not None:
            out[name] = value
    return out


def difference(before: Values, after: Values) -> Values:
    """Returns the smallest merge patch that turns `before` into `after`."""
    patch: Values = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = difference(old, value)
            if inner:
                patch[name] = inner
        elif name not in before or type(value) is not type(old) or value != old:
            patch[name] = value
    return patch


def device_table(name: str) -> tuple[str, ...]:
    """Returns the keys that lead to the table with the keys of an NVMe device."""
    return ("nvme",) if name == FIRST_DEVICE else ("nvme", "devices", name)


def device_values(name: str, table: Values | None) -> Values | None:
    """Returns the keys of a device in its table, None if the device is not configured."""
    if name != FIRST_DEVICE or table is None:
        return table
    values = {key: value for key, value in table.items() if key in NvmeDevice.model_fields}
    return values if "path" in values else None


def device_patch(name: str, values: Values | None) -> Values:
    """Returns the merge patch that sets keys of a device, or removes the device."""
    if name == FIRST_DEVICE:
        return {"nvme": {"path": None} if values is None else values}
    return {"nvme": {"devices": {name: values}}}


def etag(value: object) -> str:
    """Returns an ETag over a value."""
    return blake3(_json(value).encode()).hexdigest(8)


def read_changes(path: Path) -> Values:
    """Returns the merge patch in a file, empty if the file does not exist. Raises ConfigError."""
    hint = "it holds changes made while the daemon ran; move it away to drop them"
    try:
        changes = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint) from None
    if not isinstance(changes, dict):
        raise ConfigError(f"{path} is not a JSON object", hint)
    return changes


def keep_changes(path: Path, changes: Values) -> None:
    """Writes a merge patch to a file, atomically and durably. Raises ConfigError and keeps the old file."""
    new = path.with_name(f"{path.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(_json(changes, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "nothing was changed") from None


def plain(value: Any) -> Any:
    """Returns the value with JSON types only: times become text, tuples lists."""
    return json.loads(_json(value))


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, default=_iso_time, sort_keys=True, ensure_ascii=False, indent=indent)


def _iso_time(value: object) -> str:
    """Returns a time as text. Times are the only TOML values without a JSON type."""
    assert isinstance(value, datetime), value
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if value.tzinfo else value.isoformat()
