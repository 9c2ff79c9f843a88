"""The handshake: chooses the wire version, and identifies the peer by user, group or token."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.daemon.server.peer_credentials import Peer
from kvstore.daemon.tenancy.auth import Authenticator, Principal, RefusedError
from kvstore.errors import RemoteProtocolError
from kvstore.wire import messages as m


class VersionError(RefusedError):
    """The client and this daemon have no wire version in common."""


@dataclass(slots=True)
class Handshake:
    """The credentials of one peer. `_among_operators`: the peer connected to the operators' socket."""

    peer: Peer
    _authenticator: Authenticator
    _among_operators: bool
    version: int = m.VERSION
    _token: str = ""

    def greet(self, hello: m.Hello, now: float) -> Principal:
        """Reads the peer's Hello and returns its principal. `now` is Unix time in s.

        Raises RefusedError, or RemoteProtocolError for a peer that is no kvstore client.
        """
        if hello.magic != m.MAGIC:
            raise RemoteProtocolError("not a kvstore client, or a second Hello")
        self.version = min(hello.newest, m.VERSION)
        if self.version < max(hello.version, m.OLDEST):
            theirs, ours = m.span(hello.version, hello.newest), m.span(m.OLDEST, m.VERSION)
            older = "client" if hello.newest < m.OLDEST else "daemon"
            raise VersionError(f"the client speaks {theirs}, this daemon {ours}", f"upgrade the {older}")
        self._token = hello.token
        return self.identify(now)

    def identify(self, now: float) -> Principal:
        """Returns the peer's principal at `now`, Unix time in s. Raises RefusedError if it has none."""
        peer = self.peer
        return self._authenticator.identify(peer.uid, peer.gids, self._token, now, self._among_operators)
