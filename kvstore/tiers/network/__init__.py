"""Systems beyond this node that hold blocks for many nodes, behind one seam (`base.Backend`)."""

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
    """What a backend is opened with.

    `limit_bytes` is for those that keep to one themselves (0: no limit); `password` of `user` where the
    system has such; `threads`: calls that will be made at once. `credentials`: see `config.Network`.
    """

    url: str
    limit_bytes: int = 0
    user: str = ""
    password: str = ""
    threads: int = 8
    credentials: str = "keys"


def open_backend(settings: BackendSettings) -> Backend:
    """The backend of a URL; nothing is asked of the system yet.

    Raises ConfigError for a URL that can't be one, or where a package is missing.
    """
    scheme = urlsplit(settings.url).scheme
    if scheme not in _MODULES:
        raise ConfigError(
            f"network.url: {settings.url!r:.120} names no system that is known",
            f"one of {', '.join(f'{known}://' for known in _MODULES)}",
        )
    module = importlib.import_module(f"kvstore.tiers.network.{_MODULES[scheme]}.backend")
    backend: Backend = module.open_url(settings)
    return backend


def open_network(config: Network) -> tuple[Backend | None, list[str]]:
    """The configured backend, and why there is none: blocks are served without it."""
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
