"""The `[admin]` section: sockets, rate and tokens of the REST interface."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvstore.config.sections import LIVE, FileMode, FilePath, Section, SocketPath
from kvstore.config.tenants import Secret
from kvstore.config.units import Notation
from kvstore.errors import MisuseError
from kvstore.socket_paths import admin_socket

HOLDER_PATTERN = r"^[A-Za-z0-9_.@-]{1,64}$"
"""Matches names of token holders."""

_LISTEN_HINT = "an address and a port: 127.0.0.1:9400, or [::1]:9400"


def _address(text: str) -> str:
    if text:
        parse_listen(text)
    return text


def parse_listen(text: str) -> tuple[str, int]:
    """Returns address and port of `address:port`. Raises MisuseError if the text is not of this form."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise MisuseError(f"{text!r:.80} is not an address to listen on", _LISTEN_HINT) from None
    if not (colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise MisuseError(f"{text!r:.80} has no port", _LISTEN_HINT)
    return host, int(port)


class AdminToken(Secret):
    """A token of the REST interface.

    Callers over TCP need one, and local users other than root and the daemon's.
    """

    name: Annotated[
        str,
        Field(pattern=HOLDER_PATTERN, examples=["grafana"]),
        Notation('1 to 64 letters, digits, "-", "_", ".", "@"'),
    ]
    """Name of the holder in the audit log"""
    role: Literal["view", "operate"] = "view"
    """Role of the holder

    `view` reads everything. `operate` also changes it.
    """


class Admin(Section):
    """The REST interface, served by `kvstore admin`.

    On the socket, root and the daemon's own user need no token. All other callers need one. A reload of
    `kvstore admin` applies the keys that change at run time.
    """

    socket: SocketPath = Field(default_factory=admin_socket, examples=["/run/kvstore/admin.sock"])
    """Unix socket of the REST interface

    Its default is beside that of `daemon.socket`.
    """
    socket_mode: FileMode = 0o600
    """File mode of the socket"""
    listen: Annotated[
        str, AfterValidator(_address), Notation("address and port"), Field(examples=["127.0.0.1:9400"])
    ] = ""
    """TCP address and port; absent: none

    Addresses other than loopback need `certificate` and `key`.
    """
    certificate: Annotated[FilePath | None, Field(examples=["/etc/kvstore/tls.crt"])] = None
    """TLS certificate in PEM format"""
    key: Annotated[FilePath | None, Field(examples=["/etc/kvstore/tls.key"])] = None
    """Key of the certificate in PEM format"""
    audit_log: Annotated[FilePath | None, Field(examples=["/var/log/kvstore/audit"])] = None
    """File that records every change; absent: the log of `kvstore admin`

    It has one line per change. At 8 MiB it is rotated; four older files are kept. `NAME.refused` beside it
    has refused requests, up to the same size.
    """
    requests_per_s: Annotated[int, Field(ge=1, le=100_000), LIVE] = 50
    """Requests per second per caller; excess requests get HTTP 429

    A caller is a token, a user of the socket, or an address.
    """
    tokens: Annotated[tuple[AdminToken, ...], Field(strict=False), LIVE] = ()

    @model_validator(mode="after")
    def _safe(self) -> Admin:
        if (self.certificate is None) != (self.key is None):
            raise MisuseError("certificate and key belong together", "set both or neither")
        if self.listen and self.certificate is None:
            host, _ = parse_listen(self.listen)
            if not ipaddress.ip_address(host).is_loopback:
                raise MisuseError(
                    f"listen is {self.listen}: tokens would cross the network unencrypted",
                    "set certificate and key, or listen on 127.0.0.1",
                )
        for kind in ("name", "hash"):
            values = [getattr(token, kind) for token in self.tokens]
            if len(set(values)) < len(values):
                raise MisuseError(f"two tokens have the same {kind}", "each token needs its own")
        return self
