"""Backends of the network tier: systems that hold blocks for many nodes, behind one protocol (`base`).

Each backend is a package with `backend.open_url`. This package may import `tiers` and the floors below it,
and never `daemon`. `daemon.network` uses it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.network.base import Backend

if TYPE_CHECKING:
    from kvstore.config import Network

_MODULES = {
    "file": "filesystem",
    "redis": "valkey",
    "rediss": "valkey",
    "unix": "valkey",
    "s3": "objectstore",
    "gs": "objectstore",
    "az": "objectstore",
    "mooncake": "mooncake",
}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of a backend.

    `limit_bytes`: for backends that enforce a limit themselves, 0: no limit. `user`, `password`: the login,
    if the system has one. `threads`: concurrent calls. `credentials`: see `config.Network`.
    """

    url: str
    limit_bytes: int = 0
    user: str = ""
    password: str = ""
    threads: int = 8
    credentials: str = "keys"


def open_backend(settings: BackendSettings) -> Backend:
    """Returns the backend of a URL. Does not connect yet.

    Raises ConfigError for an invalid URL or a missing package.
    """
    scheme = urlsplit(settings.url).scheme
    if scheme not in _MODULES:
        hint = f"one of {', '.join(f'{known}://' for known in _MODULES)}"
        raise ConfigError(f"network.url: {settings.url!r:.120} names no known system", hint)
    module = importlib.import_module(f"kvstore.tiers.network.{_MODULES[scheme]}.backend")
    backend: Backend = module.open_url(settings)
    return backend


def open_network(config: Network) -> tuple[Backend | None, list[str]]:
    """Returns the configured backend, and the problems if it cannot be opened."""
    if config.url is None:
        return None, []
    try:
        password = "" if config.password_file is None else config.password_file.read_text().strip()
        settings = BackendSettings(
            config.url, config.limit, config.user, password, config.threads, config.credentials
        )
        return open_backend(settings), []
    except (KVStoreError, OSError, UnicodeDecodeError) as error:
        return None, [f"no network tier: {error}"]
