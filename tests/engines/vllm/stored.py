"""What a daemon has stored of an engine's prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, said


def blocks_of(
    engine: Engine, client: Client, asked: list[int], group: int, shard: int = 0, **how: Any
) -> tuple[list[bytes], Any]:
    """The keys of a prompt's stored blocks of a group and a shard, and their namespace. `how`: see `keys`."""
    namespace = client.namespace(Layout(**engine("layouts", group=group)[shard]))
    keys = [bytes.fromhex(key) for key in engine("keys", prompt=asked, group=group, **how)]
    return [key for key, there in zip(keys, namespace.contains(keys), strict=True) if there], namespace


def each_shard(
    engine: Engine, client: Client, asked: list[int], **how: Any
) -> Iterator[tuple[list[bytes], Any]]:
    """See `blocks_of`, for all groups and shards."""
    for group in range(engine("groups")):
        for shard in range(len(engine("layouts", group=group))):
            yield blocks_of(engine, client, asked, group, shard, **how)


def replace_payloads(engine: Engine, url: str, asked: list[int], zero: bool, **how: Any) -> None:
    """Stores a prompt's blocks of all groups and shards again: the same bytes, or zeros."""
    replaced = 0
    with Client(url, deadline_s=10.0) as client:
        for keys, ns in each_shard(engine, client, asked, **how):
            replaced += len(keys)
            store_again(ns, keys, zero)
    assert replaced


def store_again(namespace: Any, keys: list[bytes], zero: bool) -> None:
    """Stores blocks again: the same bytes, or zeros."""
    if not keys:
        return  # no token of a window or chunk is before the end of the prefix
    payloads = np.empty((len(keys), namespace.layout.block_bytes), np.uint8)
    assert namespace.get(keys, payloads) == len(keys)
    namespace.invalidate(keys)
    if zero:
        payloads[:] = 0
    assert namespace.put(keys, payloads).stored == len(keys)


def settled(daemon: LocalDaemon) -> None:
    """Waits until nothing more is stored: saves go on after an answer."""
    with Client(daemon.url, deadline_s=10.0) as client:
        stored = -1
        while stored != (stored := client.status()["counters"]["stored_blocks"]):
            time.sleep(1.0)


def damage(client: Client, namespace: Any, key: bytes) -> None:
    """Alters a stored block in DRAM, as a client of the tenant can."""
    lease = namespace.acquire([key])
    place = int(np.frombuffer(lease._slots.records, "<u8")[0])
    lease.release()
    block_bytes = namespace.layout.block_bytes
    namespace.put([b"maps the extent writable"], np.ones((1, block_bytes), np.uint8))
    extent = client._maps.get(place >> 32, True)
    assert extent is not None
    slot_bytes = next(iter(extent._tables))
    extent.payload(slot_bytes, place & 0xFFFFFFFF, block_bytes)[0] ^= 1


def answers_from_the_store(engine: Engine, own: LocalDaemon, asked: list[int], **how: Any) -> bool:
    """Whether a hit is answered with the stored bytes: with zeros the answer is another one."""
    before = engine.fresh([asked], **how)
    replace_payloads(engine, own.url, asked, True, **how)
    after = engine.fresh([asked], **how)
    assert cached(after) == cached(before) != [0]
    assert engine("failures") == {}
    return said(after) != said(before)
