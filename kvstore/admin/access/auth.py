"""Who calls, and how often: users of this machine by their uid, everybody else by a bearer token."""

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
"""What stands for the host where a caller is a process of this machine, and its uid for the port."""

_BURST_S = 1.0
_MOST_CALLERS = 4096
_TOKEN_HINT = "send Authorization: Bearer TOKEN; admin.tokens in the configuration says which there are"


class Role(IntEnum):
    """What a caller may do, each with all before it."""

    VIEW = 0
    OPERATE = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Who it is, for the log, and what it may do."""

    name: str
    role: Role


class Authenticator:
    """Tells callers from one another, and holds back who calls too often."""

    def __init__(self, admin: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        self.admin = admin
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def identify(self, request: Request) -> Caller:
        """Who sends a request. Raises ProblemError 401 for who is nobody."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return self._by_token(token.strip())
        client = request.client
        if not scheme and client is not None and client.host == PEER and client.port in (0, os.getuid()):
            _refuse_other_sites(request)
            return Caller(f"uid {client.port}", Role.OPERATE)
        raise ProblemError(401, "this needs a token", _TOKEN_HINT)

    def _by_token(self, token: str) -> Caller:
        found = find_token(token, self.admin.tokens)
        if found is None:
            raise ProblemError(401, "this token is nobody's", _TOKEN_HINT)
        if time.time() >= found.ends:
            raise ProblemError(401, EXPIRED, EXPIRED_HINT)
        return Caller(found.name, Role[found.role.upper()])

    def count(self, who: str) -> None:
        """One more request of somebody's. Raises ProblemError 429 for who is over `requests_per_s`."""
        now, rate = self._clock(), float(self.admin.requests_per_s)
        spent, at = self._spent.pop(who, (0.0, now))
        spent = max(0.0, spent - (now - at) * rate) + 1
        over = spent > rate * _BURST_S
        self._spent[who] = (spent - 1 if over else spent), now
        if len(self._spent) > _MOST_CALLERS:
            self._spent.popitem(last=False)
        if over:
            hint = f"at most {self.admin.requests_per_s} a second: admin.requests_per_s"
            raise ProblemError(429, "too many requests", hint, {"Retry-After": "1"})


def _refuse_other_sites(request: Request) -> None:
    """A browser that reaches the socket through a forwarder acts as its user: not for pages from elsewhere.

    Such a page has another origin, or has its own name lead here. Raises ProblemError 403.
    """
    host = request.headers.get("host", "")
    name = _parsed(f"//{host}").hostname or ""
    origin = request.headers.get("origin")
    if origin is not None and _parsed(origin).netloc != host:
        raise ProblemError(
            403, f"a page of {origin:.80} asks", "without a token, only pages of this host may"
        )
    if name not in ("", "localhost") and not _is_loopback(name):
        raise ProblemError(403, f"this is not {name:.80}", "without a token, ask for localhost")


def _parsed(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:
        raise ProblemError(403, f"{address!r:.80}: {error}", "without a token, ask for localhost") from None


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
