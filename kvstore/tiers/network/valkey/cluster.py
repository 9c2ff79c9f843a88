"""One Valkey server, or the nodes of a cluster: requests go to where their keys are."""

from __future__ import annotations

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
from kvstore.tiers.network.valkey.errors import greeted
from kvstore.tiers.network.valkey.resp import Refusal, command
from kvstore.tiers.network.valkey.slot_map import parse_slots, redirection, slot_of

_log = logging.getLogger(__name__)

_FOLLOWED = 4
"""So often in a row a request is sent elsewhere by a cluster."""

_RELEARN_S = 1.0  # a cluster in trouble is not asked for its slots more often
_UNSETTLED = ("CLUSTERDOWN", "READONLY")  # nodes say so while one takes over from another
_ASKING = command("ASKING")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a URL says of a server or a cluster, and who we are there. `database` 0 is never asked for."""

    seeds: tuple[Address, ...]
    cluster: bool = False
    database: int = 0
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)


class Cluster:
    """Any number of threads may ask; `threads` of them are served at once, the others wait."""

    def __init__(self, place: Endpoint, threads: int) -> None:
        self._place = place
        self._turns = threading.BoundedSemaphore(threads)
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._closed = threading.Event()
        self._resolver = Resolver()
        self._learning = threading.Lock()
        self._slots: list[Address | None] | None = None
        self._stale = place.cluster
        self._learned_at = 0.0
        self._silent: set[Address] = set()  # of whom nothing came last

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed.is_set()

    def ask(
        self, requests: Sequence[Request], ends: float, around: tuple[bytes, bytes] | None = None
    ) -> None:
        """Has requests answered where their keys are; what is not by `ends` stays unanswered.

        `around`: commands before and behind those that go to one node. Raises NetworkError.
        """
        with self._turn(ends) as mine:
            for _ in range(1 + _FOLLOWED):
                if not requests or not mine:
                    return
                batches = self._by_node(requests, ends)
                self._exchange(batches, ends, around)
                requests = [
                    request
                    for node, batch in batches.items()
                    for request in batch
                    if self._sent_elsewhere(node, request)
                ]

    def ask_at(self, node: Address, requests: Sequence[Request], ends: float) -> None:
        """Has requests answered by this node."""
        with self._turn(ends) as mine:
            if mine:
                self._exchange({node: list(requests)}, ends)

    def primaries(self, ends: float) -> list[Address]:
        """The nodes that have keys."""
        with self._turn(ends) as mine:
            if mine:
                self._stale |= self._slots is None
                self._learn(ends)
        if self._slots is None:
            return [self._place.seeds[0]]
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def close(self) -> None:
        """Calls under way end soon, later ones at once."""
        self._closed.set()
        with self._lock:
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
        for link in idle:
            link.close()

    @contextmanager
    def _turn(self, ends: float) -> Iterator[bool]:
        """Whether the caller may go on, which it must not where the time is up."""
        mine = not self.closed and self._turns.acquire(timeout=max(0.0, ends - time.monotonic()))
        try:
            yield mine and not self.closed and time.monotonic() < ends
        finally:
            if mine:
                self._turns.release()

    def _by_node(self, requests: Sequence[Request], ends: float) -> dict[Address, list[Request]]:
        """Who is to be asked what. What nobody has is left out."""
        self._learn(ends)
        batches: dict[Address, list[Request]] = {}
        for request in requests:
            node = request.asked_at or self._home(request.key)
            if node is None:
                self._stale = True
            else:
                batches.setdefault(node, []).append(request)
        return batches

    def _home(self, key: bytes) -> Address | None:
        return self._place.seeds[0] if self._slots is None else self._slots[slot_of(key)]

    def _sent_elsewhere(self, node: Address, request: Request) -> bool:
        """Whether a node refused a request because another one has its key; readies it for that one."""
        asked, request.asked_at = request.asked_at, None
        if not isinstance(request.reply, Refusal):
            return False
        where = redirection(request.reply, node)
        if where is None:
            self._stale |= request.reply.code in _UNSETTLED
            return False
        for_good, slot, address = where
        if for_good:
            self._stale = True
            if self._slots is not None:
                self._slots[slot] = address
        else:
            request.asked_at = address
        request.reply, request.answered = None, False
        return asked is None or for_good

    def _exchange(
        self,
        batches: dict[Address, list[Request]],
        ends: float,
        around: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Has nodes answer, side by side. One that closed a connection we kept is connected to once more."""
        for fresh in (False, True):
            links: dict[Address, Connection] = {}
            failed: dict[Address, Exception] = {}
            for node in batches:
                try:
                    links[node] = self._link(node, ends, fresh)
                except (OSError, NoAnswer) as error:
                    failed[node] = error
            for node, link in links.items():
                link.ask(_wrapped(batches[node], around))
            reused = {node for node, link in links.items() if link.reused}
            exchange(list(links.values()), ends, self._closed.is_set)
            for node, link in links.items():
                self._keep(link)
                if link.broken is not None:
                    failed[node] = link.broken
            self._silent = self._silent - set(batches) | set(failed)
            again = {n for n in failed if n in reused and not links[n].heard and not _is_late(failed[n])}
            self._complain({n: error for n, error in failed.items() if n not in again}, links)
            batches = {node: batches[node] for node in again}
            if not batches:
                return

    def _complain(self, failed: dict[Address, Exception], links: dict[Address, Connection]) -> None:
        """Raises what is wrong with the system as a whole; of one node of a cluster, its blocks tell."""
        for node, error in failed.items():
            self._stale |= self._slots is not None
            if isinstance(error, NetworkError) and (error.fatal or self._slots is None):
                raise NetworkError(f"{node}: {error.message}", error.hint, error.fatal) from None
            if isinstance(error, ssl.SSLCertVerificationError):
                raise NetworkError(
                    f"{node}: {error.verify_message}", "a CA of your own: ?ca=FILE in network.url", fatal=True
                ) from None
            strange = node not in links or not links[node].greeted
            if self._slots is None and strange and not _is_late(error):
                raise NetworkError(
                    f"{node} can't be connected to: {error}", "is the server up, and network.url right?"
                ) from None
            _log.debug("%s: %s", node, error)

    def _link(self, node: Address, ends: float, fresh: bool) -> Connection:
        """A connection for the caller alone. Raises OSError, NoAnswer."""
        with self._lock:
            idle = [] if fresh else self._idle.get(node, [])
            if idle:
                return idle.pop()
        places = self._resolver.places(node, ends)
        return Connection(node, places, self._place.tls, list(self._hello()))

    def _keep(self, link: Connection) -> None:
        if link.broken is None:
            with self._lock:
                if not self.closed:
                    self._idle.setdefault(link.address, []).append(link)
                    return
        link.close()

    def _hello(self) -> Iterator[Request]:
        """What is said first on a connection. So heavy that nothing is sent before it is answered."""
        place = self._place
        login = command("AUTH", *([place.user] if place.user else []), place.password)
        said = [login if place.password else command("PING")]
        if place.database:
            said.append(command("SELECT", place.database))
        for each in said:
            yield Request([each], judge=greeted, weight=WINDOW_BYTES)

    def _learn(self, ends: float) -> None:
        """Asks a cluster who has what, if that is not known or has changed."""
        if not self._stale or not self._learning.acquire(timeout=max(0.0, ends - time.monotonic())):
            return
        try:
            if self._stale and (self._slots is None or time.monotonic() - self._learned_at >= _RELEARN_S):
                self._stale = False
                why = self._learn_of_any(ends)
                self._learned_at = time.monotonic()
                if self._slots is None and why is not None and not self.closed:
                    self._stale = self._place.cluster
                    raise why
        finally:
            self._learning.release()

    def _learn_of_any(self, ends: float) -> NetworkError | None:
        """Asks nodes in turn, each with its share of the time. Why none told, if so."""
        known = dict.fromkeys(node for node in self._slots or () if node is not None)
        nodes = sorted(dict.fromkeys([*known, *self._place.seeds]), key=self._silent.__contains__)
        why = NetworkError("no node of the cluster answered in time")
        for i, node in enumerate(nodes):
            request = Request([command("CLUSTER", "SLOTS")])
            now = time.monotonic()
            try:
                self._exchange({node: [request]}, now + (ends - now) / (len(nodes) - i))
            except NetworkError as error:
                why = error
                if error.fatal:
                    break
            if slots := parse_slots(request.reply, node):
                self._slots = slots
                return None
            if isinstance(request.reply, Refusal) and not self._place.cluster:
                return None
            if isinstance(request.reply, Refusal):
                why = NetworkError(
                    f"{node} tells no slots: {request.reply.text}",
                    "network.url: one host, or is it a cluster?",
                    fatal=True,
                )
        return why


def _is_late(error: Exception) -> bool:
    return isinstance(error, NoAnswer)


def _wrapped(requests: Sequence[Request], around: tuple[bytes, bytes] | None) -> list[Request]:
    asked: list[Request] = []
    for request in requests:
        if request.asked_at is not None:
            asked.append(Request([_ASKING]))
        asked.append(request)
    if around is None:
        return asked
    return [Request([around[0]]), *asked, Request([around[1]])]
