"""Requests to one Valkey server or to the nodes of a cluster, by the slots of their keys.

Connections are kept for later requests. A cluster's slots are fetched again when nodes redirect requests or
fail.
"""

from __future__ import annotations

import binascii
import logging
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.tiers.network.base import NetworkError
from kvstore.tiers.network.resolver import Address, NoAnswer, Resolver
from kvstore.tiers.network.valkey.connection import WINDOW_BYTES, Connection, Request, exchange
from kvstore.tiers.network.valkey.errors import judge_hello
from kvstore.tiers.network.valkey.resp import Refusal, Reply, command

_log = logging.getLogger(__name__)

_MOST_REDIRECTS = 4
"""Redirections of one request that are followed."""

_FETCH_EVERY_S = 1.0  # at most one fetch of the slots per this time, also while a cluster fails
_UNSETTLED = ("CLUSTERDOWN", "READONLY")  # replies during a failover
_ASKING = command("ASKING")
_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address, TLS settings and login of a server or cluster. Database 0 is not selected.

    The server expires blocks after `ttl_s` (0: never). Every key begins with `prefix`.
    """

    seeds: tuple[Address, ...]
    cluster: bool = False
    database: int = 0
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    ttl_s: int = 0
    prefix: str = ""


class Cluster:
    """Sends requests. Any thread may call; `threads` of them at a time, the others wait."""

    def __init__(self, endpoint: Endpoint, threads: int) -> None:
        self._endpoint = endpoint
        self._permits = threading.BoundedSemaphore(threads)
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._closed = threading.Event()
        self._resolver = Resolver()
        self._updating = threading.Lock()
        self._slots: list[Address | None] | None = None
        self._stale = endpoint.cluster
        self._updated_at = 0.0
        self._unresponsive: set[Address] = set()  # nodes that failed in their last exchange

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def ask(
        self, requests: Sequence[Request], ends: float, wrapper: tuple[bytes, bytes] | None = None
    ) -> None:
        """Sends requests to the nodes of their keys. A request without a reply by `ends` stays unanswered.

        `wrapper`: commands before and behind those that go to one node. Raises NetworkError.
        """
        with self._permit(ends) as permitted:
            for _ in range(1 + _MOST_REDIRECTS):
                if not requests or not permitted:
                    return
                batches = self._by_node(requests, ends)
                self._exchange(batches, ends, wrapper)
                requests = [
                    request
                    for node, batch in batches.items()
                    for request in batch
                    if self._redirected(node, request)
                ]

    def ask_at(self, node: Address, requests: Sequence[Request], ends: float) -> None:
        """Sends requests to one node."""
        with self._permit(ends) as permitted:
            if permitted:
                self._exchange({node: list(requests)}, ends)

    def primaries(self, ends: float) -> list[Address]:
        """Returns the primary nodes."""
        with self._permit(ends) as permitted:
            if permitted:
                self._stale |= self._slots is None
                self._update_slots(ends)
        if self._slots is None:
            return [self._endpoint.seeds[0]]
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def close(self) -> None:
        """Closes idle connections. Calls under way end soon, later calls at once."""
        self._closed.set()
        with self._lock:
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()

    @contextmanager
    def _permit(self, ends: float) -> Iterator[bool]:
        """Takes one of the `threads` permits. Yields False if there is none by `ends` or after `close`."""
        permitted = not self.closed and self._permits.acquire(timeout=max(0.0, ends - time.monotonic()))
        try:
            yield permitted and not self.closed and time.monotonic() < ends
        finally:
            if permitted:
                self._permits.release()

    def _by_node(self, requests: Sequence[Request], ends: float) -> dict[Address, list[Request]]:
        """Groups requests by node. Leaves out those whose slot has no node."""
        self._update_slots(ends)
        batches: dict[Address, list[Request]] = {}
        for request in requests:
            node = request.asked_at or self._node_of(request.key)
            if node is None:
                self._stale = True
            else:
                batches.setdefault(node, []).append(request)
        return batches

    def _node_of(self, key: bytes) -> Address | None:
        return self._endpoint.seeds[0] if self._slots is None else self._slots[_slot_of(key)]

    def _redirected(self, node: Address, request: Request) -> bool:
        """Returns whether a node redirected a request, and prepares it for the other node."""
        asked, request.asked_at = request.asked_at, None
        if not isinstance(request.reply, Refusal):
            return False
        where = _redirection(request.reply, node)
        if where is None:
            self._stale |= request.reply.code in _UNSETTLED
            return False
        permanent, slot, address = where
        if permanent:
            self._stale = True
            if self._slots is not None:
                self._slots[slot] = address
        else:
            request.asked_at = address
        request.reply, request.answered = None, False
        return asked is None or permanent

    def _exchange(
        self, batches: dict[Address, list[Request]], ends: float, wrapper: tuple[bytes, bytes] | None = None
    ) -> None:
        """Sends batches to nodes in parallel. Retries once if a node had closed a kept connection."""
        for fresh in (False, True):
            connections: dict[Address, Connection] = {}
            failed: dict[Address, Exception] = {}
            for node in batches:
                try:
                    connections[node] = self._take_connection(node, ends, fresh)
                except (OSError, NoAnswer) as error:
                    failed[node] = error
            reused = {node for node, connection in connections.items() if connection.reused}
            wrapped = [(each, _wrap(batches[node], wrapper)) for node, each in connections.items()]
            exchange(wrapped, ends, self._closed.is_set)
            for node, connection in connections.items():
                self._put_back(connection)
                if connection.broken is not None:
                    failed[node] = connection.broken
            self._unresponsive = self._unresponsive - set(batches) | set(failed)
            again = {n for n in failed if n in reused and not connections[n].heard and not _late(failed[n])}
            self._raise_fatal({n: error for n, error in failed.items() if n not in again}, connections)
            batches = {node: batches[node] for node in again}
            if not batches:
                return

    def _raise_fatal(self, failed: dict[Address, Exception], connections: dict[Address, Connection]) -> None:
        """Raises errors of the system as a whole. An error of one cluster node only fails its blocks."""
        for node, error in failed.items():
            self._stale |= self._slots is not None
            if isinstance(error, NetworkError) and (error.fatal or self._slots is None):
                raise NetworkError(f"{node}: {error.message}", error.hint, error.fatal) from None
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = "for a private CA, add ?ca=FILE to network.url"
                raise NetworkError(f"{node}: {error.verify_message}", hint, fatal=True) from None
            unknown = node not in connections or not connections[node].greeted
            if self._slots is None and unknown and not _late(error):
                hint = "is the server up, and is network.url right?"
                raise NetworkError(f"cannot connect to {node}: {error}", hint) from None
            _log.debug("%s: %s", node, error)

    def _take_connection(self, node: Address, ends: float, fresh: bool) -> Connection:
        """Takes an idle connection, or opens one. Raises OSError and NoAnswer."""
        with self._lock:
            idle = [] if fresh else self._idle.get(node, [])
            if idle:
                return idle.pop()
        addresses = self._resolver.resolve(node, ends)
        return Connection(node, addresses, self._endpoint.tls, list(self._hello()))

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.broken is None and not self.closed:
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close()

    def _hello(self) -> Iterator[Request]:
        """Yields a connection's first commands. Each fills the window: its reply comes before the next."""
        endpoint = self._endpoint
        login = command("AUTH", *([endpoint.user] if endpoint.user else []), endpoint.password)
        commands = [login if endpoint.password else command("PING")]
        if endpoint.database:
            commands.append(command("SELECT", endpoint.database))
        for sent in commands:
            yield Request([sent], judge=judge_hello, weight=WINDOW_BYTES)

    def _update_slots(self, ends: float) -> None:
        """Fetches a cluster's slots if they are unknown or have changed."""
        if not self._stale or not self._updating.acquire(timeout=max(0.0, ends - time.monotonic())):
            return
        try:
            if self._stale and (self._slots is None or time.monotonic() - self._updated_at >= _FETCH_EVERY_S):
                self._stale = False
                failure = self._fetch_slots(ends)
                self._updated_at = time.monotonic()
                if self._slots is None and failure is not None and not self.closed:
                    self._stale = self._endpoint.cluster
                    raise failure
        finally:
            self._updating.release()

    def _fetch_slots(self, ends: float) -> NetworkError | None:
        """Asks nodes in turn, each with its share of the time. Returns the error if none answers."""
        known = dict.fromkeys(node for node in self._slots or () if node is not None)
        nodes = sorted(dict.fromkeys([*known, *self._endpoint.seeds]), key=self._unresponsive.__contains__)
        failure = NetworkError("no node of the cluster answered in time")
        for i, node in enumerate(nodes):
            request = Request([command("CLUSTER", "SLOTS")])
            now = time.monotonic()
            try:
                self._exchange({node: [request]}, now + (ends - now) / (len(nodes) - i))
            except NetworkError as error:
                failure = error
                if error.fatal:
                    break
            if slots := _parse_slots(request.reply, node):
                self._slots = slots
                return None
            if isinstance(request.reply, Refusal) and not self._endpoint.cluster:
                return None
            if isinstance(request.reply, Refusal):
                hint = "name a single server with one host in network.url"
                what = f"{node} does not tell its slots: {request.reply.text}"
                failure = NetworkError(what, hint, fatal=True)
        return failure


def _late(error: Exception) -> bool:
    return isinstance(error, NoAnswer)


def _wrap(requests: Sequence[Request], wrapper: tuple[bytes, bytes] | None) -> list[Request]:
    asked: list[Request] = []
    for request in requests:
        if request.asked_at is not None:
            asked.append(Request([_ASKING]))
        asked.append(request)
    if wrapper is None:
        return asked
    return [Request([wrapper[0]]), *asked, Request([wrapper[1]])]


def _slot_of(key: bytes) -> int:
    """Returns the slot of a key without braces."""
    return binascii.crc_hqx(key, 0) % _SLOTS


def _parse_slots(reply: Reply, asked: Address) -> list[Address | None] | None:
    """Returns the node of each slot from a reply to CLUSTER SLOTS of `asked`, None if it is malformed."""
    if not isinstance(reply, list):
        return None
    slots: list[Address | None] = [None] * _SLOTS
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < _SLOTS:
                name = host.decode() if isinstance(host, bytes) else ""
                slots[first : last + 1] = [_address(name, port, asked)] * (last + 1 - first)
            case _:
                return None
    return slots


def _redirection(refusal: Refusal, asked: Address) -> tuple[bool, int, Address] | None:
    """Parses MOVED and ASK. Returns whether the redirection is permanent, the slot and the node."""
    match refusal.text.split():
        case ["MOVED" | "ASK" as word, slot, address] if slot.isdecimal() and int(slot) < _SLOTS:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and 0 < int(port) < 1 << 16:
                return word == "MOVED", int(slot), _address(host.strip("[]"), int(port), asked)
    return None


def _address(host: str, port: int, asked: Address) -> Address:
    """Returns a node's address. A node that does not know its own host has the one it was asked at."""
    return Address(host if host not in ("", "?") else asked.host, port)
