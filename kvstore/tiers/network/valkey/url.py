"""URLs of Valkey and Redis servers.

`redis://HOST[:PORT][/DATABASE]`, `rediss://` for TLS, `unix:///PATH`, and for a cluster
`redis://HOST:PORT,HOST:PORT`. Options after `?`, joined by `&`: `cluster=1` (one host of a cluster), `ttl=S`,
`prefix=TEXT`, `ca=FILE` (TLS), `db=N` (Unix sockets).
"""

from __future__ import annotations

import re
import ssl
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.cluster import Endpoint

_PORT = 6379
_OPTIONS = {
    "redis": {"cluster", "ttl", "prefix"},
    "rediss": {"cluster", "ttl", "prefix", "ca"},
    "unix": {"ttl", "prefix", "db"},
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[^\[\]:@,/\s]+)(?::(\d{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{0,100}")


def parse(url: str, user: str, password: str) -> Endpoint:
    """Parses a URL. Raises ConfigError, which never contains a password."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(str(error)) from None
    if "@" in parts.netloc:
        raise _wrong("it must not contain a user or password", "set network.user and network.password_file")
    known = _OPTIONS[parts.scheme]
    if unknown := set(options) - known:
        raise _wrong(f"?{unknown.pop()}= is unknown", f"for {parts.scheme}://: {', '.join(sorted(known))}")
    if user and not password:
        hint = "set both, or the password only"
        raise ConfigError("network.user is set without network.password_file", hint)
    if parts.scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise _wrong("it names no socket path", "unix:///run/valkey/valkey.sock")
        seeds, database = [Address(unquote(parts.path), 0)], options.get("db", "0")
    else:
        seeds = [_host(text) for text in parts.netloc.split(",")]
        database = parts.path.strip("/") or "0"
    cluster = len(seeds) > 1 or _number(options.get("cluster", "0"), "cluster=", 1) == 1
    prefix = options.get("prefix", "")
    if not _PREFIX.fullmatch(prefix):
        raise _wrong(f"prefix={prefix!r:.120}", "up to 100 letters, digits and . _ : / -")
    tls = _tls(options.get("ca")) if parts.scheme == "rediss" else None
    number = _number(database, "the database", 1 << 20)
    ttl_s = _number(options.get("ttl", "0"), "ttl=", 10**9)
    return Endpoint(tuple(seeds), cluster, number, tls, user, password, ttl_s, prefix)


def _host(text: str) -> Address:
    found = _HOST.fullmatch(text)
    port = int(found[2] or _PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise _wrong(f"{text!r:.120} is not a host and port", "redis://HOST:PORT")
    return Address(found[1].strip("[]"), port)


def _number(text: str, what: str, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > most:
        raise _wrong(f"{what} {text!r:.40}", f"a number from 0 to {most}")
    return int(text)


def _tls(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise _wrong(f"ca={ca!r:.200}: {error}", "a file of certificates in PEM") from None


def _wrong(what: str, hint: str = "") -> ConfigError:
    return ConfigError(f"network.url: {what}", hint)
