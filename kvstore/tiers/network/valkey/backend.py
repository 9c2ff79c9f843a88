"""Blocks in Valkey or Redis, on one server or a cluster: a string a block, its header and its payload.

Payloads go straight between slots and sockets. What is kept for how long is the server's to say: give it a
`maxmemory` with `maxmemory-policy allkeys-lru` (`volatile-lru` beside other data, with `?ttl=`) and no
persistence; `health` logs it if nothing is ever evicted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial

from kvstore.errors import printable
from kvstore.tiers.network import BackendSettings, objects
from kvstore.tiers.network.base import Listed, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.cluster import Cluster
from kvstore.tiers.network.valkey.connection import SMALL_BYTES, Request
from kvstore.tiers.network.valkey.errors import Judge, judged
from kvstore.tiers.network.valkey.resp import Refusal, Reply, command, command_around
from kvstore.tiers.network.valkey.url import Target, parse

_log = logging.getLogger(__name__)

_SCAN_KEYS = 500
# So that a list does not make every block the one used last. Servers that don't know it refuse it, no more.
_UNTOUCHED = command("CLIENT", "NO-TOUCH", "ON"), command("CLIENT", "NO-TOUCH", "OFF")


def open_url(settings: BackendSettings) -> Valkey:
    """The backend of a `redis://`, `rediss://` or `unix://` URL: see `url`. Raises ConfigError."""
    return Valkey(parse(settings.url, settings.user, settings.password), settings.threads)


class Valkey:
    """A `Backend`. It takes what a server says of lengths and names for a claim."""

    kind = "valkey"

    def __init__(self, target: Target, threads: int) -> None:
        self._prefix = target.prefix
        self._ttl_s = target.ttl_s
        self._nodes = Cluster(target.place, threads)
        self._warned: set[str] = set()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.probe`."""
        return _outcomes(self._nodes, [self._plain("EXISTS", name, _exists) for name in names], ends)

    def read(self, objects_: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.read`."""
        return _outcomes(self._nodes, [self._get(thing) for thing in objects_], ends)

    def write(self, objects_: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.write`."""
        return _outcomes(self._nodes, [self._set(thing) for thing in objects_], ends)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.delete`."""
        return _outcomes(self._nodes, [self._plain("UNLINK", name, _counted) for name in names], ends)

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        """See `Backend.list`; raises NetworkError if it does not get to the end in time.

        Ages are by the writers' clocks, and 1970 where a header is none. What comes or goes meanwhile, or
        moves between nodes, may be missing.
        """
        seen: set[int] = set()
        for node in self._nodes.primaries(ends):
            for names in self._scan(node, namespace, ends):
                new = [name for name in dict.fromkeys(names) if hash(name) not in seen]
                seen.update(map(hash, new))
                yield from self._looked_at(new, ends)

    def health(self, ends: float) -> None:
        """See `Backend.health`. A cluster's other nodes are asked for a sign of life."""
        key = f"{self._prefix}{objects.ROOT}-health/{os.urandom(8).hex()}".encode()
        said = os.urandom(16)
        nodes = self._nodes.primaries(ends)
        for node in nodes:
            self._answer(Request([command("PING")]), ends, node)
        self._answer(Request([command("SET", key, said, "EX", 60)], key), ends)
        if self._answer(Request([command("GET", key)], key), ends) != said:
            raise NetworkError("what was written is not what is read")
        self._answer(Request([command("UNLINK", key)], key), ends)
        for node in nodes:
            self._look_at_memory(node, ends)

    def close(self) -> None:
        """See `Backend.close`."""
        self._nodes.close()

    def _key(self, name: Name) -> bytes:
        return (self._prefix + objects.path(name)).encode()

    def _plain(self, verb: str, name: Name, judge: Judge) -> Request:
        key = self._key(name)
        return Request([command(verb, key)], key, judged(judge))

    def _get(self, thing: Object) -> Request:
        key, raw = self._key(thing.name), bytearray(objects.HEADER_BYTES)
        return Request(
            [command("GET", key)],
            key,
            judged(partial(_settled, thing, raw)),
            (memoryview(raw), thing.memory[: thing.length]),
            SMALL_BYTES + objects.HEADER_BYTES + thing.length,
        )

    def _set(self, thing: Object) -> Request:
        key = self._key(thing.name)
        expiry = (b"EX", b"%d" % self._ttl_s) if self._ttl_s else ()
        before, behind = command_around((b"SET", key), objects.HEADER_BYTES + thing.length, expiry)
        head = before + objects.header(thing)
        return Request([head, thing.memory[: thing.length], behind], key, judged(_stored))

    def _answer(self, request: Request, ends: float, node: Address | None = None) -> Reply:
        """The answer to one request. Raises NetworkError where it is refused, or there is none."""
        if node is None:
            self._nodes.ask([request], ends)
        else:
            self._nodes.ask_at(node, [request], ends)
        if not request.answered:
            raise NetworkError("no answer in time" if not self._nodes.closed else "closed")
        if isinstance(request.reply, Refusal):
            judged(_counted)(request.reply)
            raise NetworkError(request.reply.text)
        return request.reply

    def _scan(self, node: Address, namespace: bytes | None, ends: float) -> Iterator[Sequence[Name]]:
        """Names of ours that a node has, some of them twice."""
        place = objects.ROOT if namespace is None else objects.folder(namespace)
        at = b"0"
        while True:
            request = Request([command("SCAN", at, "MATCH", f"{self._prefix}{place}/*", "COUNT", _SCAN_KEYS)])
            match self._answer(request, ends, node):
                case [bytes(at), list(keys)]:
                    yield list(self._names(keys))
                case _:
                    raise NetworkError(f"{node}: no answer to SCAN", "is it a Valkey or Redis server?")
            if at == b"0":
                return

    def _names(self, keys: Sequence[Reply]) -> Iterator[Name]:
        for key in keys:
            if isinstance(key, bytes) and key.startswith(self._prefix.encode()):
                name = objects.name_of(key[len(self._prefix) :].decode("latin-1"))
                if name is not None:
                    yield name

    def _looked_at(self, names: Sequence[Name], ends: float) -> Iterator[Listed]:
        """What there is under these names."""
        keys = [self._key(name) for name in names]
        lengths = [Request([command("STRLEN", key)], key) for key in keys]
        last = objects.HEADER_BYTES - 1
        headers = [Request([command("GETRANGE", key, 0, last)], key) for key in keys]
        self._nodes.ask([*lengths, *headers], ends, _UNTOUCHED)
        for name, length, header in zip(names, lengths, headers, strict=True):
            if not length.answered or not header.answered:
                raise NetworkError("the list was not done in time")
            if isinstance(length.reply, int) and isinstance(header.reply, bytes) and length.reply:
                found = objects.parse(header.reply)
                yield Listed(name, length.reply, time.time() - (found.stored_at if found else 0.0))

    def _look_at_memory(self, node: Address, ends: float) -> None:
        """Logs, once, what is wrong with how a server makes room."""
        request = Request([command("INFO", "memory")])
        self._nodes.ask_at(node, [request], ends)
        if not isinstance(request.reply, bytes):
            return
        lines = request.reply.decode("latin-1").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = printable(info.get("maxmemory_policy", "")[:40])
        if info.get("maxmemory") == "0":
            self._warn(f"{node} has no maxmemory: it takes all there is", "maxmemory, maxmemory-policy")
        elif policy == "noeviction" or (policy.startswith("volatile-") and not self._ttl_s):
            self._warn(f"{node} will be full for good: maxmemory-policy is {policy}", "allkeys-lru")

    def _warn(self, what: str, hint: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s (%s)", what, hint)


def _outcomes(nodes: Cluster, requests: list[Request], ends: float) -> list[Outcome]:
    nodes.ask(requests, ends)
    return [request.outcome for request in requests]


def _settled(thing: Object, raw: bytearray, reply: Reply) -> Outcome:
    """Judges what a GET has brought into memory."""
    if reply is None:
        return Outcome.MISSING
    return objects.settle(thing, raw) if reply == objects.HEADER_BYTES + thing.length else Outcome.TORN


def _stored(reply: Reply) -> Outcome:
    return Outcome.OK if reply == b"OK" else Outcome.FAILED


def _exists(reply: Reply) -> Outcome:
    if not isinstance(reply, int):
        return Outcome.FAILED
    return Outcome.OK if reply else Outcome.MISSING


def _counted(reply: Reply) -> Outcome:
    return Outcome.OK if isinstance(reply, int) else Outcome.FAILED
