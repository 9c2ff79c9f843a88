"""Authentication: tenants by name and number, their members by uid, gid and token, and members' roles.

Not covered: quotas (`quotas`), and read access to published namespaces (`catalog`).
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
EXPIRED, EXPIRED_HINT = "the token has expired", "ask the operator of the daemon for a new one"
_MOST_TENANTS = 1 << 16
_UNKNOWN = "this peer is known by neither token, user nor group"
_UNKNOWN_HINT = "pass a valid token (KVSTORE_TOKEN), or ask the operator of the daemon for access"


class Role(IntEnum):
    """Rights of a peer: to read blocks; to write them too; to publish and delete namespaces too."""

    READ = 0
    WRITE = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated peer, until `expires` (Unix time, s). An `operator` may administer every tenant."""

    tenant: int
    name: str
    role: Role
    operator: bool
    expires: float = math.inf


class RefusedError(KVStoreError):
    """Refuses an unknown peer. The message does not reveal which tenants exist."""


class Authenticator:
    """All tenants of one daemon. A tenant keeps its number while the process runs; "default" has 0."""

    def __init__(self, config: Config, own_uid: int | None = None) -> None:
        """`own_uid`: user of the daemon, who is an operator like root; None: this process's user."""
        # Containers have a root user too: with a socket for operators, peers of the other socket are none.
        self._apart = config.daemon.operator_socket is not None
        self._numbers = {DEFAULT: 0}
        self._names = [DEFAULT]
        self._own_uid = os.getuid() if own_uid is None else own_uid
        self._configured: dict[str, Tenant] = {}
        self.reload(config)

    def reload(self, config: Config) -> None:
        """Applies the configured tenants. A removed tenant keeps its number and loses its members."""
        for name in config.tenants:
            self.add(name)
        self._configured = dict(config.tenants)

    def number(self, name: str) -> int | None:
        """Returns the number of a tenant, None if there is no tenant of this name."""
        return self._numbers.get(name)

    def existing(self, name: str) -> int:
        """Returns the number of a tenant. Raises MisuseError if there is no such tenant."""
        number = self._numbers.get(name)
        if number is None:
            raise MisuseError(f"there is no tenant {name!r:.80}", "`kvstore tenant list` names them")
        return number

    def name(self, number: int) -> str:
        """Returns the name of a tenant. Raises IndexError for an unused number."""
        return self._names[number]

    def names(self) -> list[str]:
        """Returns all tenants by number: configured tenants, and tenants of recovered blocks."""
        return list(self._names)

    def add(self, name: str) -> int:
        """Returns the number of a tenant, a new one if it has none. Raises MisuseError for invalid names."""
        number = self._numbers.get(check_tenant(name))
        if number is None:
            number = len(self._names)
            if number >= _MOST_TENANTS:
                raise ConfigError(f"no room for tenant {name}: there were {number}", "restart the daemon")
            self._numbers[name] = number
            self._names.append(name)
        return number

    def is_privileged(self, uid: int) -> bool:
        """Returns whether a user is root or the daemon's user, who can open the daemon's files anyway."""
        return uid in (0, self._own_uid)

    def identify(
        self, uid: int, gids: Sequence[int], token: str, now: float, among_operators: bool = False
    ) -> Principal:
        """Returns a peer's principal, by its token, else its user, else its groups, the primary group first.

        `now` is Unix time (s). `among_operators`: the peer uses the operators' socket. Raises RefusedError,
        with the same text for every reason except an expired token.
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
            role = Role[self._configured[name].role.upper()]
            return Principal(self._numbers[name], name, role, operator)
        if operator:
            return Principal(0, DEFAULT, Role.ADMIN, operator=True)
        raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)

    def _by_token(self, token: str, now: float) -> Principal:
        owners = {each: name for name, tenant in self._configured.items() for each in tenant.tokens}
        found = find_token(token, owners)
        if found is None:
            raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)
        if now >= found.ends:
            raise RefusedError(EXPIRED, EXPIRED_HINT)
        name, role = owners[found], Role[found.role.upper()]
        # Engines often run as root: a peer with a token gets only the rights of the token.
        return Principal(self._numbers[name], name, role, operator=False, expires=found.ends)

    def _owner(self, ids: Collection[int], kind: Literal["uids", "gids"]) -> str | None:
        """Returns the tenant that has one of these ids. Raises RefusedError if several tenants have."""
        named = self._configured.items()
        names = [name for name, tenant in named if not set(ids).isdisjoint(getattr(tenant, kind))]
        if len(names) > 1:
            raise RefusedError(_UNKNOWN, _UNKNOWN_HINT)
        return names[0] if names else None


def new_token(random_bytes: bytes) -> str:
    """Returns a token of 32 random bytes."""
    assert len(random_bytes) == 32
    return "kvs_" + urlsafe_b64encode(random_bytes).decode().rstrip("=")


def find_token(token: str, known: Iterable[_S]) -> _S | None:
    """Returns the secret that matches a token, None if none does."""
    digest, found = hash_of(token), None
    # Comparing all secrets takes the same time for every token.
    for each in known:
        if hmac.compare_digest(each.digest, digest):
            found = each
    return found


def hash_of(token: str) -> bytes:
    """Returns the hash that a configuration stores. SHA-256 is safe here: a token has 256 random bits."""
    return hashlib.sha256(token.encode()).digest()
