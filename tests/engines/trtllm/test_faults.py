"""Absent, killed and stopped daemons, altered bytes, exceptions, early ends: answers stay right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, chain_keys
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_trtllm.scheduler import BrokenPromiseError
from tests.daemons import eventually
from tests.engines.stores import SETTINGS
from tests.engines.trtllm.conftest import Make, alter, answers, prompt
from tests.engines.trtllm.executor import FakeExecutor, Request

PROMPT = prompt(100, 43)
Options = Callable[..., None]


def found_again(engine: Make, expected: list[list[int]], matched: int = 40) -> bool:
    """Whether another engine finds the prompt, once the clients have connected again."""

    def found() -> bool:
        storing, loading = engine(), engine()
        assert answers(storing.run(PROMPT)) == expected
        storing.settle()
        [request] = loading.run(PROMPT)
        assert [request.answer] == expected
        return bool(request.matched == matched)

    return eventually(found)


# -- daemons


def test_a_daemon_that_is_absent_at_the_start(engine: Make, options: Options, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    options(url=f"unix://{socket}", deadline_s=2)
    executor = engine()
    expected = answers(executor.run(PROMPT))
    executor.settle()
    executor.forget_pages()
    with LocalDaemon(SETTINGS) as daemon:
        socket.symlink_to(daemon.url.removeprefix("unix://"))

        def found() -> bool:
            executor.forget_pages()
            [request] = executor.run(PROMPT)
            assert [request.answer] == expected
            executor.settle()
            return request.matched == 40

        assert eventually(found)


def test_a_daemon_killed_and_restarted(engine: Make, options: Options, own_daemon: LocalDaemon) -> None:
    options(url=own_daemon.url, deadline_s=2)
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    own_daemon.kill()
    began_s = time.monotonic()
    [request] = second.run(PROMPT)
    second.settle()
    assert time.monotonic() - began_s < 8
    assert (request.matched, [request.answer]) == (0, expected)
    own_daemon.start()
    assert found_again(engine, expected)


def test_a_daemon_killed_between_a_promise_and_its_load(
    engine: Make, options: Options, own_daemon: LocalDaemon
) -> None:
    """The promised bytes are in the engine's own memory: the load cannot fail any more."""
    options(url=own_daemon.url, deadline_s=2)
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    second.between = own_daemon.kill
    second.add(request := Request(PROMPT))
    second.step()
    second.between = lambda: None
    while second._active:
        second.step()
    assert (request.matched, [request.answer]) == (40, expected)


def test_a_stopped_daemon_delays_one_prompt_by_its_deadline(
    engine: Make, options: Options, own_daemon: LocalDaemon
) -> None:
    options(url=own_daemon.url, deadline_s=1)
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert answers(second.run(PROMPT)) == expected
        assert time.monotonic() - began_s < 3
        began_s = time.monotonic()
        for i in range(5):
            second.run(prompt(10000 * i, 30))
        assert time.monotonic() - began_s < 1, "the store is not asked for 5 s"
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)


def test_a_stopped_daemon_delays_one_store_by_its_deadline(
    engine: Make, options: Options, own_daemon: LocalDaemon
) -> None:
    options(url=own_daemon.url, deadline_s=0.2)
    executor, late = engine(), threading.Event()
    executor.worker._saver.submit(late.wait, 20)
    for i in range(6):
        executor.run(prompt(1000 * i, 33))
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        late.set()
        began_s = time.monotonic()
        executor.settle()
        assert time.monotonic() - began_s < 5, "the others are dropped"
        assert executor.worker.dropped_blocks >= 40
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)


def stored(executor: FakeExecutor, tokens: list[int]) -> tuple[Any, list[bytes]]:
    return executor.scheduler._namespaces[0], chain_keys(tokens, executor.tokens)


def test_zeros_in_the_store_are_noticed_by_the_fake_model(engine: Make) -> None:
    """The control: blocks that were put as zeros are valid blocks, and give another answer."""
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    namespace, keys = stored(first, PROMPT)
    namespace.invalidate(keys)
    zeros = np.zeros((len(keys), namespace.layout.block_bytes), np.uint8)
    assert namespace.put(keys, zeros).stored == len(keys)
    [request] = second.run(PROMPT)
    assert request.matched == 40
    assert [request.answer] != expected


def test_an_altered_block_is_a_miss(engine: Make) -> None:
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    namespace, keys = stored(first, PROMPT)
    alter(namespace, keys, 6)
    [request] = second.run(PROMPT)
    assert request.matched == 24, "6 blocks are whole"
    assert [request.answer] == expected
    assert second.scheduler._rows.free == second.worker._staged.shape[0] - 6, "others are free again"


# -- requests that end early


@pytest.mark.parametrize("steps", [0, 1, 3, 12])
def test_a_request_that_is_cancelled(engine: Make, steps: int) -> None:
    first, second, alone = engine(chunk=8), engine(chunk=8), engine(store=False)
    expected = answers(alone.run(PROMPT, prompt(7, 25), max_tokens=9))
    first.run(PROMPT[:21])
    first.settle()
    for executor in (first, second):
        executor.forget_pages()
        executor.add(cancelled := Request(PROMPT, max_tokens=9))
        for _ in range(steps):
            executor.step()
        if cancelled in executor._active:
            executor.cancel(cancelled)
        assert answers(executor.run(PROMPT, prompt(7, 25), max_tokens=9)) == expected
        executor.settle()
    assert answers(engine().run(PROMPT, prompt(7, 25), max_tokens=9)) == expected


def test_a_request_that_is_cancelled_before_its_load(engine: Make) -> None:
    """Its memory is used for others."""
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    second.run([1])
    free = second.scheduler._rows.free
    for _ in range(3):
        assert second.scheduler.get_num_new_matched_tokens(request := Request(PROMPT), 0) == (40, False)
        assert second.scheduler._rows.free == free - 10
        assert second.scheduler.get_num_new_matched_tokens(request, 8) == (32, False), "asked again"
        assert second.scheduler._rows.free == free - 8
        assert second.scheduler.request_finished(request, []) is False
        assert second.scheduler.request_finished(request, []) is False, "told twice"
        assert second.scheduler._rows.free == free


def test_a_request_of_one_token(engine: Make) -> None:
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT, max_tokens=1))
    first.settle()
    [request] = second.run(PROMPT, max_tokens=1)
    assert (request.matched, [request.answer]) == (40, expected)


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_request_that_is_paused_and_starts_again(engine: Make, steps: int) -> None:
    """TensorRT-LLM tells then only what has changed since: nothing of it may be stored under a wrong name."""
    first, second, alone = (
        engine(chunk=16),
        engine(pages=400),
        engine(pages=400, store=False),
    )
    start = prompt(3, 30)
    [expected] = alone.run(start, max_tokens=20)
    first.add(request := Request(start, max_tokens=20))
    for _ in range(steps):
        first.step()
    first.settle()
    stored(first, start)[0].invalidate()
    first.pause(request)
    first.forget_pages()
    others = first.run(prompt(77, 30))
    assert (request.prompt + request.answer)[30:] == expected.answer
    assert answers(others) == answers(alone.run(prompt(77, 30)))
    first.settle()
    whole = start + expected.answer
    for begin in (0, *range(29, 45)):
        asked = whole[begin:] + [5] * 9
        assert answers(second.run(asked)) == answers(alone.run(asked)), f"from token {begin} on"


def test_a_forward_pass_that_fails(engine: Make) -> None:
    first, second, alone = engine(), engine(), engine(store=False)
    expected = answers(alone.run(PROMPT))
    first.add(failed := Request(PROMPT))
    first.step(fails="out of memory")
    assert failed.failed
    assert answers(first.run(PROMPT)) == expected
    first.settle()
    assert answers(second.run(PROMPT)) == expected


def test_pages_may_be_written_again_before_they_are_stored(engine: Make) -> None:
    """What is stored are the bytes that the forward pass has left, however late the daemon takes them."""
    first, second, alone = engine(pages=16), engine(), engine(store=False)
    expected = answers(alone.run(PROMPT))
    late = threading.Event()
    first.worker._saver.submit(late.wait, 20)
    first.run(PROMPT)
    first.forget_pages()
    first.run(prompt(5000, 43))
    late.set()
    first.settle()
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (40, expected)


def test_stores_wait_for_the_copies(engine: Make) -> None:
    """On a GPU, `wait_for_save` returns before the copies have ended."""
    first, second = engine(), engine()

    class Copy:
        """A fake of an event behind copies, which end when somebody waits for them."""

        def __init__(self, rows: Any, bytes_: list[Any]) -> None:
            self.rows, self.bytes = rows, bytes_

        def passed(self) -> bool:
            return False

        def wait(self) -> None:
            for row, each in zip(self.rows, self.bytes, strict=True):
                row.copy_(each)

    def save(rows: Any, block_ids: Any, stream: Any) -> Copy:
        return Copy(rows, [first.worker._pages._rows[i].clone() for i in block_ids])

    first.worker._pages.save = save  # type: ignore[method-assign]
    expected = answers(first.run(PROMPT))
    first.settle()
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (40, expected)


def test_staged_blocks_stay_until_their_loads_have_ended(engine: Make) -> None:
    """On a GPU, `start_load_kv` returns before the copies have ended."""
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    ended = [False]

    class Copy:
        """A fake of an event behind copies."""

        def passed(self) -> bool:
            return ended[0]

    load = second.worker._pages.load
    second.worker._pages.load = lambda *what: (load(*what), Copy())[1]  # type: ignore[method-assign]
    total = second.worker._staged.shape[0]
    for _ in range(3):
        second.run(PROMPT)
        second.forget_pages()
    assert second.scheduler._rows.free == total - 30
    ended[0] = True
    for _ in range(2):
        second.run(PROMPT)
        second.forget_pages()
    assert second.scheduler._rows.free >= total - 20


# -- exceptions


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


SCHEDULER = ["_match", "_is_open", "_hold", "_saves", "_forget"]


@pytest.mark.parametrize("name", SCHEDULER)
def test_an_exception_in_the_scheduler_half_is_a_miss(
    engine: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second, alone = engine(), engine(), engine(store=False)
    expected = answers(alone.run(PROMPT, prompt(9, 30)))
    first.run(PROMPT)
    first.settle()
    with monkeypatch.context() as patch:
        patch.setattr(second.scheduler, name, fails)
        assert answers(second.run(PROMPT, prompt(9, 30))) == expected
    assert second.scheduler.failures
    second.forget_pages()
    requests = second.run(PROMPT, prompt(9, 30))
    assert answers(requests) == expected
    assert requests[0].matched == 40
    second.settle()
    assert answers(engine().run(PROMPT, prompt(9, 30))) == expected


def test_after_an_exception_a_request_is_not_followed(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was told to a failed hook is lost: later keys would leave it out."""
    first, second, alone = engine(), engine(), engine(store=False)
    [expected] = alone.run(PROMPT, max_tokens=20)
    first.add(request := Request(PROMPT, max_tokens=20))
    for step in range(20):
        with monkeypatch.context() as patch:
            if step == 5:
                patch.setattr(first.scheduler, "_saves", fails)
            first.step()
    assert request.answer == expected.answer
    first.settle()
    assert first.scheduler.failures["build_connector_meta"] == 1
    whole = PROMPT + expected.answer
    for lost in range(43, 53):
        asked = whole[:lost] + whole[lost + 1 :]
        assert answers(second.run(asked)) == answers(alone.run(asked)), f"without token {lost}"


@pytest.mark.parametrize("name", ["_copy_out", "_open"])
def test_an_exception_in_the_worker_half_stores_nothing(
    engine: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second, alone = engine(), engine(), engine(store=False)
    expected = answers(alone.run(PROMPT))
    monkeypatch.setattr(first.worker, name, fails)
    assert answers(first.run(PROMPT)) == expected
    first.settle()
    assert first.worker.failures
    assert len(first.worker._free) == first.worker._outgoing.shape[0], "its memory is free again"
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (0, expected)


def test_an_exception_while_loads_are_counted_harms_no_load(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    monkeypatch.setattr(second.worker, "_note_loaded", fails)
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (40, expected)
    assert set(second.worker.failures) == {"start_load_kv", "get_finished"}


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_a_page_that_is_none_is_not_stored(engine: Make, bad: int) -> None:
    """-1 is what TensorRT-LLM writes for a block without a page; as an index it is another request's page."""
    first, second = engine(), engine()
    saves = first.scheduler._saves

    def wrong(*what: Any) -> Any:
        for save in saves(*what):
            save.block_ids[1] = bad
            yield save

    first.scheduler._saves = wrong  # type: ignore[method-assign]
    first.run(PROMPT)
    first.settle()
    assert first.worker.failures["wait_for_save"] > 0
    assert len(first.worker._free) == first.worker._outgoing.shape[0], "its memory is free again"
    [request] = second.run(PROMPT)
    assert request.matched == 0


def test_a_load_that_fails_stops_the_engine(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM has no way to take a promise back. So nobody may compute with empty pages."""
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    monkeypatch.setattr(second.worker._pages, "load", fails)
    with pytest.raises(RuntimeError, match="injected"):
        second.run(PROMPT)


def test_a_promise_without_pages_stops_the_engine(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    monkeypatch.setattr(second.scheduler, "update_state_after_alloc", lambda *_: None)
    with pytest.raises(BrokenPromiseError, match="was promised blocks 0 to 10"):
        second.run(PROMPT)


def test_a_step_that_is_passed_again_is_not_repeated(engine: Make) -> None:
    """TensorRT-LLM leaves the last step with the worker when it makes no new one."""
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    [request] = second.run(PROMPT)
    step = second.steps[0]
    assert step.loads
    pages = second.pool.clone()
    second.worker._staged.zero_()
    for metadata in (step, None, "other"):
        second.worker.bind_connector_meta(metadata)
        second.worker.start_load_kv(None)
        second.worker.wait_for_save(None)
    assert (second.pool == pages).all() or second.pool.isnan().any()
    assert [second.page(i) for i in request.block_ids[:10]] == [first.page(i) for i in range(10)]


def test_a_full_quota_denies_and_the_engine_goes_on(engine: Make, options: Options) -> None:
    with LocalDaemon({"dram": {"limit": "4MiB", "huge_pages": False}}) as small:
        options(url=small.url)
        first, alone = engine(pages=4000), engine(pages=4000, store=False)
        prompts = [prompt(1000 * i, 400) for i in range(10)]
        assert answers(first.run(*prompts)) == answers(alone.run(*prompts))
        first.settle()
        assert not first.worker.failures
        with Client(small.url) as client:
            assert client.status()
