"""Who a peer is: tenants by name and number, their members by uid, gid and token, and what each may do.

Not covered: what a tenant may store (`quotas`), and which of its blocks others may read (`catalog`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeVar

from kvstore.config import Config, Secret, Tenant
from kvstore.errors import ConfigError, KVStoreError, MisuseError
from kvstore.types import check_tenant

_S = TypeVar("_S", bound=Secret)

DEFAULT = "default"
EXPIRED, EXPIRED_HINT = "the token has expired", "ask whoever runs the daemon for a new one"
_MOST_TENANTS = 1 << 16
_UNKNOWN = "this peer is known by neither token, user nor group"
_UNKNOWN_HINT = "pass a valid token (KVSTORE_TOKEN), or ask whoever runs the daemon for access"


class Role(IntEnum):
    """What a peer may do, each with all before it: read blocks, write them, publish and delete namespaces."""

    READ = 0
    WRITE = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a peer is until `expires` (Unix time, s). An `operator` may use admin messages for every tenant."""

    tenant: int
    name: str
    role: Role
    operator: bool
    expires: float = math.inf


class RefusedError(KVStoreError):
    """A peer that is nobody here. Says nothing about which tenants there are."""


class Authenticator:
    """All tenants of one daemon. Numbers stay what they are while the process lives; "default" has 0."""

    def __init__(self, config: Config, own_uid: int | None = None) -> None:
        """`own_uid`: who runs the daemon, an operator like root; None: this process's user.

        Where operators have a socket of their own, nobody is one elsewhere: a container has a root too.
        """
        self._apart = config.daemon.operator_socket is not None
        self._numbers = {DEFAULT: 0}
        self._names = [DEFAULT]
        self._own_uid = os.getuid() if own_uid is None else own_uid
        self._configured: dict[str, Tenant] = {}
        self.reload(config)

    def reload(self, config: Config) -> None:
        """Takes over who is configured now. Whoever is not any more keeps its number, without members."""
        for name in config.tenants:
            self.add(name)
        self._configured = dict(config.tenants)

    def number(self, name: str) -> int | None:
        """The number of a tenant, None if there is none of this name."""
        return self._numbers.get(name)

    def existing(self, name: str) -> int:
        """Returns the number of a tenant. Raises MisuseError if there is no such tenant."""
        number = self._numbers.get(name)
        if number is None:
            raise MisuseError(f"there is no tenant {name!r:.80}", "`kvstore tenant list` names them")
        return number

    def name(self, number: int) -> str:
        """The name behind a number. IndexError if it is nobody's."""
        return self._names[number]

    def names(self) -> list[str]:
        """All tenants by number: those that are configured, and those of which something was found."""
        return list(self._names)

    def add(self, name: str) -> int:
        """The number of a tenant, a new one if it has none. Raises MisuseError for a name that can't be."""
        number = self._numbers.get(check_tenant(name))
        if number is None:
            number = len(self._names)
            if number >= _MOST_TENANTS:
                raise ConfigError(f"no room for tenant {name}: there were {number}", "restart the daemon")
            self._numbers[name] = number
            self._names.append(name)
        return number

    def is_privileged(self, uid: int) -> bool:
        """Whether a user is root or runs the daemon: it may open anew what the daemon has open."""
        return uid in (0, self._own_uid)

    def identify(
        self, uid: int, gids: Sequence[int], token: str, now: float, among_operators: bool = False
    ) -> Principal:
        """Who a peer is, by its token, else its user, else its groups, the primary one first.

        `now` is Unix time (s). `among_operators`: it has come by their socket. Raises RefusedError: the same
        one whatever is wrong, but to a genuine token that has expired.
        """
        operator = self.is_privileged(uid) and (among_operators or not self._apart)
        if among_operators and not operator:
            raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)
        if not self._configured:
            return Principal(0, DEFAULT, Role.ADMIN, operator=operator or not self._apart)
        if token:
            return self._by_token(token, now)
        name = self._owner({uid}, "uids") or self._owner(gids[:1], "gids") or self._owner(gids[1:], "gids")
        if name is not None:
            return self._identity(name, self._configured[name].role, operator)
        if operator:
            return Principal(0, DEFAULT, Role.ADMIN, operator=True)
        raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)

    def _by_token(self, token: str, now: float) -> Principal:
        known = [(each, name) for name, tenant in self._configured.items() for each in tenant.tokens]
        found = find_token(token, [each for each, _ in known])
        if found is None:
            raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)
        if now >= found.ends:
            raise RefusedError(EXPIRED, EXPIRED_HINT)
        [name] = [name for each, name in known if each is found]
        # Engines often run as root: whoever shows a token asks for no more than that gives.
        return self._identity(name, found.role, operator=False, expires=found.ends)

    def _owner(self, ids: Collection[int], kind: Literal["uids", "gids"]) -> str | None:
        """The one tenant that has one of these ids. Raises RefusedError if several have."""
        named = self._configured.items()
        names = [name for name, tenant in named if not set(ids).isdisjoint(getattr(tenant, kind))]
        if len(names) > 1:
            raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)
        return names[0] if names else None

    def _identity(self, name: str, role: str, operator: bool, expires: float = math.inf) -> Principal:
        return Principal(self._numbers[name], name, Role[role.upper()], operator, expires)


def new_token(random_bytes: bytes) -> str:
    """A token made of 32 random bytes."""
    assert len(random_bytes) == 32
    return "kvs_" + urlsafe_b64encode(random_bytes).decode().rstrip("=")


def find_token(token: str, known: Iterable[_S]) -> _S | None:
    """The secret that a token is; None if it is none of these."""
    digest, found = hash_of(token), None
    # All are compared, whichever fits: how long that takes tells nothing.
    for each in known:
        if hmac.compare_digest(each.digest, digest):
            found = each
    return found


def hash_of(token: str) -> bytes:
    """What a configuration keeps of a token: it has 256 random bits, so a plain SHA-256 gives none away."""
    return hashlib.sha256(token.encode()).digest()
