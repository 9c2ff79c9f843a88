"""The one configuration: `file` reads it, `sections` and `tenants` say what may be in it."""

from kvstore.config.admin import Admin, AdminToken, parse_listen
from kvstore.config.example import example
from kvstore.config.file import Config, changes, load, parse
from kvstore.config.sections import SOCKET_PATH_BYTES, Daemon, Dram, Limits, Nvme, Policy, Scrub
from kvstore.config.tenants import Encryption, Secret, Tenant, TierQuota, Token
from kvstore.config.units import GIB, KIB, MIB, format_size, parse_duration, parse_size

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "SOCKET_PATH_BYTES",
    "Admin",
    "AdminToken",
    "Config",
    "Daemon",
    "Dram",
    "Encryption",
    "Limits",
    "Nvme",
    "Policy",
    "Scrub",
    "Secret",
    "Tenant",
    "TierQuota",
    "Token",
    "changes",
    "example",
    "format_size",
    "load",
    "parse",
    "parse_duration",
    "parse_listen",
    "parse_size",
]
