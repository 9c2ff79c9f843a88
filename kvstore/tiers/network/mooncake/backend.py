"""The backend for Mooncake stores: memory that nodes contribute, and a master that locates objects.

Mooncake evicts objects, and loses those in the memory of a node that leaves. It cannot list objects or their
ages. A value is an object's header and payload, its key the object's path (`objects`).
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvstore.arena import checksum, copy, seed
from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings, objects
from kvstore.tiers.network.base import Backend, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.mooncake.client_process import Request
from kvstore.tiers.network.mooncake.subprocess_pool import SubprocessPool, Worker, ask
from kvstore.tiers.network.objects import HEADER_BYTES
from kvstore.types import ALIGN

# Negative codes are ErrorCode values of mooncake-store/include/types.h.
_NO_ROOM = -200  # NO_AVAILABLE_HANDLE: no free memory of this size
_BAD_PARAMETERS = -600  # INVALID_PARAMS: a read value is larger than the buffer
_NOT_READY = -703  # REPLICA_IS_NOT_READY: a write is under way
_NOT_FOUND = -704  # OBJECT_NOT_FOUND
_EXISTS = -705  # OBJECT_ALREADY_EXISTS; puts return 0 instead
_NO_MASTER = {-900, -901}  # RPC_FAIL, RPC_TIMEOUT

_PROBED = {1: Outcome.OK, 0: Outcome.MISSING}
_READ = {_NOT_FOUND: Outcome.MISSING, _NOT_READY: Outcome.MISSING, _BAD_PARAMETERS: Outcome.TORN}
_WRITTEN = {0: Outcome.OK, _EXISTS: Outcome.OK, _NO_ROOM: Outcome.FULL}
_DELETED = {0: Outcome.OK, _NOT_FOUND: Outcome.OK}

_PORT = 50051
_MOST_KEYS = 256
T = TypeVar("T")
_URL = "mooncake://MASTER:50051?protocol=tcp&device=&host=&segment=0&metadata=P2PHANDSHAKE"


def open_url(settings: BackendSettings) -> Backend:
    """Returns the backend of a `mooncake://` URL. Raises ConfigError, also for a missing package."""
    parts = urlsplit(settings.url)
    client_settings = {"master": _master(parts), **_parameters(parts)}
    if importlib.util.find_spec("mooncake") is None:
        hint = "pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without a GPU"
        raise ConfigError("network.url: mooncake:// needs the package mooncake", hint)
    return Mooncake(client_settings, settings.threads)


def _master(parts: SplitResult) -> str:
    try:
        host, port = parts.hostname, parts.port or _PORT
    except ValueError as error:
        raise ConfigError(f"network.url: {error}", _URL) from error
    if not host or parts.path.strip("/") or parts.username is not None:
        raise ConfigError(f"network.url: {parts.geturl()!r:.120} names no master", _URL)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parameters(parts: SplitResult) -> dict[str, str | int]:
    parameters = {"protocol": "tcp", "device": "", "host": "", "segment": "0", "metadata": "P2PHANDSHAKE"}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in parameters:
            raise ConfigError(f"network.url: {name!r:.40} is not a parameter of mooncake://", _URL)
        parameters[name] = value
    if parameters["protocol"] not in ("tcp", "rdma"):
        raise ConfigError(f"network.url: protocol={parameters['protocol']:.40}", "tcp or rdma")
    if not parameters["segment"].isdecimal():
        raise ConfigError(f"network.url: segment={parameters['segment']:.40}", "a number of bytes")
    return {**parameters, "segment": int(parameters["segment"])}


class Mooncake(Backend):
    """Blocks in a Mooncake store. `client_settings`: see `client_process`. At most `calls` run at a time.

    A write may end with OK while another node still writes the same object.
    """

    kind = "mooncake"

    def __init__(self, client_settings: dict[str, str | int], calls: int) -> None:
        self._master = client_settings["master"]
        self._pool = SubprocessPool(client_settings, calls)
        self._writing: set[str] = set()
        self._written = threading.Condition()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """The master leases existing objects, which protects them from eviction."""
        return self._by_name("probe", names, _PROBED, ends)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Deletes objects during reads, which then fail verification."""
        return self._by_name("delete", names, _DELETED, ends)

    def _by_name(
        self, what: str, names: Sequence[Name], outcome_of: dict[int, Outcome], ends: float
    ) -> list[Outcome]:
        def next_batch(worker: Worker, left: Sequence[Name]) -> list[Outcome]:
            keys = [objects.path(name) for name in left[:_MOST_KEYS]]
            codes = self._call(worker, (what, keys, [], []), ends)
            return [outcome_of.get(code, Outcome.FAILED) for code in codes]

        return self._in_batches(names, ends, next_batch)

    def read(self, things: Sequence[Object], ends: float) -> list[Outcome]:
        def next_batch(worker: Worker, left: Sequence[Object]) -> list[Outcome]:
            some, request = _fitting(worker, "read", left)
            codes = self._call(worker, request, ends)
            return list(map(_copy_from, [worker] * len(some), some, request[2], codes))

        return self._in_batches(things, ends, next_batch)

    def write(self, things: Sequence[Object], ends: float) -> list[Outcome]:
        def next_batch(worker: Worker, left: Sequence[Object]) -> list[Outcome]:
            some, request = _fitting(worker, "write", left)
            for thing, offset in zip(some, request[2], strict=True):
                _copy_to(worker, thing, offset)
            return [_WRITTEN.get(code, Outcome.FAILED) for code in self._call(worker, request, ends)]

        with self._exclusive(things, ends) as exclusive:
            if not exclusive:
                return [Outcome.FAILED] * len(things)
            return self._in_batches(things, ends, next_batch)

    def _in_batches(
        self, items: Sequence[T], ends: float, next_batch: Callable[[Worker, Sequence[T]], list[Outcome]]
    ) -> list[Outcome]:
        """Calls `next_batch` with the items left, until there are none or it has no answer in time."""
        outcomes: list[Outcome] = []
        with self._pool.take(ends) as worker:
            while worker is not None and len(outcomes) < len(items):
                some = next_batch(worker, items[len(outcomes) :])
                if not some:
                    break
                outcomes += some
        return outcomes + [Outcome.FAILED] * (len(items) - len(outcomes))

    @contextmanager
    def _exclusive(self, things: Sequence[Object], ends: float) -> Iterator[bool]:
        """Waits until no other call writes these objects. Yields False if another call still does at `ends`.

        Mooncake reports OK for an object that another call still writes, and that cannot be read yet.
        """
        paths = {objects.path(thing.name) for thing in things}
        with self._written:
            exclusive = self._written.wait_for(
                lambda: self._writing.isdisjoint(paths), max(0.0, ends - time.monotonic())
            )
            if exclusive:
                self._writing |= paths
        try:
            yield exclusive
        finally:
            if exclusive:
                with self._written:
                    self._writing -= paths
                    self._written.notify_all()

    def health(self, ends: float) -> None:
        put, got = _sample(), _sample()
        got.name = put.name
        self._require_ok("write", self.write([put], ends))
        self._require_ok("read", self.read([got], ends))
        self._require_ok("delete", self.delete([put.name], ends))

    def _require_ok(self, what: str, outcomes: Sequence[Outcome]) -> None:
        if outcomes[0] is not Outcome.OK:
            hint = "does the store have free memory?" if outcomes[0] is Outcome.FULL else ""
            raise NetworkError(f"Mooncake at {self._master}: a {what} ends with {outcomes[0].name}", hint)

    def _call(self, worker: Worker, request: Request, ends: float) -> list[int]:
        """Returns Mooncake's code of each key, an empty list if there is no answer by `ends`."""
        codes = ask(worker, request, ends)
        if codes and _NO_MASTER.issuperset(codes):
            raise NetworkError(f"the Mooncake master at {self._master} does not answer")
        return codes

    def close(self) -> None:
        self._pool.close()

    def list(self, namespace: bytes | None, ends: float) -> NoReturn:
        """Not supported: raises NetworkError."""
        raise NetworkError("Mooncake cannot list its objects")


def _fitting(worker: Worker, what: str, things: Sequence[Object]) -> tuple[Sequence[Object], Request]:
    """Returns the leading objects that fit in a worker's memory, and the request to transfer them."""
    offsets, end = [], 0
    worker.fit(HEADER_BYTES + things[0].length)
    for thing in things[:_MOST_KEYS]:
        start, end = end, end + HEADER_BYTES + thing.length
        if end > len(worker.memory):
            break
        offsets.append(start)
        end += -end % ALIGN
    some = things[: len(offsets)]
    sizes = [HEADER_BYTES + thing.length for thing in some]
    return some, (what, [objects.path(thing.name) for thing in some], offsets, sizes)


def _copy_to(worker: Worker, thing: Object, offset: int) -> None:
    """Copies an object with its header into a worker's memory."""
    start = offset + HEADER_BYTES
    worker.memory[offset:start] = objects.header(thing)
    copy(worker.memory[start : start + thing.length], thing.memory[: thing.length])


def _copy_from(worker: Worker, thing: Object, offset: int, code: int) -> Outcome:
    """Copies a read object from a worker's memory, and verifies it."""
    if code < 0:
        return _READ.get(code, Outcome.FAILED)
    start = offset + HEADER_BYTES
    if code != HEADER_BYTES + thing.length:
        return Outcome.TORN
    copy(thing.memory[: thing.length], worker.memory[start : start + thing.length])
    return objects.settle(thing, worker.memory[offset:start])


def _sample() -> Object:
    """Returns a small object for the health check."""
    name, memory = Name(bytes(16), os.urandom(16)), memoryview(mmap.mmap(-1, ALIGN))
    return Object(name, 16, memory, checksum(memory[:16], seed(name.namespace, name.key, 16)))
