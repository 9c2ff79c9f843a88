"""A daemon that is absent, killed, stopped or back, and a store that fails: the same output, no error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.client.presence_tables import HEARD_S
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import Figures, PrefixCache, prefix
from kvstore_transformers.blocks import BlockShape, Columns
from tests.daemons import eventually
from tests.engines.transformers.models import BLOCK, generated, llama, same_bits, tokens
from tests.processes import stop

Make = Callable[..., PrefixCache]
MODEL = llama()
PROMPT = tokens(104)


@pytest.fixture(scope="module")
def alone() -> Any:
    return generated(MODEL, PROMPT)


def restored(cache: PrefixCache, alone: Any) -> int:
    """Tokens restored by a call whose output is right."""
    assert same_bits(generated(cache, PROMPT), alone)
    return cache.last.restored_tokens


def test_absent(tmp_path: Path, alone: Any) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        assert restored(cache, alone) == 0
        assert (cache.last.stored_blocks, cache.last.denied_blocks) == (0, 6)
        assert cache.last.why


def test_no_request_follows_a_denial(tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_PIECE_BYTES", 1)
    with Client(f"unix://{tmp_path}/none.sock") as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        real, puts = cache._ns.put, []
        monkeypatch.setattr(cache._ns, "put", lambda *args: puts.append(args) or real(*args))
        assert restored(cache, alone) == 0
        assert len(puts) == 1
        assert cache.last.denied_blocks == 6


def test_absent_for_a_strict_client(tmp_path: Path, alone: Any) -> None:
    with Client(f"unix://{tmp_path}/none.sock", strict=True) as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        assert restored(cache, alone) == 0
        assert cache.failures == {"restore": 1, "store": 1}


def test_killed_and_started_again(own_daemon: LocalDaemon, alone: Any) -> None:
    with Client(own_daemon.url) as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        assert restored(cache, alone) == 0
        assert restored(cache, alone) == 80
        own_daemon.kill()
        assert restored(cache, alone) == 0
        assert cache.last.denied_blocks == 6
        own_daemon.start()
        eventually(lambda: restored(cache, alone) == 80)
        assert cache.last.denied_blocks == 0
        assert not cache.failures


def test_a_stopped_daemon_delays_a_call_up_to_its_deadline(own_daemon: LocalDaemon, alone: Any) -> None:
    prompts = [PROMPT, tokens(104, seed=1), tokens(104, seed=2), tokens(104, seed=3)]
    batch_alone = generated(MODEL, *prompts)
    with Client(own_daemon.url, deadline_s=1.0) as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        assert restored(cache, alone) == 0
        stop(own_daemon.pid)
        try:
            time.sleep(
                HEARD_S
            )  # until then its presence tables are believed, and blocks are asked for in vain
            started_s = time.monotonic()
            assert same_bits(generated(cache, *prompts), batch_alone)
            took_s = time.monotonic() - started_s
        finally:
            os.kill(own_daemon.pid, signal.SIGCONT)
        assert cache.last == Figures(4 * 104, denied_blocks=4 * 6, why=cache.last.why)
        # One deadline to restore and at most one to store, whatever the rows: who was away is let be a while.
        assert 0.9 < took_s < 2.5
        eventually(lambda: restored(cache, alone) == 80)


@pytest.mark.parametrize("method", ["fill", "to_cache"])
def test_a_failed_restore_returns_an_empty_cache(
    cached: Make, alone: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    cache = cached(MODEL)
    assert restored(cache, alone) == 0
    real, calls = getattr(Columns, method), []

    def half_then_fail(self: Columns, *args: Any) -> None:
        calls.append(real(self, *args))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Columns, method, half_then_fail)
    assert restored(cache, alone) == 0
    assert len(calls) == 1
    assert cache.failures == {"restore": 1}


def test_a_failed_store_is_counted(cached: Make, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cached(MODEL)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BlockShape, "blocks", fail)
    assert restored(cache, alone) == 0
    assert cache.failures == {"store": 1}


def test_a_block_evicted_after_its_lookup_ends_the_prefix(
    cached: Make, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached(MODEL)
    assert restored(cache, alone) == 0
    real = cache._ns.get
    monkeypatch.setattr(cache._ns, "get", lambda keys, out, **_: min(2, real(keys, out)))
    assert restored(cache, alone) == 32


def test_a_denied_store_is_tried_again(own_daemon: LocalDaemon) -> None:
    with Client(own_daemon.url) as client:
        cache = PrefixCache(MODEL, client, BLOCK)
        past = generated(MODEL, PROMPT).past_key_values
        own_daemon.kill()
        cache.store(past, torch.tensor([PROMPT]))
        assert cache.last.denied_blocks == 6
        own_daemon.start()

        def stored() -> bool:
            cache.store(past, torch.tensor([PROMPT]))
            return cache.last == Figures(stored_blocks=6)

        eventually(stored)
