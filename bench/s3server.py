"""A small S3 server with its objects in memory: fast for benches, with injected errors for tests.

It supports GET with ranges, HEAD, PUT, DELETE, DeleteObjects and ListObjectsV2 on one bucket, with one thread
per connection. It does not check signatures. `python -m bench.s3server` prints its URL and serves until its
input ends.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "bucket"
_PAGE_KEYS = 1000
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(slots=True)
class Request:
    """A request. `key` is empty for the bucket itself."""

    method: str
    bucket: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Reply:
    """A reply and its faults.

    `hang_s`: delay before the reply. `stop_after`: bytes of the body before the connection is cut. `pace`:
    bytes/s. `raw`: bytes sent instead of a reply.
    """

    status: int
    body: bytes | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    stop_after: int | None = None
    pace: float = 0.0
    raw: bytes | None = None


@dataclass(slots=True)
class Stored:
    """A stored object."""

    body: bytes
    modified_s: float

    @property
    def etag(self) -> str:
        """Returns the ETag of a body."""
        return f'"{hashlib.md5(self.body[:256], usedforsecurity=False).hexdigest()}-{len(self.body)}"'


def error(status: int, code: str, message: str = "as told") -> Reply:
    """Returns an error reply in the format of S3."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


class S3Server:
    """Serves from its creation until `close`. `twist` may replace the reply to any request."""

    def __init__(self, clock: Callable[[], float] = time.time, tls: ssl.SSLContext | None = None) -> None:
        """Listens on a free port of the loopback. `clock` returns Unix time."""
        self.objects: dict[str, Stored] = {}
        self.twist: Callable[[Request, Reply], Reply] = lambda _request, reply: reply
        self.requests: list[tuple[str, str]] = []
        self.accepted = 0
        self._clock = clock
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._tls = tls
        self.endpoint = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops the server and closes all connections."""
        self._closing.set()
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def drop_connections(self) -> None:
        """Closes all open connections, as servers do with idle ones."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        with suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(plain, server_side=True)
                self._open.add(connection)
            while (request := _receive(connection)) is not None:
                self.requests.append((request.method, request.key))
                reply = self.twist(request, self._answer(request))
                if not self._send(connection, request, reply):
                    break
        for one in (plain, connection):
            self._open.discard(one)
            one.close()

    def _send(self, connection: socket.socket, request: Request, reply: Reply) -> bool:
        """Sends a reply. Returns whether the connection stays open."""
        if reply.hang_s and self._closing.wait(reply.hang_s):
            return False
        if reply.raw is not None:
            connection.sendall(reply.raw)
            return False
        headers = {
            "Date": formatdate(self._clock(), usegmt=True),
            "Content-Length": str(len(reply.body)),
            **reply.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {reply.status} Told\r\n{lines}\r\n".encode()
        body = memoryview(b"" if request.method == "HEAD" else reply.body)[: reply.stop_after]
        if reply.pace:
            connection.sendall(head)
            self._trickle(connection, body, reply.pace)
        elif self._tls is not None:
            connection.sendall(head)
            connection.sendall(body)
        else:
            sent = connection.sendmsg((head, body))
            connection.sendall(head[sent:])
            connection.sendall(body[max(0, sent - len(head)) :])
        return reply.stop_after is None

    def _trickle(self, connection: socket.socket, body: memoryview, pace: float) -> None:
        step = max(1, int(pace / 100))
        for at in range(0, len(body), step):
            connection.sendall(body[at : at + step])
            if self._closing.wait(step / pace):
                return

    def _answer(self, request: Request) -> Reply:
        if request.bucket != BUCKET:
            return error(404, "NoSuchBucket", "The specified bucket does not exist")
        if not request.key:
            return self._delete_many(request) if "delete" in request.query else self._list(request)
        if request.method == "PUT":
            stored = Stored(request.body, self._clock())
            self.objects[request.key] = stored
            return Reply(200, headers={"ETag": stored.etag})
        if request.method == "DELETE":
            self.objects.pop(request.key, None)
            return Reply(204)
        return self._get(request)

    def _get(self, request: Request) -> Reply:
        stored = self.objects.get(request.key)
        if stored is None:
            return error(404, "NoSuchKey", "The specified key does not exist.")
        body = memoryview(stored.body)
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified_s, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        wanted = _RANGE.fullmatch(request.headers.get("range", ""))
        if wanted is None:
            return Reply(200, body, headers)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(body))
        if start >= len(body):
            return error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        return Reply(206, body[start:stop], headers)

    def _list(self, request: Request) -> Reply:
        [prefix] = request.query.get("prefix", [""])
        [after] = request.query.get("continuation-token", [""])
        keys = sorted(key for key in list(self.objects) if key.startswith(prefix) and key > after)
        page, more = keys[:_PAGE_KEYS], len(keys) > _PAGE_KEYS
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        entries = "".join(self._entry(key, self.objects[key]) for key in page)
        return Reply(
            200,
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>".encode(),
        )

    def _entry(self, key: str, stored: Stored) -> str:
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified_s))
        return (
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.body)}</Size>"
            f"<LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag></Contents>"
        )

    def _delete_many(self, request: Request) -> Reply:
        keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", request.body.decode())]
        for key in keys:
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return Reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())


def _receive(connection: socket.socket) -> Request | None:
    """Returns the next request; None at the end of the connection."""
    head = bytearray()
    while (end := head.find(b"\r\n\r\n")) < 0:
        piece = connection.recv(1 << 16)
        if not piece:
            return None
        head += piece
    first, *lines = head[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = bytearray(int(headers.get("content-length", "0")))
    have = len(head) - end - 4
    body[:have] = head[end + 4 :]
    while have < len(body):
        got = connection.recv_into(memoryview(body)[have:])
        if not got:
            return None
        have += got
    method, target, _ = first.split(" ")
    url = urlsplit(target)
    bucket, _, key = unquote(url.path).lstrip("/").partition("/")
    query = parse_qs(url.query, keep_blank_values=True)
    return Request(method, bucket, key, query, headers, bytes(body) if len(body) < 1 << 16 else body)


if __name__ == "__main__":
    server = S3Server()
    print(server.endpoint, flush=True)
    sys.stdin.read()
    server.close()
