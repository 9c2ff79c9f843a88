"""network: daemons that share one storage system over the loopback.

`network/reuse-SYSTEM`: prefixes of blocks of 64 KiB (`/1-MiB`: of 1 MiB) put on one node and served on
another, compared with the same from local memory. Every block is compared. The systems are Valkey over TCP, a
folder of this file system, and S3 (the server of `objectstore`).

`network/handoff`: one node writes a prompt of 32,768 tokens (2,048 blocks of 64 KiB, a 32nd of those of an 8B
model) while another reads it over Valkey. The figure is the time to the first readable block divided by the
time to the last written one.

`network/FAULT`: p99 of local hits while the backend is killed, hangs, answers garbage, is slow (1 MB/s) or
full, and other clients request blocks that only the backend has; compared with a healthy backend. A proxy
injects the faults, except a full server, which is real. A wrong or missing block is an error without a
figure.
"""

from __future__ import annotations

import os
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from bench.harness import KIB, MIB, MIN_ROUNDS, PROCESSES, Bench, Result, Target, expect, quantile
from bench.objectstore import started
from bench.served import complete, wait_until
from bench.valkey import server
from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon

HIT_BLOCKS, PACE_S = 32, 0.001


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of a prefix and of a prompt that is handed off in steps; hits per sample; deadline of a call."""

    block_bytes: int = 64 * KIB
    prefix: int = 512
    large_bytes: int = MIB
    large_prefix: int = 64
    prompt: int = 2048
    step: int = 64
    calls: int = 1000
    elsewhere: int = 250
    dram_bytes: int = 512 * MIB
    timeout: str = "1s"


SMOKE = Sizes(4 * KIB, 32, 8 * KIB, 16, 64, 16, 50, 4, 16 * MIB, "5s")
FAULTS = ("killed", "hung", "garbage", "slow", "full")
WELL = "well"
MODES = (WELL, *FAULTS)
_SLOW_BYTES_A_S = 1_000_000
_PIECE = 64 * KIB


def run(bench: Bench) -> Iterator[Result]:
    """Yields reuse, hand-off and each fault over Valkey, then reuse over the other systems."""
    z = bench.pick(Sizes(), SMOKE)
    with tempfile.TemporaryDirectory() as name, valkey(Path(name)) as port:
        with nodes(z, redis(port), 2) as (a, b):
            yield from _reuses(bench, z, "valkey", a, b)
            yield _hand_off(bench, z, a, b)
            with proxied(port) as (proxy, mode), nodes(z, redis(proxy), 1) as [client]:
                for fault in FAULTS:
                    yield _hits(bench, z, port, fault, client, a, mode)
        with bench.scratch() as folder, nodes(z, f"file://{folder}/shared", 2) as (a, b):
            yield from _reuses(bench, z, "folder", a, b)
        secret = Path(name) / "secret"
        secret.write_text("bench")
        with started("-m", "bench.s3server") as endpoint:
            url = f"s3://bucket/bench?endpoint={endpoint}&region=us-east-1&unsigned_payload=1"
            with nodes(z, url, 2, user="bench", password_file=str(secret)) as (a, b):
                yield from _reuses(bench, z, "s3", a, b)


# -- setup


@contextmanager
def valkey(folder: Path) -> Iterator[int]:
    """Runs a Valkey server in memory, which has no limit. Yields its port."""
    with server(folder) as served:
        yield served.port


def ask(port: int, *words: str) -> bytes:
    """Returns the first bytes of an answer of Valkey."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(
            f"*{len(words)}\r\n".encode() + b"".join(f"${len(w)}\r\n{w}\r\n".encode() for w in words)
        )
        return sock.recv(4096)


def redis(port: int) -> str:
    """Returns the URL of a server on this machine."""
    return f"redis://127.0.0.1:{port}"


@contextmanager
def nodes(z: Sizes, url: str, n: int, **more: Any) -> Iterator[list[Client]]:
    """Runs daemons that share one system. Yields a client of each."""
    network = {"url": url, "timeout": z.timeout, **more}
    settings = {"dram": {"limit": z.dram_bytes}, "policy": {"eviction": "lru"}, "network": network}
    with ExitStack() as stack:
        clients = []
        for _ in range(n):
            daemon = stack.enter_context(LocalDaemon(settings))
            client = stack.enter_context(Client(daemon.url, deadline_s=30.0, strict=True))
            wait_until(client, lambda status: complete(status) and status["network"]["usable"])
            clients.append(client)
        yield clients


def chain(what: str, n: int) -> list[bytes]:
    return [blake3(f"{what}/{i}".encode()).digest() for i in range(n)]


def payload(keys: list[bytes], block_bytes: int) -> np.ndarray[Any, Any]:
    """Returns the bytes of blocks by key: (n, block_bytes)."""
    raw = b"".join(blake3(key).digest(length=block_bytes) for key in keys)
    return np.frombuffer(raw, np.uint8).reshape(len(keys), block_bytes)


# -- two nodes


def _reuses(bench: Bench, z: Sizes, system: str, a: Client, b: Client) -> Iterator[Result]:
    yield _reuse(bench, z, f"reuse-{system}", a, b)
    large = replace(z, block_bytes=z.large_bytes, prefix=z.large_prefix)
    yield _reuse(bench, large, f"reuse-{system}/1-MiB", a, b)


def _reuse(bench: Bench, z: Sizes, case: str, a: Client, b: Client) -> Result:
    layout = Layout(model=case, block_bytes=z.block_bytes)
    here, there = a.namespace(layout), b.namespace(layout)
    asked = 0

    def stored(n: int) -> tuple[list[bytes], Any]:
        keys = chain(f"reuse {n}", z.prefix)
        blocks = payload(keys, z.block_bytes)
        here.put(keys, blocks)
        expect(here.handoff(keys), len(keys), "blocks on the other system")
        return keys, blocks

    def identical(keys: list[bytes], blocks: Any, out: Any, came: int) -> None:
        expect(came, len(keys), "blocks received")
        expect(int((out == blocks).all(axis=1).sum()), len(keys), "identical blocks")

    def served(n: int) -> float:
        nonlocal asked
        keys, blocks = stored(n)
        out = np.zeros_like(blocks)
        start = time.perf_counter()
        came = there.get(keys, out)
        took = time.perf_counter() - start
        asked += len(keys)
        identical(keys, blocks, out, came)
        return len(keys) * z.block_bytes / took / 2**30

    def local(n: int) -> float:
        keys, blocks = stored(n)
        out = np.zeros_like(blocks)
        start = time.perf_counter()
        came = here.get(keys, out)
        took = time.perf_counter() - start
        identical(keys, blocks, out, came)
        return len(keys) * z.block_bytes / took / 2**30

    rounds = bench.interleave(case, (served, local), 0.4)
    return rounds.result(f"network/{case}", "GiB/s", None, identical_blocks=asked)


def _hand_off(bench: Bench, z: Sizes, a: Client, b: Client) -> Result:
    layout = Layout(model="bench-handoff", block_bytes=z.block_bytes, block_tokens=16)
    here, there = a.namespace(layout), b.namespace(layout)
    wrong = 0

    def once(n: int) -> tuple[float, float]:
        """Hands off a prompt. Returns the seconds to the first readable block and to the last written one."""
        nonlocal wrong
        keys = chain(f"handoff {n}", z.prompt)
        blocks = payload(keys, z.block_bytes)
        times: list[float] = []

        def decode() -> None:
            nonlocal wrong
            got = 0
            while got < len(keys):
                with there.acquire(keys[got:], wait_s=20.0) as lease:
                    times.append(time.perf_counter())
                    views = lease.blocks
                    wrong += sum(bytes(view) != blocks[got + i].tobytes() for i, view in enumerate(views))
                    got += len(views)

        reader = threading.Thread(target=decode)
        start = time.perf_counter()
        reader.start()
        for at in range(0, len(keys), z.step):
            some = keys[at : at + z.step]
            here.put(some, blocks[at : at + z.step], parent=keys[at - 1] if at else None)
            here.handoff(some)
        written = time.perf_counter() - start
        reader.join()
        expect(wrong, 0, "wrong blocks")
        last.append((times[-1] - start) / written)
        return times[0] - start, written

    last: list[float] = []
    firsts = []
    began = time.monotonic()
    while len(firsts) < bench.pick(MIN_ROUNDS, 1) or time.monotonic() - began < bench.seconds / 2:
        bench.doing("handoff")
        firsts.append(once(len(firsts)))
    ratios = sorted(first / written for first, written in firsts)
    middle = sorted(firsts)[len(firsts) // 2]
    ends = sorted(last)[len(last) // 2]
    return Result(
        "network/handoff",
        1000 * middle[0],
        "ms to the first",
        1000 * middle[1],
        ratios[len(ratios) // 2],
        len(firsts),
        target=Target("<=", 1.0),
        extra={"last_read_ratio": ends, "blocks": z.prompt},
    )


# -- faults


@contextmanager
def proxied(port: int) -> Iterator[tuple[int, Any]]:
    """Runs a proxy in front of the server. Yields its port and its mode."""
    mode, ready = PROCESSES.Value("i", 0), PROCESSES.Value("i", 0)
    proxy = PROCESSES.Process(target=_proxy, args=(port, mode, ready), daemon=True)
    proxy.start()
    try:
        while not ready.value:
            time.sleep(0.01)
        yield ready.value, mode
    finally:
        proxy.kill()
        proxy.join()


def _hits(bench: Bench, z: Sizes, port: int, fault: str, client: Client, other: Client, mode: Any) -> Result:
    """Measures local hits beside clients that request remote blocks, put and prefetch."""
    ask(port, "FLUSHALL")
    layout = Layout(model=f"bench-{fault}", block_bytes=z.block_bytes)
    space, keys = client.namespace(layout), chain("hit", HIT_BLOCKS)
    expect(space.put(keys, payload(keys, z.block_bytes)).stored, HIT_BLOCKS, "blocks stored")
    elsewhere = [chain(f"elsewhere {i}", 16) for i in range(z.elsewhere)]
    for some in elsewhere:
        other.namespace(layout).put(some, payload(some, z.block_bytes))
        expect(other.namespace(layout).handoff(some), len(some), "blocks on the other system")
    wrong, recovered, stop = [0], list[float](), threading.Event()
    loader = threading.Thread(target=_load, args=(client, layout, elsewhere, wrong, stop))

    def p99(_: int) -> float:
        took, due = [], time.perf_counter()
        for _ in range(z.calls):
            due += PACE_S
            time.sleep(max(0.0, due - time.perf_counter()))
            start = time.perf_counter()
            with space.acquire(keys) as lease:
                took.append(time.perf_counter() - start)
                wrong[0] += len(lease) != HIT_BLOCKS
        return 1e6 * quantile(took, 0.99)

    def faulty(n: int) -> float:
        if fault == "full":
            ask(port, "CONFIG", "SET", "maxmemory", "1mb")
        mode.value = MODES.index(fault) if fault != "full" else 0
        try:
            return p99(n)
        finally:
            ask(port, "CONFIG", "SET", "maxmemory", "0")
            mode.value = 0
            start = time.perf_counter()
            wait_until(client, lambda status: status["network"]["usable"])
            recovered.append(time.perf_counter() - start)

    loader.start()
    try:
        rounds = bench.interleave(fault, (faulty, p99), 0.2)
    finally:
        stop.set()
        loader.join()
    expect(wrong[0], 0, "wrong or missing blocks")
    return rounds.result(f"network/{fault}", "µs p99", Target("<=", 1.2), recovered_s=max(recovered))


def _load(
    client: Client, layout: Layout, elsewhere: list[list[bytes]], wrong: list[int], stop: threading.Event
) -> None:
    """Requests remote blocks and puts new ones, ten times per second."""
    space, n = client.namespace(layout), 0
    block_bytes = layout.block_bytes
    out = np.zeros((16, block_bytes), np.uint8)
    while not stop.wait(0.1):
        some = elsewhere[n % len(elsewhere)]
        came = space.get(some, out, deadline_s=0.5)
        wrong[0] += int((out[:came] != payload(some[:came], block_bytes)).any(axis=1).sum()) if came else 0
        new = chain(f"new {layout.model} {n}", 8)
        space.put(new, payload(new, block_bytes))
        n += 1


def _proxy(port: int, mode: Any, ready: Any) -> None:
    """Forwards bytes between daemon and server, or injects the fault of the current mode."""
    os.nice(5)
    listener = socket.create_server(("127.0.0.1", 0))
    ready.value = listener.getsockname()[1]
    while True:
        client, _ = listener.accept()
        if MODES[mode.value] == "killed":
            client.close()
            continue
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        threading.Thread(target=_pass, args=(client, server, mode), daemon=True).start()


def _pass(client: socket.socket, server: socket.socket, mode: Any) -> None:
    selector = selectors.DefaultSelector()
    selector.register(client, selectors.EVENT_READ, server)
    selector.register(server, selectors.EVENT_READ, client)
    buffer = memoryview(bytearray(_PIECE))
    with client, server, selector:
        while True:
            how = MODES[mode.value]
            if how == "killed":
                return
            ready = selector.select(0.05)
            if how == "hung":
                time.sleep(0.02)
                continue
            for key, _ in ready:
                source, target = key.fileobj, key.data
                try:
                    n = source.recv_into(buffer)  # type: ignore[union-attr]
                    if not n:
                        return
                    if how == "slow":
                        time.sleep(n / _SLOW_BYTES_A_S)
                    garbage = how == "garbage" and target is client
                    target.sendall(os.urandom(n) if garbage else buffer[:n])
                except OSError:
                    return
