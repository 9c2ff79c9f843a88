"""Blocks as objects of S3, Google Cloud Storage and Azure, through obstore.

obstore handles credentials, signatures, retries and errors. Blocks on S3 are read directly into slots (`s3`)
with URLs that obstore signs. Reads that fail this way are repeated through obstore.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from kvstore.arena import copy
from kvstore.tiers.network import BackendSettings, objects
from kvstore.tiers.network.base import Backend, Listed, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.objectstore.errors import is_silence, outcome, reason
from kvstore.tiers.network.objectstore.loop import Loop
from kvstore.tiers.network.objectstore.s3 import Fetcher, Get
from kvstore.tiers.network.objectstore.url import behind_proxy, store_of

_AT_ONCE = 8
"""Concurrent requests of one call."""

_DELETE_KEYS = 1000
"""The most keys that S3 deletes in one request."""

_PAGE = 1000
_HEALTH_BYTES = 64

_RANGE_BYTES = 8 << 20
"""Larger objects are read in concurrent ranges of this size. Ranges of two puts fail the checksum."""

_SIGNED_FOR = timedelta(minutes=15)
_DOWN_HINT = "is the service up, and is the URL right?"


def open_url(settings: BackendSettings) -> ObjectStore:
    """Returns the backend of an `s3://`, `gs://` or `az://` URL. Raises ConfigError."""
    store = store_of(settings)
    url = urlsplit(settings.url)
    signs = url.scheme == "s3" and settings.credentials != "anonymous" and not behind_proxy(settings.url)
    return ObjectStore(store, f"{url.scheme}://{url.netloc}", signs)


class ObjectStore(Backend):
    """Blocks in any obstore store."""

    kind = "objectstore"

    def __init__(self, store: Any, where: str, signs: bool = False) -> None:
        """`where` names the store in messages. `signs`: the store is S3, and obstore can sign URLs for it."""
        import obstore  # noqa: PLC0415  optional, installed if there is a store

        self._obstore = obstore
        self._store = store
        self._where = where
        self._signs = signs
        self._lock = threading.Lock()
        self._fetcher: Fetcher | None = None
        self._loop = Loop(_AT_ONCE)

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        return self._outcomes(self._loop.each(self._head, [objects.path(name) for name in names], ends))

    def read(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        fetched = self._fetch(objects, ends)
        rest = [i for i, known in enumerate(fetched) if known is None]
        for at in range(0, len(rest), _AT_ONCE):
            some = rest[at : at + _AT_ONCE]
            answered = any(known is not None for known in fetched)
            for i, known in zip(some, self._read([objects[i] for i in some], ends, answered), strict=True):
                fetched[i] = known
        return [known for known in fetched if known is not None]

    def write(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Sends one request per object of any size.

        An interrupted multipart upload would leave parts behind, which the store keeps and charges.
        """
        outcomes: list[Outcome] = []
        for at in range(0, len(objects), _AT_ONCE):
            if time.monotonic() >= ends:
                return outcomes + [Outcome.FAILED] * (len(objects) - at)
            bodies = [_body(thing) for thing in objects[at : at + _AT_ONCE]]
            outcomes += self._outcomes(self._loop.each(self._put, bodies, ends), answered=bool(outcomes))
        return outcomes

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """Deletes in bulk, and one by one if that fails, to learn each outcome."""
        outcomes: list[Outcome] = []
        for at in range(0, len(names), _DELETE_KEYS):
            paths = [objects.path(name) for name in names[at : at + _DELETE_KEYS]]
            [answer] = self._loop.each(self._remove, [paths], ends)
            if isinstance(answer, Exception) and len(paths) > 1:
                answers = self._loop.each(self._remove, [[path] for path in paths], ends)
            else:
                answers = [answer] * len(paths)
            outcomes += [Outcome.OK if o is Outcome.MISSING else o for o in self._outcomes(answers)]
        return outcomes

    def health(self, ends: float) -> None:
        self._now(ends)

    def close(self) -> None:
        self._loop.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def _fetch(self, things: Sequence[Object], ends: float) -> list[Outcome | None]:
        """Reads objects directly into memory. None: read this object through obstore."""
        if not self._signs or not things:
            return [None] * len(things)
        [urls] = self._loop.each(self._sign, [[objects.path(thing.name) for thing in things]], ends)
        if isinstance(urls, BaseException):
            return [None] * len(things)
        with self._lock:
            if self._fetcher is None:
                self._fetcher = Fetcher(urls[0])
        heads = [bytearray(objects.HEADER_BYTES) for _ in things]
        parts = [_parts(i, *one) for i, one in enumerate(zip(urls, things, heads, strict=True))]
        left = [len(gets) for gets in parts]
        outcomes: list[Outcome | None] = [None] * len(things)
        for get in self._fetcher.fetch([get for gets in parts for get in gets], ends):
            i = get.of
            left[i] -= 1
            if not left[i]:
                outcomes[i] = _combine(parts[i], things[i], heads[i])
        return outcomes

    def _read(self, things: Sequence[Object], ends: float, answered: bool) -> list[Outcome]:
        """Reads objects through obstore, and copies them into memory on this thread."""
        answers = self._loop.each(self._get, things, ends)
        outcomes = self._outcomes(answers, answered)
        for i, (thing, answer) in enumerate(zip(things, answers, strict=True)):
            if not isinstance(answer, BaseException):
                outcomes[i] = _copy_in(thing, answer)
        return outcomes

    def _outcomes(self, answers: Sequence[Any], answered: bool = False) -> list[Outcome]:
        """Returns the outcomes of a call.

        Raises NetworkError if the store as a whole refuses, or does not answer at all. `answered`: it
        has answered earlier in the same call.
        """
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and len(errors) == len(answers) and not answered and all(map(is_silence, errors)):
            raise NetworkError(f"{self._where}: {reason(errors[0])}", _DOWN_HINT)
        return [
            outcome(answer, self._where) if isinstance(answer, BaseException) else Outcome.OK
            for answer in answers
        ]

    def _now(self, ends: float) -> float:
        """Returns the store's Unix time (s). Writes, reads and deletes an object for it."""
        path, body = f"{objects.ROOT}/health-{secrets.token_hex(8)}", secrets.token_bytes(_HEALTH_BYTES)
        self._one(self._put, (path, body), ends, "writing")
        data, modified = self._one(self._read_back, path, ends, "reading")
        self._one(self._remove, [path], ends, "deleting")
        if data != body:
            hint = "does the URL name a store, and is there a cache in between?"
            raise NetworkError(f"{self._where}: the bytes read differ from the bytes written", hint)
        return float(modified)

    def _one(self, job: Any, thing: Any, ends: float, doing: str) -> Any:
        """Returns the result of one request. Raises NetworkError."""
        [answer] = self._loop.each(job, [thing], ends)
        if not isinstance(answer, BaseException):
            return answer
        what = outcome(answer, self._where)
        why = "no room" if what is Outcome.FULL else reason(answer)
        raise NetworkError(f"{self._where}: {doing} fails: {why}", _DOWN_HINT)

    async def _sign(self, paths: Sequence[str]) -> Sequence[str]:
        urls: Sequence[str] = await self._obstore.sign_async(self._store, "GET", paths, _SIGNED_FOR)
        return urls

    async def _head(self, path: str) -> None:
        await self._obstore.head_async(self._store, path)

    async def _get(self, thing: Object) -> Any:
        """Returns an object's bytes, empty if its size is wrong."""
        result = await self._obstore.get_async(self._store, objects.path(thing.name))
        if result.meta["size"] != objects.HEADER_BYTES + thing.length:
            return b""
        return await result.bytes_async()

    async def _put(self, thing: tuple[str, bytes]) -> None:
        path, body = thing
        await self._obstore.put_async(self._store, path, body, use_multipart=False)

    async def _read_back(self, path: str) -> tuple[bytes, float]:
        """Returns a health object's bytes, empty if its size is wrong, and its time."""
        result = await self._obstore.get_async(self._store, path)
        # obstore allocates the size that a server claims, and aborts the process if that fails.
        same = result.meta["size"] == _HEALTH_BYTES
        data = bytes(await result.bytes_async()) if same else b""
        return data, result.meta["last_modified"].timestamp()

    async def _remove(self, paths: Sequence[str]) -> None:
        await self._obstore.delete_async(self._store, paths)

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        now = self._now(ends)
        began = time.monotonic()
        root = objects.ROOT if namespace is None else objects.folder(namespace)
        stream = self._obstore.list(self._store, root, chunk_size=_PAGE)
        while page := self._one(_page, stream, ends, "listing"):
            for found in page:
                name = objects.name_of(found["path"])
                if name is not None:
                    age_s = now - found["last_modified"].timestamp() + time.monotonic() - began
                    yield Listed(name, found["size"], age_s)


async def _page(stream: Any) -> Any:
    """Returns the next objects of a list, None at its end."""
    return await anext(stream, None)


def _body(thing: Object) -> tuple[str, bytes]:
    """Returns path and bytes to put. The bytes are a copy: a cancelled request may still read them."""
    return objects.path(thing.name), b"".join((objects.header(thing), thing.memory[: thing.length]))


def _copy_in(thing: Object, data: Any) -> Outcome:
    """Copies an object into its memory and verifies it."""
    view = memoryview(data)
    if len(view) != objects.HEADER_BYTES + thing.length:
        return Outcome.TORN
    copy(thing.memory[: thing.length], view[objects.HEADER_BYTES :])
    return objects.settle(thing, view[: objects.HEADER_BYTES])


def _parts(of: int, url: str, thing: Object, head: bytearray) -> list[Get]:
    """Returns the requests that read an object, one per range."""
    ahead = objects.HEADER_BYTES
    total = ahead + thing.length
    gets = []
    for start in range(0, total, _RANGE_BYTES):
        stop = min(start + _RANGE_BYTES, total)
        payload = thing.memory[max(0, start - ahead) : max(0, stop - ahead)]
        into = [payload] if start else [memoryview(head), payload]
        gets.append(Get(url, start, stop, total, into, of))
    return gets


def _combine(gets: Sequence[Get], thing: Object, head: bytearray) -> Outcome | None:
    """Returns the outcome of an object from its ranges, None if obstore must read it."""
    answers = {get.answer for get in gets}
    for bad in (Outcome.TORN, Outcome.MISSING, None):
        if bad in answers:
            return bad
    return objects.settle(thing, head)
