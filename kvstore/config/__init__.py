"""The configuration: one TOML file, validated once into frozen sections.

Lives here: `file` (reading and comparing), `patches` (changes at run time), `sections`, `tenants` and `admin`
(keys and their checks), `units` (sizes and durations), `keys` (every key with its documentation), `example`
(the commented default file), `machine` (memory, and the limits of a daemon without a file).

Import from this package, not from its modules. It may import `types`, `socket_paths` and `errors` only.
"""

from kvstore.config.admin import HOLDER_PATTERN, Admin, AdminToken, parse_listen
from kvstore.config.example import example
from kvstore.config.file import Config, Source, changes, load, parse, read
from kvstore.config.keys import Key, Table, tables
from kvstore.config.machine import Memory, check_dram, choose, group_limits, read_memory
from kvstore.config.patches import (
    Values,
    device_patch,
    device_table,
    device_values,
    difference,
    etag,
    keep_changes,
    merged,
    plain,
)
from kvstore.config.sections import (
    FIRST_DEVICE,
    SOCKET_PATH_BYTES,
    Daemon,
    Events,
    Limits,
    Network,
    NvmeDevice,
    Policy,
    Tracing,
)
from kvstore.config.tenants import Secret, Tenant, TierQuota, Token
from kvstore.config.units import GIB, KIB, MIB, format_size, parse_duration, parse_size, parse_write_budget

__all__ = [
    "FIRST_DEVICE",
    "GIB",
    "HOLDER_PATTERN",
    "KIB",
    "MIB",
    "SOCKET_PATH_BYTES",
    "Admin",
    "AdminToken",
    "Config",
    "Daemon",
    "Events",
    "Key",
    "Limits",
    "Memory",
    "Network",
    "NvmeDevice",
    "Policy",
    "Secret",
    "Source",
    "Table",
    "Tenant",
    "TierQuota",
    "Token",
    "Tracing",
    "Values",
    "changes",
    "check_dram",
    "choose",
    "device_patch",
    "device_table",
    "device_values",
    "difference",
    "etag",
    "example",
    "format_size",
    "group_limits",
    "keep_changes",
    "load",
    "merged",
    "parse",
    "parse_duration",
    "parse_listen",
    "parse_size",
    "parse_write_budget",
    "plain",
    "read",
    "read_memory",
    "tables",
]
