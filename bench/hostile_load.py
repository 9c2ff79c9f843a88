"""Attacks on a daemon by strangers and by a hostile tenant, and the victim: a tenant with normal requests.

An attack is one process with many connections. It builds its frames in advance and sends them in rounds.
Between rounds it sleeps, so that it uses at most its part of a core (`Post.cores`). The effect on the victim
is then caused by the daemon, not by the scheduler of the kernel. All processes have the same priority.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import numpy as np

from bench.harness import KIB, MIB, NotDone
from bench.tenant_load import Cue, Site
from kvstore import Client, Layout
from kvstore.errors import DeniedError, UnavailableError
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack

KEY_BYTES = 64
_FRAME = 4 * MIB
_BATCH = 4096
_OPENED = 1  # number of the first namespace of a connection
_FIRST = 2  # first request id after the opening frames
_NAP_S, _LONGEST_NAP_S = 1e-3, 0.1
_RECEIVED_AT_ONCE = 256 * KIB
_CONNECT_EVERY = 20
DEADLINE_S = 1.0
"""Default deadline of the client."""


# -- the victim


@dataclass(slots=True)
class Call:
    """One call of the victim: its start (s, monotonic clock), its duration and its outcome.

    `lost` is empty if the call returned everything in time, otherwise `refused`, `late` or `missing`.
    """

    kind: str
    began: float
    took: float
    lost: str = ""
    why: str = ""


def chain(number: int, blocks: int) -> list[bytes]:
    """Returns the keys of a chain of the victim."""
    return [struct.pack("<QQ", number, block) * (KEY_BYTES // 16) for block in range(blocks)]


def work(cue: Cue, site: Site, chains: int, blocks: int, pace_s: float) -> list[Call]:
    """Puts, looks up and gets one chain after another, verified, at least `pace_s` apart.

    A new client connects and sends a request beside every `_CONNECT_EVERY`th chain. Deadlines are the default
    of the client. Raises NotDone if a get returns wrong bytes. The cue is given after one pass over all
    chains, when all memory is mapped.
    """
    calls: list[Call] = []
    data = np.random.default_rng(1).integers(0, 256, (blocks, site.layout.block_bytes), np.uint8)
    out = np.zeros_like(data)
    stored = -1

    def put() -> bool:
        nonlocal stored
        _stamp(data, number)
        done = space.put(keys, data)
        if done.stored + done.present < blocks:
            raise DeniedError(done.why or "not stored")
        stored = number
        return True

    def get() -> bool:
        n = space.get(chain(stored, blocks), out)
        _stamp(data, stored)
        if not np.array_equal(out[:n], data[:n]):
            raise NotDone("the victim got wrong bytes")
        return n == blocks

    def connect() -> bool:
        with Client(site.url, site.token, strict=True) as new:
            new.ping()
        return True

    with Client(site.url, site.token, strict=True) as client:
        space = client.namespace(site.layout)
        due = time.perf_counter()
        for turn, number in enumerate(itertools.cycle(range(chains))):
            keys = chain(number, blocks)
            calls.append(_call("put", put))
            if stored >= 0:
                calls.append(_call("lookup", lambda: space.lookup(chain(stored, blocks)) == blocks))
                calls.append(_call("get", get))
            if turn % _CONNECT_EVERY == 0:
                calls.append(_call("connect", connect))
            if turn >= chains:
                cue.begin()
            if cue.is_set():
                break
            due = max(due + pace_s, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
    return calls


def _stamp(data: np.ndarray[Any, Any], number: int) -> None:
    """Writes the bytes of one chain."""
    data[:, :8] = np.frombuffer(struct.pack("<Q", number), np.uint8)


def _call(kind: str, call: Callable[[], bool]) -> Call:
    began = time.monotonic()
    lost = why = ""
    try:
        lost = "" if call() else "missing"
    except DeniedError as error:
        lost, why = "refused", error.message
    except UnavailableError as error:
        lost, why = "late", error.message
    took = time.monotonic() - began
    return Call(kind, began, took, "late" if not lost and took > DEADLINE_S else lost, why)


# -- attackers


@dataclass(frozen=True, slots=True)
class Post:
    """The parameters of an attack: tenant, user (0: unchanged), CPU limit in cores.

    The attack has begun once its tally's count `shows` is at least `least`.
    """

    site: Site
    uid: int
    cores: float
    connections: int = 64
    victim: str = "victim"
    chains: int = 0
    blocks: int = 0
    shows: str = "sent"
    least: int = 1

    @property
    def hello(self) -> bytes:
        """Returns the first frame of a member of the tenant."""
        return pack(m.Hello(m.MAGIC, m.VERSION, self.site.token))

    def open(self, owner: str = "") -> bytes:
        """Returns the second frame, which opens its own namespace or the victim's."""
        return pack(m.Open(_FIRST - 1, asdict(self.site.layout), owner, 0.0))


@dataclass(slots=True)
class Tally:
    """Totals of an attack: complete frames sent (without the opening ones), answers, refusals among these,
    connections that the daemon closed, and CPU time of the attack (s).
    """

    sent: int = 0
    sent_bytes: int = 0
    answered: int = 0
    refused: int = 0
    cut: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class _Peer:
    """One connection of an attack. It reconnects when the daemon closes it.

    `following` returns the next bytes to send, None for nothing now. `heard` is called with every answer.
    """

    def __init__(
        self,
        post: Post,
        tally: Tally,
        opening: bytes,
        following: Callable[[_Peer], bytes | None],
        heard: Callable[[_Peer, Any], None] | None = None,
        reads: bool = True,
    ) -> None:
        self.waiting = 0
        self._path = post.site.url.removeprefix("unix://")
        self._tally = tally
        self._opening = opening
        self._following = following
        self._heard = heard
        self._reads = reads
        self._sock: socket.socket | None = None
        self._frames = Frames()
        self._unsent = memoryview(b"")
        self._opened = False

    def turn(self) -> None:
        """Sends and receives without blocking."""
        try:
            if self._sock is None and not self._connect():
                return
            self._send()
            if self._reads:
                self._receive()
        except BlockingIOError:
            pass
        except OSError:
            self._cut()

    def close(self) -> None:
        """Closes the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return False
        self._sock, self._frames, self._unsent = sock, Frames(1 << 30), memoryview(self._opening)
        self.waiting, self._opened = 0, False
        return True

    def _send(self) -> None:
        assert self._sock is not None
        if not self._unsent:
            self._opened = True
            self._unsent = memoryview(self._following(self) or b"")
        while self._unsent:
            try:
                n = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            self._tally.sent_bytes += n
            self._unsent = self._unsent[n:]
            self._tally.sent += self._opened and not self._unsent

    def _receive(self) -> None:
        assert self._sock is not None
        data = self._sock.recv(_RECEIVED_AT_ONCE)
        if not data:
            self._cut()
            return
        for message in self._frames.feed(data):
            self.waiting -= getattr(message, "id", 0) >= _FIRST
            self._tally.answered += 1
            self._tally.refused += isinstance(message, m.Denied | m.Busy | m.Failure)
            if self._heard is not None:
                self._heard(self, message)

    def _cut(self) -> None:
        self._tally.cut += 1
        self.close()


def _attack(cue: Cue, post: Post, tally: Tally, peers: list[_Peer]) -> Tally:
    """Runs all connections in turns until the cue."""
    if post.uid:
        os.setgroups([])
        os.setgid(post.uid)
        os.setuid(post.uid)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in _rounds(cue, post.cores, tally):
        for peer in peers:
            peer.turn()
        if getattr(tally, post.shows) >= post.least:
            cue.begin()
    for peer in peers:
        peer.close()
    return tally


def _rounds(cue: Cue, cores: float, tally: Tally) -> Iterator[None]:
    """Yields until the cue. Sleeps between rounds, so that the process uses at most `cores` of CPU."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    while not cue.is_set():
        yield
        tally.cpu_s, tally.wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        time.sleep(min(max(_NAP_S, tally.cpu_s / cores - tally.wall_s), _LONGEST_NAP_S))


def burn(cue: Cue, post: Post) -> Tally:
    """Uses the same CPU in the same pattern, without requests."""
    tally = Tally()
    cue.begin()
    for _ in _rounds(cue, post.cores, tally):
        ends = time.process_time() + max(0.5, post.cores / (1.01 - post.cores)) * _NAP_S
        while time.process_time() < ends:
            tally.sent += 1
    return tally


def long_frames(cue: Cue, post: Post) -> Tally:
    """Strangers send 4 MiB that are no Hello, and a Hello with 4 MiB of maps."""
    maps = _FRAME - 64
    hello = b"\x95\x00\xa7kvstore" + bytes([m.VERSION]) + b"\xa0" + b"\xdd" + struct.pack(">I", maps)
    frames = [_frame(bytes(_FRAME)), _frame(hello + b"\x80" * maps)]
    tally = Tally()
    peers = [_Peer(post, tally, frames[n % 2], _nothing) for n in range(post.connections)]
    return _attack(cue, post, tally, peers)


def many_values(cue: Cue, post: Post) -> Tally:
    """A tenant sends frames of 4 MiB with only tiny maps, numbers and extensions."""
    frames = [
        _frame(_array(_FRAME - 8, b"\x80")),
        _frame(_array(_FRAME // 3 - 8, b"\xd4\x01\x00")),
        _frame(_fan(4000, b"\x80")),
        _frame(_fan(15, b"\x80")),
        _frame(msgpack.packb((36, _FIRST, "status", {str(n): {} for n in range(1000)}))),
    ]
    tally = Tally()
    turn = itertools.cycle(frames)

    def one(peer: _Peer) -> bytes | None:
        return _unless_waiting(peer, next(turn), 1)

    peers = [_Peer(post, tally, post.hello, one) for _ in range(post.connections)]
    return _attack(cue, post, tally, peers)


def waits(cue: Cue, post: Post) -> Tally:
    """A reader sends calls that wait a minute for 4096 blocks that are never stored."""
    frame = pack(
        m.Acquire(_FIRST, _OPENED, KEY_BYTES, os.urandom(_BATCH * KEY_BYTES), 60.0, 0.0, wait_s=60.0)
    )
    tally = Tally()

    def one(peer: _Peer) -> bytes | None:
        return _unless_waiting(peer, frame, 64)

    peers = [_Peer(post, tally, post.hello + post.open(), one) for _ in range(post.connections)]
    return _attack(cue, post, tally, peers)


def unread(cue: Cue, post: Post) -> Tally:
    """Sends requests without answers in frames of up to 4 MiB or as thousands of small ones. Never reads."""
    n = (_FRAME - 64) // KEY_BYTES
    blocks = (_FRAME - 64) // 9
    small = b"".join(pack(m.Release(n)) + pack(m.Abort(n)) for n in range(1, 2001))
    frames = itertools.cycle(
        [
            pack(m.Suspect(0, _OPENED, KEY_BYTES, os.urandom(n * KEY_BYTES))),
            pack(m.Suspect(0, _OPENED, KEY_BYTES, os.urandom(_BATCH * KEY_BYTES))),
            pack(m.Commit(0, 1, bytes(8 * blocks), bytes(blocks))),
            small,
        ]
    )
    tally = Tally()
    opening = post.hello + post.open()
    peers = [
        _Peer(post, tally, opening, lambda _: next(frames), reads=False) for _ in range(post.connections)
    ]
    return _attack(cue, post, tally, peers)


def connections(cue: Cue, post: Post) -> Tally:
    """Strangers open silent connections, and a reader opens as many as the daemon allows."""
    tally = Tally()
    peers = [_Peer(post, tally, b"", _nothing) for _ in range(post.connections)]
    peers += [_Peer(post, tally, post.hello, _nothing) for _ in range(1024)]
    return _attack(cue, post, tally, peers)


def leases(cue: Cue, post: Post) -> Tally:
    """A reader leases everything that the victim has published to it, and never releases."""
    frames = [
        pack(m.Acquire(n + _FIRST, _OPENED, KEY_BYTES, b"".join(chain(n, post.blocks)), 1.0, 0.0))
        for n in range(post.chains)
    ]
    tally = Tally()
    turn = itertools.cycle(range(post.chains))
    held: set[int] = set()

    def one(peer: _Peer) -> bytes | None:
        if peer.waiting > 0 or len(held) == len(frames):
            return None
        number = next(n for n in turn if n not in held)
        return _unless_waiting(peer, frames[number], 1)

    def heard(_: _Peer, answer: Any) -> None:
        if isinstance(answer, m.Granted) and answer.slots:
            held.add(answer.id - _FIRST)

    opening = post.hello + post.open(post.victim)
    peers = [_Peer(post, tally, opening, one, heard) for _ in range(post.connections)]
    return _attack(cue, post, tally, peers)


def namespaces(cue: Cue, post: Post) -> Tally:
    """A reader opens one namespace after another, each with a new layout."""
    tally = Tally()
    numbers = itertools.count()

    def one(peer: _Peer) -> bytes | None:
        layout = Layout(model=f"{'m' * 1000}{next(numbers)}", block_bytes=4 * KIB)
        return _unless_waiting(peer, pack(m.Open(_FIRST, asdict(layout), "", 0.0)), 16)

    peers = [_Peer(post, tally, post.hello, one) for _ in range(post.connections)]
    return _attack(cue, post, tally, peers)


def unfinished(cue: Cue, post: Post) -> Tally:
    """A tenant sends frames without their last byte."""
    part = _frame(bytes(_FRAME))[:-1]
    tally = Tally()
    peers = [_Peer(post, tally, post.hello + part, _nothing) for _ in range(post.connections)]
    return _attack(cue, post, tally, peers)


def idle_tcp(cue: Cue, port: int, n: int, cores: float) -> Tally:
    """Keeps idle connections to a port of this machine. Reconnects when they are closed."""
    tally = Tally()
    socks: list[socket.socket] = []
    for _ in _rounds(cue, cores, tally):
        while len(socks) < n:
            socks.append(socket.create_connection(("127.0.0.1", port), 10.0))
            socks[-1].setblocking(False)
            tally.sent += 1
        cue.begin()
        for sock in list(socks):
            try:
                ended = not sock.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                ended = True
            if ended:
                tally.cut += 1
                socks.remove(sock)
                sock.close()
    return tally


def _unless_waiting(peer: _Peer, frame: bytes, most: int) -> bytes | None:
    """Returns the frame, or None while this number of requests is unanswered."""
    if peer.waiting >= most:
        return None
    peer.waiting += 1
    return frame


def _nothing(_: _Peer) -> None:
    return None


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _array(n: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", n) + item * n


def _fan(n: int, item: bytes) -> bytes:
    """Returns nested arrays of 1000 items each."""
    inner = b"\xdc" + struct.pack(">H", 1000) + item * 1000
    return b"\xdc" + struct.pack(">H", min(n, 1000)) + inner * min(n, 1000)
