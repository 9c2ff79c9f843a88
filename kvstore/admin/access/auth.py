"""Authentication and rate limits: local users by uid, all other callers by bearer token.

Not covered: what a role may do. Routers require one by `VIEWER` or `OPERATOR`.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from fastapi import Request

from kvstore.admin.problem_details import ProblemError
from kvstore.config import Admin
from kvstore.daemon.tenancy.auth import EXPIRED, EXPIRED_HINT, find_token

PEER = "uid"
"""Host name of a client on the Unix socket. Its port number is the peer's uid."""

_BURST_S = 1.0
_MOST_CALLERS = 4096
_TOKEN_HINT = "send Authorization: Bearer TOKEN; admin.tokens in the configuration lists the valid tokens"
_LOCAL_HINT = "requests without a token must address localhost"


class Role(IntEnum):
    """Rights of a caller. Each role includes the previous one."""

    VIEW = 0
    OPERATE = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: its name in the audit log, and its role."""

    name: str
    role: Role


class Authenticator:
    """Identifies callers and limits their request rates."""

    def __init__(self, admin: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.admin = admin
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def identify(self, request: Request) -> Caller:
        """Returns a request's caller. Raises ProblemError: 401 for unknown callers, 403 for other sites."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return self._by_token(token.strip())
        client = request.client
        if not scheme and client is not None and client.host == PEER and client.port in (0, os.getuid()):
            _refuse_other_sites(request)
            return Caller(f"uid {client.port}", Role.OPERATE)
        raise ProblemError(401, "this path needs a token", _TOKEN_HINT)

    def _by_token(self, token: str) -> Caller:
        found = find_token(token, self.admin.tokens)
        if found is None:
            raise ProblemError(401, "unknown token", _TOKEN_HINT)
        if time.time() >= found.ends:
            raise ProblemError(401, EXPIRED, EXPIRED_HINT)
        return Caller(found.name, Role[found.role.upper()])

    def count(self, name: str) -> None:
        """Counts one request of a caller. Raises ProblemError 429 above `requests_per_s`."""
        now, rate = self._clock(), float(self.admin.requests_per_s)
        spent, at_s = self._spent.pop(name, (0.0, now))
        spent = max(0.0, spent - (now - at_s) * rate) + 1
        over = spent > rate * _BURST_S
        self._spent[name] = (spent - 1 if over else spent), now
        if len(self._spent) > _MOST_CALLERS:
            self._spent.popitem(last=False)
        if over:
            hint = f"the limit is {self.admin.requests_per_s} requests per second: admin.requests_per_s"
            raise ProblemError(429, "too many requests", hint, {"Retry-After": "1"})


def _refuse_other_sites(request: Request) -> None:
    """Raises ProblemError 403 if a browser sends the request for a page of another site.

    A browser that reaches the socket through a port forward acts with its user's rights. A page of another
    site has another origin, or resolves its own name to this machine.
    """
    host = request.headers.get("host", "")
    name = _parsed(f"//{host}").hostname or ""
    origin = request.headers.get("origin")
    if origin is not None and _parsed(origin).netloc != host:
        raise ProblemError(
            403, f"the request comes from a page of {origin:.80}", "pages of other hosts need a token"
        )
    if name not in ("", "localhost") and not _is_loopback(name):
        raise ProblemError(403, f"the request is addressed to {name:.80}", _LOCAL_HINT)


def _parsed(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:
        raise ProblemError(403, f"{address!r:.80}: {error}", _LOCAL_HINT) from None


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
