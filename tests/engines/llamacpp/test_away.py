"""A daemon that is absent, killed, stopped or back, and a connector that fails: the same answer, no error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore.client.presence_tables import HEARD_S
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp import KVStoreCache, blocks, context
from kvstore_llamacpp.state import State
from tests.daemons import eventually
from tests.engines.gguf_models import BLOCK, tokens
from tests.engines.llamacpp.models import answer, same, split_answer
from tests.processes import stop

Make = Callable[..., Llama]
PROMPT = tokens(5 * BLOCK + 3)


@pytest.fixture
def alone(plain: Make) -> dict[int, Any]:
    """Answers without a store, by the number of tokens that were evaluated before the others."""
    reference = plain()
    return {at: split_answer(reference, PROMPT, at) for at in (0, 80)}


def restored(llm: Llama, alone: dict[int, Any]) -> int:
    """Tokens restored into an empty context for a completion whose answer is right."""
    context.clear(llm)
    given = answer(llm, PROMPT)
    n = int(llm.cache.last.restored_tokens)
    assert same(given, alone[n])
    return n


def with_cache(llm: Llama, client: Client) -> Llama:
    llm.set_cache(KVStoreCache(llm, client, BLOCK, revision="test"))
    return llm


def test_absent(tmp_path: Path, plain: Make, alone: dict[int, Any]) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client:
        llm = with_cache(plain(), client)
        assert restored(llm, alone) == 0
        assert (llm.cache.last.stored_blocks, llm.cache.last.denied_blocks) == (0, 5)
        assert llm.cache.last.why
        assert PROMPT not in llm.cache
        with pytest.raises(KeyError):
            llm.cache[PROMPT]


def test_no_request_follows_a_denial(
    tmp_path: Path, plain: Make, alone: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_PIECE_BYTES", 1)
    with Client(f"unix://{tmp_path}/none.sock") as client:
        llm = with_cache(plain(), client)
        real, puts = llm.cache._ns.put, []
        monkeypatch.setattr(llm.cache._ns, "put", lambda *args: puts.append(args) or real(*args))
        assert restored(llm, alone) == 0
        assert len(puts) == 1
        assert llm.cache.last.denied_blocks == 5


def test_absent_for_a_strict_client(tmp_path: Path, plain: Make, alone: dict[int, Any]) -> None:
    with Client(f"unix://{tmp_path}/none.sock", strict=True) as client:
        llm = with_cache(plain(), client)
        assert restored(llm, alone) == 0
        assert PROMPT not in llm.cache
        assert llm.cache.failures == {"restore": 1, "store": 1, "lookup": 1}


def test_killed_and_started_again(own_daemon: LocalDaemon, plain: Make, alone: dict[int, Any]) -> None:
    with Client(own_daemon.url) as client:
        llm = with_cache(plain(), client)
        assert restored(llm, alone) == 0
        assert restored(llm, alone) == 80
        own_daemon.kill()
        assert restored(llm, alone) == 0
        assert llm.cache.last.denied_blocks == 5
        own_daemon.start()
        eventually(lambda: restored(llm, alone) == 80)
        assert not llm.cache.failures


def test_a_stopped_daemon_delays_a_completion_up_to_its_deadlines(
    own_daemon: LocalDaemon, plain: Make, alone: dict[int, Any]
) -> None:
    with Client(own_daemon.url, deadline_s=1.0) as client:
        llm = with_cache(plain(), client)
        assert restored(llm, alone) == 0
        stop(own_daemon.pid)
        try:
            time.sleep(HEARD_S)  # until then its presence tables are believed
            started_s = time.monotonic()
            assert restored(llm, alone) == 0
            took_s = time.monotonic() - started_s
        finally:
            os.kill(own_daemon.pid, signal.SIGCONT)
        assert 0.9 < took_s < 3
        eventually(lambda: restored(llm, alone) == 80)


@pytest.mark.parametrize("refused", [False, True])
def test_a_restore_that_fails_leaves_an_empty_context(
    cached: Make, alone: dict[int, Any], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    llm = cached()
    assert restored(llm, alone) == 0

    def fail(*args: Any) -> int:
        if refused:
            return 0
        raise RuntimeError("out of memory")

    monkeypatch.setattr(context.llama_cpp, "llama_state_seq_set_data", fail)
    assert restored(llm, alone) == 0
    assert llm.cache.failures == {"restore": 1}


def test_a_store_that_fails_is_counted(
    cached: Make, alone: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = cached()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(State, "blocks", fail)
    assert restored(llm, alone) == 0
    assert llm.cache.failures == {"store": 1}


def test_a_denied_store_is_tried_again(own_daemon: LocalDaemon, plain: Make, alone: dict[int, Any]) -> None:
    with Client(own_daemon.url) as client:
        llm = with_cache(plain(), client)
        own_daemon.kill()
        assert restored(llm, alone) == 0
        own_daemon.start()

        def stored() -> bool:
            llm.cache[PROMPT] = llm.save_state()
            return PROMPT in llm.cache

        eventually(stored)
        assert restored(llm, alone) == 80
