"""Prompts are stored by one engine and loaded by another, with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.trtllm.conftest import Make, answers, prompt, write_model
from tests.engines.trtllm.executor import Request

PROMPT = prompt(100, 43)  # 10 blocks of 4 tokens, and 3 tokens


def test_another_engine_loads_what_one_has_stored(engine: Make) -> None:
    first, second = engine(), engine()
    [one] = first.run(PROMPT)
    assert one.matched == 0
    first.settle()
    [two] = second.run(PROMPT)
    assert two.matched == 40
    assert two.answer == one.answer
    pages = [first.page(i) for i in one.block_ids[:10]]
    assert [second.page(i) for i in two.block_ids[:10]] == pages
    assert len(set(pages)) == 10


def test_the_fake_model_notices_zeroed_pages(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if loads brought zeros, the answers would differ."""
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    monkeypatch.setattr(second.worker, "_staged", second.worker._staged.clone().zero_())
    [two] = second.run(PROMPT)
    assert two.matched == 40
    assert [two.answer] != expected


def test_a_shared_prefix_is_loaded_and_the_rest_computed(engine: Make) -> None:
    first, second, alone = engine(), engine(), engine(store=False)
    other = PROMPT[:22] + prompt(900, 21)
    first.run(PROMPT)
    first.settle()
    [request] = second.run(other)
    assert request.matched == 20
    assert [request.answer] == answers(alone.run(other)), "computed without the store"
    second.settle()
    [again] = engine().run(other)
    assert again.matched == 40


def test_at_least_one_token_is_computed(engine: Make) -> None:
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT[:40]))
    first.settle()
    [request] = second.run(PROMPT[:40])
    assert request.matched == 36, "the last of 10 whole blocks is computed"
    assert [request.answer] == expected


def test_generated_tokens_are_stored_too(engine: Make) -> None:
    """As for the next turn of a conversation."""
    first, second = engine(), engine()
    [one] = first.run(PROMPT, max_tokens=14)
    first.settle()
    saves = [save for step in first.steps for save in step.saves]
    assert [len(save.keys) for save in saves] == [10, 1, 1, 1, 1]
    parents = [None, *(save.keys[-1] for save in saves[:-1])]
    assert [save.parent for save in saves] == parents
    turn = PROMPT + one.answer + prompt(50, 9)
    [two] = second.run(turn)
    assert two.matched == 56, "43 + 14 tokens; the last of them is not computed"
    assert [two.answer] == answers(engine(store=False).run(turn))


@pytest.mark.parametrize("how", [{"overlap": True}, {"chunk": 7}, {"chunk": 4, "overlap": True}])
def test_overlapped_steps_and_chunked_prompts(engine: Make, how: dict[str, Any]) -> None:
    first, second, alone = engine(**how), engine(**how), engine(store=False)
    prompts = [PROMPT, PROMPT[:30], prompt(500, 61)]
    expected = answers(alone.run(*prompts, max_tokens=9))
    for executor, least in ((first, 0), (second, 28)):
        requests = executor.run(*prompts, max_tokens=9)
        assert answers(requests) == expected
        assert min(request.matched for request in requests) >= least
        executor.settle()


@pytest.mark.parametrize("subtracts", [True, False])
def test_only_computed_blocks_are_stored_behind_a_load(engine: Make, subtracts: bool) -> None:
    """Releases differ in whether the first position counts the promised tokens."""
    first, second = engine(), engine(chunk=4, subtracts=subtracts)
    expected = answers(engine(store=False).run(PROMPT))
    first.run(PROMPT[:21])
    first.settle()
    second.add(request := Request(PROMPT))
    while second._active:
        second.step()
        second.settle()
        ends = [save for step in second.steps for save in step.saves]
        stored = 5 + sum(len(save.keys) for save in ends)
        assert stored * 4 <= request.position
    assert (request.matched, [request.answer]) == (20, expected)
    [again] = engine().run(PROMPT)
    assert (again.matched, [again.answer]) == (40, expected)


def test_what_the_device_has_is_not_loaded_but_stored_if_the_store_lacks_it(engine: Make) -> None:
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    for namespace in first.scheduler._namespaces:
        assert namespace.invalidate() > 0
    [request] = first.run([*PROMPT, 7, 8, 9, 10, 11, 12, 13])
    assert (request.reused, request.matched) == (40, 0)
    first.settle()
    [again] = second.run([*PROMPT, 7, 8, 9, 10, 11, 12, 13])
    assert again.matched == 48
    assert again.answer == request.answer


def test_the_store_continues_where_the_device_ends(engine: Make) -> None:
    first, second = engine(), engine()
    expected = answers(first.run(PROMPT))
    first.settle()
    second.run(PROMPT[:18])
    [request] = second.run(PROMPT)
    assert (request.reused, request.matched) == (16, 24)
    assert [request.answer] == expected


def test_a_partly_matched_block_on_the_device_is_not_loaded(engine: Make) -> None:
    """As with `enable_partial_reuse`: the load would write into the middle of a page."""
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    request = Request(PROMPT)
    assert second.scheduler.get_num_new_matched_tokens(request, 18) == (0, False)
    assert second.scheduler.get_num_new_matched_tokens(request, 20) == (20, False)


def test_many_requests_share_a_batch(engine: Make) -> None:
    first, second, alone = engine(pages=400), engine(pages=400), engine(pages=400, store=False)
    prompts = [prompt(1000 * i, 20 + i) for i in range(12)]
    expected = answers(alone.run(*prompts))
    assert answers(first.run(*prompts)) == expected
    first.settle()
    requests = second.run(*prompts)
    assert answers(requests) == expected
    assert [request.matched for request in requests] == [(19 + i) // 4 * 4 for i in range(12)]


def test_context_logits_need_every_token_computed(engine: Make) -> None:
    first, second = engine(), engine()
    first.run(PROMPT)
    first.settle()
    [request] = second.run(PROMPT, return_context_logits=True)
    assert request.matched == 0


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model with pages of 128 KiB: 8 of them in 1 MiB."""
    return write_model(tmp_path / "large", hidden_size=4 * 2048)


def test_memory_for_loads_is_used_again(engine: Make, options: Any, large: Path) -> None:
    """The last step whose loads have ended is told through the shared memory."""
    options(staging_mib=1)
    first, second = engine(large), engine(large)
    assert first.worker._staged.shape[0] == 8
    prompts = [prompt(1000 * i, 33) for i in range(3)]
    for each in prompts:
        first.run(each)
        first.settle()
    for each in prompts:
        [request] = second.run(each)
        assert request.matched == 32


def test_a_prompt_that_is_larger_than_the_memory_is_stored_and_loaded_in_part(
    engine: Make, options: Any, large: Path
) -> None:
    options(staging_mib=1)
    first, second = engine(large), engine(large)
    long = prompt(0, 81)
    for _ in range(3):
        first.run(long)
        first.settle()
    assert first.worker.dropped_blocks > 0
    [request] = second.run(long)
    assert request.matched == 32
    assert [request.answer] == answers(engine(large, store=False).run(long))
