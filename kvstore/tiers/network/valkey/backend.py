"""The backend for Valkey and Redis, a single server or a cluster. A block is a string: header, then payload.

Payloads are copied directly between slots and sockets. The server evicts. Configure it with `maxmemory`, with
`maxmemory-policy allkeys-lru` (`volatile-lru` and `?ttl=` if it has other data), and without persistence.
`health` logs a warning if the server never evicts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial

from kvstore.errors import printable
from kvstore.tiers.network import BackendSettings, objects
from kvstore.tiers.network.base import Backend, Listed, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.cluster import Cluster, Endpoint
from kvstore.tiers.network.valkey.connection import SMALL_BYTES, Request
from kvstore.tiers.network.valkey.errors import Judge, with_refusals
from kvstore.tiers.network.valkey.resp import Refusal, Reply, command, command_around
from kvstore.tiers.network.valkey.url import parse

_log = logging.getLogger(__name__)

_SCAN_KEYS = 500
_COUNTED_KEYS = 512  # a server does nothing else meanwhile: about 0.2 ms
# A list must not count as a use of every block. Older servers refuse the command without harm.
_NO_TOUCH = command("CLIENT", "NO-TOUCH", "ON"), command("CLIENT", "NO-TOUCH", "OFF")


def open_url(settings: BackendSettings) -> Valkey:
    """Returns the backend of a `redis://`, `rediss://` or `unix://` URL (see `url`). Raises ConfigError."""
    return Valkey(parse(settings.url, settings.user, settings.password), settings.threads)


class Valkey(Backend):
    """Blocks on a server or cluster. Does not trust lengths and names that a server sends."""

    kind = "valkey"

    def __init__(self, endpoint: Endpoint, threads: int) -> None:
        self._prefix = endpoint.prefix
        self._ttl_s = endpoint.ttl_s
        self._clustered = endpoint.cluster
        self._cluster = Cluster(endpoint, threads)
        self._warned: set[str] = set()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        if self._clustered:
            return self._probe_each(names, ends)
        # Of a chain, most often all objects exist, or none: one command counts many of them.
        parts = [names[at : at + _COUNTED_KEYS] for at in range(0, len(names), _COUNTED_KEYS)]
        counts = [Request([command("EXISTS", *map(self._key, part))]) for part in parts]
        self._cluster.ask(counts, ends)
        outcomes: list[Outcome] = []
        for part, count in zip(parts, counts, strict=True):
            if count.answered and count.reply not in (0, len(part)):
                outcomes += self._probe_each(part, ends)
            else:
                outcomes += [_judge_exists(count.reply)] * len(part)
        return outcomes

    def _probe_each(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        return self._run([self._request("EXISTS", name, _judge_exists) for name in names], ends)

    def read(self, objects_: Sequence[Object], ends: float) -> list[Outcome]:
        return self._run([self._get(thing) for thing in objects_], ends)

    def write(self, objects_: Sequence[Object], ends: float) -> list[Outcome]:
        return self._run([self._set(thing) for thing in objects_], ends)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        return self._run([self._request("UNLINK", name, _judge_count) for name in names], ends)

    def _run(self, requests: Sequence[Request], ends: float) -> list[Outcome]:
        self._cluster.ask(requests, ends)
        return [request.outcome for request in requests]

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        """Ages are measured with the writers' clocks, without a valid header since 1970.

        Objects that are added, deleted or moved between nodes meanwhile may be missing.
        """
        seen: set[int] = set()
        for node in self._cluster.primaries(ends):
            for names in self._scan(node, namespace, ends):
                new = [name for name in dict.fromkeys(names) if hash(name) not in seen]
                seen.update(map(hash, new))
                yield from self._describe(new, ends)

    def health(self, ends: float) -> None:
        """Also pings all nodes of a cluster."""
        key = f"{self._prefix}{objects.ROOT}-health/{os.urandom(8).hex()}".encode()
        value = os.urandom(16)
        nodes = self._cluster.primaries(ends)
        for node in nodes:
            self._reply(Request([command("PING")]), ends, node)
        self._reply(Request([command("SET", key, value, "EX", 60)], key), ends)
        if self._reply(Request([command("GET", key)], key), ends) != value:
            raise NetworkError("the value read differs from the value written")
        self._reply(Request([command("UNLINK", key)], key), ends)
        for node in nodes:
            self._check_memory(node, ends)

    def close(self) -> None:
        self._cluster.close()

    def _key(self, name: Name) -> bytes:
        return (self._prefix + objects.path(name)).encode()

    def _request(self, verb: str, name: Name, judge: Judge) -> Request:
        key = self._key(name)
        return Request([command(verb, key)], key, with_refusals(judge))

    def _get(self, thing: Object) -> Request:
        key, raw = self._key(thing.name), bytearray(objects.HEADER_BYTES)
        return Request(
            [command("GET", key)],
            key,
            with_refusals(partial(_judge_get, thing, raw)),
            (memoryview(raw), thing.memory[: thing.length]),
            SMALL_BYTES + objects.HEADER_BYTES + thing.length,
        )

    def _set(self, thing: Object) -> Request:
        key = self._key(thing.name)
        expiry = (b"EX", b"%d" % self._ttl_s) if self._ttl_s else ()
        before, behind = command_around((b"SET", key), objects.HEADER_BYTES + thing.length, expiry)
        head = before + objects.header(thing)
        return Request([head, thing.memory[: thing.length], behind], key, with_refusals(_judge_set))

    def _reply(self, request: Request, ends: float, node: Address | None = None) -> Reply:
        """Returns the reply to one request. Raises NetworkError if it is refused or has no reply."""
        if node is None:
            self._cluster.ask([request], ends)
        else:
            self._cluster.ask_at(node, [request], ends)
        if not request.answered:
            raise NetworkError("no answer in time" if not self._cluster.closed else "closed")
        if isinstance(request.reply, Refusal):
            with_refusals(_judge_count)(request.reply)
            raise NetworkError(request.reply.text)
        return request.reply

    def _scan(self, node: Address, namespace: bytes | None, ends: float) -> Iterator[Sequence[Name]]:
        """Yields names of a node's objects, some of them twice."""
        folder = objects.ROOT if namespace is None else objects.folder(namespace)
        pattern = f"{self._prefix}{folder}/*"
        cursor = b"0"
        while True:
            request = Request([command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)])
            match self._reply(request, ends, node):
                case [bytes(cursor), list(keys)]:
                    yield list(self._names(keys))
                case _:
                    raise NetworkError(f"{node}: malformed reply to SCAN", "is it a Valkey or Redis server?")
            if cursor == b"0":
                return

    def _names(self, keys: Sequence[Reply]) -> Iterator[Name]:
        for key in keys:
            if isinstance(key, bytes) and key.startswith(self._prefix.encode()):
                name = objects.name_of(key[len(self._prefix) :].decode("latin-1"))
                if name is not None:
                    yield name

    def _describe(self, names: Sequence[Name], ends: float) -> Iterator[Listed]:
        """Yields sizes and ages of existing objects."""
        keys = [self._key(name) for name in names]
        lengths = [Request([command("STRLEN", key)], key) for key in keys]
        last = objects.HEADER_BYTES - 1
        headers = [Request([command("GETRANGE", key, 0, last)], key) for key in keys]
        self._cluster.ask([*lengths, *headers], ends, _NO_TOUCH)
        for name, length, header in zip(names, lengths, headers, strict=True):
            if not length.answered or not header.answered:
                raise NetworkError("the list did not end in time")
            if isinstance(length.reply, int) and isinstance(header.reply, bytes) and length.reply:
                found = objects.parse(header.reply)
                yield Listed(name, length.reply, time.time() - (found.stored_at if found else 0.0))

    def _check_memory(self, node: Address, ends: float) -> None:
        """Logs a server's eviction settings once if they are wrong."""
        request = Request([command("INFO", "memory")])
        self._cluster.ask_at(node, [request], ends)
        if not isinstance(request.reply, bytes):
            return
        lines = request.reply.decode("latin-1").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = printable(info.get("maxmemory_policy", "")[:40])
        if info.get("maxmemory") == "0":
            self._warn(
                f"{node} has no maxmemory: it may use all memory", "set maxmemory and maxmemory-policy"
            )
        elif policy == "noeviction" or (policy.startswith("volatile-") and not self._ttl_s):
            self._warn(f"{node} will never evict blocks: maxmemory-policy is {policy}", "set allkeys-lru")

    def _warn(self, what: str, hint: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s (%s)", what, hint)


def _judge_get(thing: Object, raw: bytearray, reply: Reply) -> Outcome:
    """Verifies an object that GET has received into memory."""
    if reply is None:
        return Outcome.MISSING
    return objects.settle(thing, raw) if reply == objects.HEADER_BYTES + thing.length else Outcome.TORN


def _judge_set(reply: Reply) -> Outcome:
    return Outcome.OK if reply == b"OK" else Outcome.FAILED


def _judge_exists(reply: Reply) -> Outcome:
    if not isinstance(reply, int):
        return Outcome.FAILED
    return Outcome.OK if reply else Outcome.MISSING


def _judge_count(reply: Reply) -> Outcome:
    return Outcome.OK if isinstance(reply, int) else Outcome.FAILED
