"""KV events as a router gets them: a real daemon, a real client, a real ZeroMQ subscriber."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from kvstore import Client, Layout
from kvstore.daemon.kv_events import publisher
from kvstore.daemon.kv_events.publisher import CLEARED, Publisher, Removed, Stored
from kvstore.errors import ConfigError, MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import chain_keys
from tests.daemons import BLOCK, SMALL, WITH_NVME, eventually, idle, log_of, payloads

TOKENS = 4
EVENTS = {"events": {"listen": "tcp://127.0.0.1:*", "node": "node-1"}}


def layout(model: str = "m", **more: Any) -> Layout:
    return Layout(model=model, block_bytes=BLOCK, block_tokens=TOKENS, **more)


def prompt(n: int, start: int = 0) -> tuple[np.ndarray, list[bytes]]:
    """Token ids of n blocks, and their keys."""
    tokens = np.arange(start, start + n * TOKENS, dtype=np.uint32)
    return tokens, chain_keys(tokens, TOKENS)


def put(ns: Any, n: int, start: int = 0) -> list[bytes]:
    tokens, keys = prompt(n, start)
    result = ns.put(keys, payloads(keys), tokens=tokens)
    assert not result.denied, result
    return keys


def low(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


@pytest.fixture(autouse=True)
def sockets() -> Iterator[None]:
    """All of a test's are closed at its end."""
    yield
    zmq.Context.instance().destroy(linger=0)


class Router:
    """What a subscriber knows: the tokens of blocks, by medium. `orphans`: whose parent it did not know."""

    def __init__(self, address: str, topic: str = "kv@node-1@m") -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.socket.subscribe(topic.encode())
        self.known: dict[str, dict[int, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        self.parents: set[int | None] = set()
        self.cleared = self.orphans = 0

    def hear(self) -> None:
        """Takes in what has arrived."""
        while self.socket.poll(20):
            topic, number, payload = self.socket.recv_multipart()
            assert topic.startswith(b"kv@node-1@")
            self.numbers.append(int.from_bytes(number, "big"))
            self.take(payload)

    def take(self, payload: bytes) -> None:
        stamp, events, rank = msgpack.unpackb(payload)
        assert abs(stamp - time.time()) < 60
        assert rank == 0
        for tag, *fields in events:
            {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._clear}[
                tag
            ](*fields)

    def _stored(
        self,
        names: list[int],
        parent: int | None,
        tokens: list[int],
        size: int,
        lora: None,
        medium: str,
        *_: Any,
    ) -> None:
        self.parents.add(parent)
        everywhere = {name for blocks in self.known.values() for name in blocks}
        if parent is not None and parent not in everywhere:
            self.orphans += 1
        for i, name in enumerate(names):
            self.known.setdefault(medium, {})[name] = tuple(tokens[i * size : (i + 1) * size])

    def _removed(self, names: list[int], medium: str) -> None:
        for name in names:
            del self.known[medium][name]

    def _clear(self) -> None:
        self.known.clear()
        self.cleared += 1

    def has(self, medium: str, keys: list[bytes]) -> bool:
        """Whether it now knows these blocks in a medium, and no others."""
        self.hear()
        return self.known.get(medium, {}).keys() == {low(key) for key in keys}


@contextmanager
def routed(settings: Any, **more: Any) -> Iterator[tuple[LocalDaemon, Client, Any, Router]]:
    """A daemon that publishes, a client, a namespace and a subscriber that has been heard of."""
    with LocalDaemon({**settings, **EVENTS, **more}) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(layout())
        put(ns, 1, 1 << 20)  # so that there is a topic
        router = Router(address(client))
        try:
            eventually(lambda: (router.hear(), router.cleared)[1])
            ns.invalidate(prompt(1, 1 << 20)[1])
            eventually(lambda: router.has("CPU", []))
            yield daemon, client, ns, router
        finally:
            router.socket.close()


def address(client: Client) -> str:
    return str(client.status()["events"]["listen"])


def test_a_block_is_announced_with_its_tokens_and_below_its_parent() -> None:
    with routed(SMALL) as (_, client, ns, router):
        keys = put(ns, 6)
        eventually(lambda: router.has("CPU", keys))
        assert router.known["CPU"][low(keys[2])] == tuple(range(2 * TOKENS, 3 * TOKENS))
        assert not router.orphans
        ns.invalidate(keys[4:])
        eventually(lambda: router.has("CPU", keys[:4]))
        assert client.status()["events"]["blocks"] == 4


def test_an_independent_block_is_announced_without_a_parent() -> None:
    with routed(SMALL) as (_, client, _ns, router):
        tokens, keys = prompt(6)
        ns = client.namespace(replace(layout(), kind="independent"))
        some = [4, 1]
        parts = np.concatenate([tokens[i * TOKENS : (i + 1) * TOKENS] for i in some])
        assert ns.put([keys[i] for i in some], payloads([keys[i] for i in some]), tokens=parts).stored == 2
        eventually(lambda: router.has("CPU", [keys[i] for i in some]))
        assert router.known["CPU"][low(keys[1])] == tuple(range(TOKENS, 2 * TOKENS))
        assert router.parents == {None}


def test_each_tier_is_a_medium() -> None:
    with routed(WITH_NVME) as (_, client, ns, router):
        keys = put(ns, 40)
        eventually(lambda: router.has("CPU", keys) and router.has("DISK", keys))
        # More than DRAM has room for: what was there first stays on NVMe alone.
        other = client.namespace(layout("other"))
        for i in range(11):
            put(other, 100, (i + 1) << 16)
            eventually(lambda: idle(client.status()))
        eventually(lambda: (router.hear(), len(router.known["CPU"]))[1] < 40)
        assert router.has("DISK", keys)
        ns.get(keys, np.zeros((40, BLOCK), np.uint8))
        eventually(lambda: router.has("CPU", keys))
        ns.invalidate(keys)
        eventually(lambda: router.has("CPU", []) and router.has("DISK", []))
        assert not router.orphans


def test_evictions_are_announced() -> None:
    with routed(SMALL, policy={"eviction": "lru"}) as (_, client, ns, router):
        for i in range(15):
            put(ns, 100, i << 16)
        stored = [prompt(100, i << 16)[1] for i in range(15)]

        def as_it_is() -> bool:
            router.hear()
            there = sum(ns.lookup(keys) for keys in stored)
            return len(router.known["CPU"]) == there == client.status()["blocks"]

        eventually(as_it_is)
        assert len(router.known["CPU"]) < 1500
        assert not router.orphans


def test_blocks_without_tokens_and_their_children_are_not_announced() -> None:
    with routed(SMALL) as (_, _, ns, router):
        tokens, keys = prompt(4)
        ns.put(keys[:2], payloads(keys[:2]))
        ns.put(keys[2:], payloads(keys[2:]), keys[1], tokens=tokens[2 * TOKENS :])
        time.sleep(0.2)
        assert router.has("CPU", [])
        # Whoever finds them stored may still say what they are.
        assert ns.put(keys[:2], payloads(keys[:2]), tokens=tokens[: 2 * TOKENS]).present == 2
        eventually(lambda: router.has("CPU", keys))
        assert not router.orphans


def test_a_deleted_child_is_not_announced_with_its_parent() -> None:
    with routed(SMALL) as (daemon, client, ns, router):
        tokens, keys = prompt(4)
        ns.put(keys[:2], payloads(keys[:2]))
        ns.put(keys[2:], payloads(keys[2:]), keys[1], tokens=tokens[2 * TOKENS :])
        ns.invalidate(keys[3:])
        ns.put(keys[:2], payloads(keys[:2]), tokens=tokens[: 2 * TOKENS])
        eventually(lambda: router.has("CPU", keys[:3]))
        ns.invalidate(keys[2:])
        eventually(lambda: router.has("CPU", keys[:2]))
        assert client.status()["events"]["blocks"] == 2
        assert "Traceback" not in log_of(daemon)


def test_an_aborted_put_is_announced_only_when_it_is_repeated() -> None:
    with routed(SMALL) as (_, _, ns, router):
        tokens, keys = prompt(2)
        with ns.reserve(keys, tokens=tokens):
            pass
        assert router.has("CPU", [])
        ns.put(keys, payloads(keys))
        eventually(lambda: router.has("CPU", keys))


def test_two_namespaces_of_a_model_are_one_and_a_block_stays_until_both_have_lost_it() -> None:
    with routed(SMALL) as (_, client, ns, router):
        other = client.namespace(layout(revision="2"))
        keys = put(ns, 3)
        put(other, 3)
        eventually(lambda: router.has("CPU", keys))
        ns.invalidate(keys)
        time.sleep(0.2)
        assert router.has("CPU", keys)
        client.invalidate(revision="2")
        eventually(lambda: router.has("CPU", []))
        assert put(other, 3) == keys
        eventually(lambda: router.has("CPU", keys))


@pytest.mark.parametrize(
    ("first", "others"), [("0/2", ["1/2"]), ("tp 0/2, pp 0/2", ["tp 1/2, pp 0/2", "tp 0/2, pp 1/2"])]
)
def test_of_shards_the_first_is_announced_and_models_have_topics(first: str, others: list[str]) -> None:
    with routed(SMALL) as (_, client, _, router):
        for shard in others:
            put(client.namespace(layout(shard=shard)), 3)
        put(client.namespace(layout("other")), 3)
        keys = put(client.namespace(layout(shard=first)), 2)
        eventually(lambda: router.has("CPU", keys))
        late = Router(address(client), "kv@node-1@other")
        eventually(lambda: late.has("CPU", prompt(3)[1]))
        late.socket.close()


def test_only_the_tenants_that_are_named_are_published() -> None:
    settings = {**SMALL, "events": {**EVENTS["events"], "tenants": ["nobody"]}}
    with LocalDaemon(settings) as daemon, Client(daemon.url) as client:
        put(client.namespace(layout()), 3)
        assert client.status()["events"] == client.status()["events"] | {"blocks": 0, "batches": 0}


def test_all_events_are_repeated_for_a_new_subscriber() -> None:
    with routed(SMALL) as (_, client, ns, router):
        keys = put(ns, 30)
        eventually(lambda: router.has("CPU", keys))
        before = router.cleared
        late = Router(address(client))
        eventually(lambda: late.has("CPU", keys))
        eventually(lambda: router.has("CPU", keys) and router.cleared > before)
        assert not late.orphans + router.orphans
        late.socket.close()


def test_batches_are_replayed_from_a_sequence_number(tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    with routed(SMALL, events={**EVENTS["events"], "replay": replay}) as (_, client, ns, router):
        for i in range(5):
            put(ns, 2, i << 10)
            eventually(
                lambda i=i: router.has("CPU", [k for j in range(i + 1) for k in prompt(2, j << 10)[1]])
            )
        first = router.numbers[-3]
        asks = zmq.Context.instance().socket(zmq.DEALER)
        asks.setsockopt(zmq.LINGER, 0)
        asks.connect(replay)
        asks.send_multipart([b"", b"12345"])  # no request: nobody answers
        asks.send_multipart([b"", first.to_bytes(8, "big")])
        got = []
        while True:
            assert asks.poll(5000)
            empty, number, payload = asks.recv_multipart()
            assert not empty
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            got.append((int.from_bytes(number, "big"), payload))
        assert [number for number, _ in got] == router.numbers[-3:]
        again = Router(address(client), "nothing")
        for _, payload in got:
            again.take(payload)
        assert again.known["CPU"].keys() == {low(k) for j in (2, 3, 4) for k in prompt(2, j << 10)[1]}
        assert client.status()["events"]["replays"] == 1
        again.socket.close()
        asks.close()


def test_after_a_restart_blocks_are_announced_when_written_again(tmp_path: Path) -> None:
    events = {"listen": f"ipc://{tmp_path}/events", "node": "node-1"}
    with LocalDaemon({**WITH_NVME, "events": events}) as daemon:
        router, keys = Router(events["listen"]), prompt(8)[1]
        for crash in (False, True):
            with Client(daemon.url, deadline_s=5) as client:
                ns = client.namespace(layout())
                put(ns, 8)
                eventually(lambda: router.has("DISK", keys))
                eventually(lambda: idle(client.status()))
            before = router.cleared
            if crash:
                daemon.kill()
                daemon.start()
            else:
                daemon.restart()
            eventually(lambda: (router.hear(), router.cleared)[1] > before)  # noqa: B023
            assert router.has("DISK", [])
            with Client(daemon.url, deadline_s=5) as client:
                ns = client.namespace(layout())
                assert ns.lookup(keys) == 8
                # Some of it is found stored, and said again by who comes for the rest.
                put(ns, 8)
                eventually(lambda: router.has("DISK", keys))
        assert not router.orphans
        assert router.numbers == sorted(set(router.numbers))
        router.socket.close()


def test_a_slow_subscriber_delays_no_other() -> None:
    with routed(SMALL) as (_, client, ns, router):
        mute = zmq.Context.instance().socket(zmq.SUB)
        mute.setsockopt(zmq.LINGER, 0)
        mute.setsockopt(zmq.RCVHWM, 1)
        mute.connect(address(client))
        mute.subscribe(b"")
        for i in range(200):
            put(ns, 2, i << 10)
        keys = [key for i in range(200) for key in prompt(2, i << 10)[1]]
        eventually(lambda: router.has("CPU", keys))
        assert client.status()["events"]["dropped_batches"] == 0
        mute.close()


def test_of_tokens_each_block_must_have_all() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, strict=True) as client:
        ns, (tokens, keys) = client.namespace(layout()), prompt(3)
        with pytest.raises(MisuseError, match="11 tokens for 3 keys"):
            ns.put(keys, payloads(keys), tokens=tokens[:-1])
        assert ns.put(keys, payloads(keys), tokens=tokens).stored == 3  # for nobody
        assert client.status()["events"] == {}


def test_an_address_that_is_taken_is_a_problem_and_the_daemon_serves(tmp_path: Path) -> None:
    with routed(SMALL) as (_, client, _, _):
        taken = address(client)
        with LocalDaemon({**SMALL, "events": {"listen": taken}}) as other, Client(other.url) as theirs:
            [problem] = theirs.status()["problems"]
            assert "events.listen" in problem
            assert put(theirs.namespace(layout()), 2)
            assert "Traceback" not in log_of(other)


# -- the thread


def test_batches_above_the_queue_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_MOST_WAITING", 2)
    monkeypatch.setattr(Publisher, "_run", lambda self: None)
    sends = Publisher("tcp://127.0.0.1:*", None, lambda: None)
    assert [sends.put("t", [CLEARED]) for _ in range(3)] == [True, True, False]
    assert sends.counts["dropped_batches"] == 1
    sends._context.destroy(linger=0)


def test_kept_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_KEPT_BATCHES", 3)
    sends = Publisher("tcp://127.0.0.1:*", None, lambda: None)
    for i in range(5):
        sends.put("t", [Removed([i], "CPU")])
    eventually(lambda: sends.counts["batches"] == 5)
    assert [number for number, _ in sends._kept] == list(range(sends._next - 3, sends._next))
    assert sends._kept_bytes == sum(len(payload) for _, payload in sends._kept)
    sends.close()


def test_a_chain_is_one_event_and_a_branch_is_another() -> None:
    chain = Stored([1], None, [b"\1\0\0\0"], "CPU")
    assert chain.takes(1, "CPU", 4)
    assert not chain.takes(1, "DISK", 4)
    assert not chain.takes(None, "CPU", 4)
    assert not chain.takes(1, "CPU", 8)


def test_without_the_package_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match="pyzmq") as caught:
        Publisher("tcp://127.0.0.1:*", None, lambda: None)
    assert caught.value.hint == "pip install 'kvstore[events]'"
