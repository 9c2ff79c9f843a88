"""The `[admin]` section: sockets, rate and tokens of the REST interface."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvstore.config.sections import LIVE, FilePath, Section, SocketPath
from kvstore.config.tenants import Secret
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
    """A token of the REST interface. Role `view` may read everything, `operate` may also change it.

    `name` identifies the holder in the audit log.
    """

    name: Annotated[str, Field(pattern=HOLDER_PATTERN)]
    role: Literal["view", "operate"] = "view"


class Admin(Section):
    """The REST interface (`kvstore admin`): its Unix socket, and optionally a TCP port (`listen`).

    `audit_log` is the file that records changes; None: the log of the process. `requests_per_s` limits the
    request rate per caller.
    On the socket, root and the daemon's own user need no token. All other callers need one.
    """

    socket: SocketPath = Field(default_factory=admin_socket)
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    listen: Annotated[str, AfterValidator(_address)] = ""
    certificate: FilePath | None = None
    key: FilePath | None = None
    audit_log: FilePath | None = None
    requests_per_s: Annotated[int, Field(ge=1, le=100_000), LIVE] = 50
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
