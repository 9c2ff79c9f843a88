"""The REST interface as configured: where it listens, and who may use it."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvstore.config.sections import Section, SocketPath, as_path
from kvstore.config.tenants import Secret
from kvstore.errors import MisuseError

HOLDER_PATTERN = r"^[A-Za-z0-9_.@-]{1,64}$"
"""What the holder of a token may be called."""

_LISTEN_HINT = "an address and a port: 127.0.0.1:9400, or [::1]:9400"


def _address(text: str) -> str:
    if text:
        parse_listen(text)
    return text


def parse_listen(text: str) -> tuple[str, int]:
    """Address and port of `address:port`. Raises MisuseError for what is not one."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise MisuseError(f"{text!r:.80} is no address to listen on", _LISTEN_HINT) from None
    if not (colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise MisuseError(f"{text!r:.80} has no port", _LISTEN_HINT)
    return host, int(port)


class AdminToken(Secret):
    """Who may use the interface: `view` sees everything, `operate` changes things too.

    `name` is what the audit log calls its holder.
    """

    name: Annotated[str, Field(pattern=HOLDER_PATTERN)]
    role: Literal["view", "operate"] = "view"


class Admin(Section):
    """The process that serves REST (`kvstore admin`): its Unix socket, and a port if it is to have one.

    `audit_log`: where changes are written down; None: to the process's own log.
    On the socket, root and the daemon's own user need no token; everybody else does, everywhere.
    """

    socket: SocketPath = Path("/run/kvstore/admin.sock")
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    listen: Annotated[str, AfterValidator(_address)] = ""
    certificate: Annotated[Path, BeforeValidator(as_path)] | None = None
    key: Annotated[Path, BeforeValidator(as_path)] | None = None
    audit_log: Annotated[Path, BeforeValidator(as_path)] | None = None
    requests_per_s: Annotated[int, Field(ge=1, le=100_000)] = 50
    tokens: Annotated[tuple[AdminToken, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _safe(self) -> Admin:
        if (self.certificate is None) != (self.key is None):
            raise MisuseError("certificate and key go together", "set both, or neither")
        if self.listen and self.certificate is None:
            host, _ = parse_listen(self.listen)
            if not ipaddress.ip_address(host).is_loopback:
                raise MisuseError(
                    f"listen is {self.listen}, where tokens would be read by others",
                    "set certificate and key, or listen on 127.0.0.1",
                )
        for kind in ("name", "hash"):
            values = [getattr(token, kind) for token in self.tokens]
            if len(set(values)) < len(values):
                raise MisuseError(f"two tokens have the same {kind}", "each needs its own")
        return self
