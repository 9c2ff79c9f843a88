"""Blocks in a Mooncake store: memory that nodes lend each other, and a master that knows where what is.

Mooncake evicts by itself, and forgets what was in the memory of a node that has gone. It can't be asked what
it holds, nor for how long. A value is an object's header and payload, its key the object's path (`objects`).
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvstore.arena import checksum, copy, seed
from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings, objects
from kvstore.tiers.network.base import Backend, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.mooncake.subprocess_pool import SubprocessPool, Worker, ask
from kvstore.tiers.network.objects import HEADER_BYTES
from kvstore.types import ALIGN

# What Mooncake answers is an ErrorCode of its mooncake-store/include/types.h where it is below 0.
_NO_ROOM = -200  # NO_AVAILABLE_HANDLE: no memory, or none as large as that
_BAD_PARAMETERS = -600  # INVALID_PARAMS: when reading, there is more than the buffer holds
_NOT_READY = -703  # REPLICA_IS_NOT_READY: somebody is writing it
_NOT_FOUND = -704  # OBJECT_NOT_FOUND
_EXISTS = -705  # OBJECT_ALREADY_EXISTS; puts answer 0 instead
_NO_MASTER = {-900, -901}  # RPC_FAIL, RPC_TIMEOUT

_PROBED = {1: Outcome.OK, 0: Outcome.MISSING}
_READ = {_NOT_FOUND: Outcome.MISSING, _NOT_READY: Outcome.MISSING, _BAD_PARAMETERS: Outcome.TORN}
_WRITTEN = {0: Outcome.OK, _EXISTS: Outcome.OK, _NO_ROOM: Outcome.FULL}
_DELETED = {0: Outcome.OK, _NOT_FOUND: Outcome.OK}

_PORT = 50051
_MOST_KEYS = 256
_URL = "mooncake://MASTER:50051?protocol=tcp&device=&host=&segment=0&metadata=P2PHANDSHAKE"


def open_url(settings: BackendSettings) -> Backend:
    """A Mooncake store by its master's address. ConfigError for what is wrong, or for a missing package."""
    parts = urlsplit(settings.url)
    plan = {"master": _master(parts), **_parameters(parts)}
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "network.url: mooncake:// needs the package mooncake",
            "pip install mooncake-transfer-engine, without a GPU mooncake-transfer-engine-non-cuda",
        )
    return Mooncake(plan, settings.threads)


def _master(parts: SplitResult) -> str:
    try:
        host, port = parts.hostname, parts.port or _PORT
    except ValueError as error:
        raise ConfigError(f"network.url: {error}", _URL) from error
    if not host or parts.path.strip("/") or parts.username is not None:
        raise ConfigError(f"network.url: {parts.geturl()!r:.120} names no master", _URL)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parameters(parts: SplitResult) -> dict[str, str | int]:
    given = {"protocol": "tcp", "device": "", "host": "", "segment": "0", "metadata": "P2PHANDSHAKE"}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in given:
            raise ConfigError(f"network.url: {name!r:.40} is no parameter of mooncake://", _URL)
        given[name] = value
    if given["protocol"] not in ("tcp", "rdma"):
        raise ConfigError(f"network.url: protocol={given['protocol']:.40}", "tcp or rdma")
    if not given["segment"].isdecimal():
        raise ConfigError(f"network.url: segment={given['segment']:.40}", "how many bytes, 0 for none")
    return {**given, "segment": int(given["segment"])}


class Mooncake:
    """A `Backend`. `plan`: what the client is set up with; at most `calls` are under way at once.

    A write that ends with OK may have found another node at writing the same object.
    """

    kind = "mooncake"

    def __init__(self, plan: dict[str, str | int], calls: int) -> None:
        self._master = plan["master"]
        self._lanes = SubprocessPool(plan, calls)
        self._writing: set[str] = set()
        self._written = threading.Condition()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.probe`. What was found is kept from eviction for the time of the master's leases."""
        return self._by_name("probe", names, _PROBED, ends)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.delete`. Goes also while others are reading it, who will find it torn."""
        return self._by_name("delete", names, _DELETED, ends)

    def _by_name(
        self, what: str, names: Sequence[Name], means: dict[int, Outcome], ends: float
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._lanes.one(ends) as lane:
            while lane is not None and len(outcomes) < len(names):
                some = names[len(outcomes) : len(outcomes) + _MOST_KEYS]
                codes = self._ask(lane, what, [objects.path(name) for name in some], [], [], ends)
                if codes is None:
                    break
                outcomes += [means.get(code, Outcome.FAILED) for code in codes]
        return outcomes + [Outcome.FAILED] * (len(names) - len(outcomes))

    def read(self, things: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.read`."""
        outcomes: list[Outcome] = []
        with self._lanes.one(ends) as lane:
            while lane is not None and len(outcomes) < len(things):
                some, offsets = _fitting(lane, things[len(outcomes) :])
                codes = self._move(lane, "read", some, offsets, ends)
                if codes is None:
                    break
                outcomes += map(_taken, [lane] * len(some), some, offsets, codes)
        return outcomes + [Outcome.FAILED] * (len(things) - len(outcomes))

    def write(self, things: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.write`."""
        outcomes: list[Outcome] = []
        with self._alone(things, ends) as mine, self._lanes.one(ends) as lane:
            while mine and lane is not None and len(outcomes) < len(things):
                some, offsets = _fitting(lane, things[len(outcomes) :])
                for thing, offset in zip(some, offsets, strict=True):
                    _lay(lane, thing, offset)
                codes = self._move(lane, "write", some, offsets, ends)
                if codes is None:
                    break
                outcomes += [_WRITTEN.get(code, Outcome.FAILED) for code in codes]
        return outcomes + [Outcome.FAILED] * (len(things) - len(outcomes))

    @contextmanager
    def _alone(self, things: Sequence[Object], ends: float) -> Iterator[bool]:
        """Waits until no other call writes any of these; False if that takes too long.

        Mooncake says OK of an object that somebody is still writing, and nobody can read yet.
        """
        paths = {objects.path(thing.name) for thing in things}
        with self._written:
            alone = self._written.wait_for(
                lambda: self._writing.isdisjoint(paths), max(0.0, ends - time.monotonic())
            )
            if alone:
                self._writing |= paths
        try:
            yield alone
        finally:
            if alone:
                with self._written:
                    self._writing -= paths
                    self._written.notify_all()

    def health(self, ends: float) -> None:
        """See `Backend.health`."""
        put, got = _sample(), _sample()
        got.name = put.name
        for what in ("write", "read", "delete"):
            if what == "delete":
                [outcome] = self.delete([put.name], ends)
            else:
                [outcome] = self.write([put], ends) if what == "write" else self.read([got], ends)
            if outcome is not Outcome.OK:
                hint = "has the store any memory that is free?" if outcome is Outcome.FULL else ""
                raise NetworkError(f"Mooncake at {self._master}: a {what} is {outcome.name}", hint)

    def _move(
        self, lane: Worker, what: str, things: Sequence[Object], offsets: list[int], ends: float
    ) -> list[int] | None:
        sizes = [HEADER_BYTES + thing.length for thing in things]
        return self._ask(lane, what, [objects.path(thing.name) for thing in things], offsets, sizes, ends)

    def _ask(
        self, lane: Worker, what: str, keys: list[str], offsets: list[int], sizes: list[int], ends: float
    ) -> list[int] | None:
        codes = ask(lane, (what, keys, offsets, sizes), ends)
        if codes and _NO_MASTER.issuperset(codes):
            raise NetworkError(f"the Mooncake master at {self._master} does not answer")
        return codes

    def close(self) -> None:
        """See `Backend.close`."""
        self._lanes.close()

    def list(self, namespace: bytes | None, ends: float) -> NoReturn:
        """See `Backend.list`: there is no such thing here."""
        raise NetworkError("Mooncake can't list what it holds")


def _fitting(lane: Worker, things: Sequence[Object]) -> tuple[Sequence[Object], list[int]]:
    """As many objects from the first on as a lane's memory holds, and where in it."""
    offsets, end = [], 0
    lane.fit(HEADER_BYTES + things[0].length)
    for thing in things[:_MOST_KEYS]:
        start, end = end, end + HEADER_BYTES + thing.length
        if end > len(lane.memory):
            break
        offsets.append(start)
        end += -end % ALIGN
    return things[: len(offsets)], offsets


def _lay(lane: Worker, thing: Object, offset: int) -> None:
    """Puts an object into a lane's memory as it is to be stored."""
    start = offset + HEADER_BYTES
    lane.memory[offset:start] = objects.header(thing)
    copy(lane.memory[start : start + thing.length], thing.memory[: thing.length])


def _taken(lane: Worker, thing: Object, offset: int, code: int) -> Outcome:
    """Takes what was read out of a lane's memory, and verifies it."""
    if code < 0:
        return _READ.get(code, Outcome.FAILED)
    start = offset + HEADER_BYTES
    if code != HEADER_BYTES + thing.length:
        return Outcome.TORN
    copy(thing.memory[: thing.length], lane.memory[start : start + thing.length])
    return objects.settle(thing, lane.memory[offset:start])


def _sample() -> Object:
    """A small object of nobody's."""
    name, memory = Name(bytes(16), os.urandom(16)), memoryview(mmap.mmap(-1, ALIGN))
    return Object(name, 16, memory, checksum(memory[:16], seed(name.namespace, name.key, 16)))
