"""A second process finds what the first has stored, and answers as without the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import Engine, full_pages, hicache, prompt, same
from tests.engines.sglang.stored import keys_of, layout_of, watched, zero

LAYOUTS = ("layer_first", "page_first_direct")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_a_second_process_loads_what_the_first_has_stored(
    plain: Engine, model: Path, daemon: LocalDaemon, tmp_path: Path, layout: str, page_tokens: int
) -> None:
    asked = prompt(10, 300)
    prompts = [asked, asked + prompt(11, 100), asked[:200] + prompt(12, 50)]
    expected = plain.fresh(prompts)
    how = watched(daemon, tmp_path / "layout", layout=layout, engine={"page_size": page_tokens})
    with Engine(model, **how) as first:
        [cold] = first.store([asked])
        assert (cold.cached, cold.says(expected[0])) == (0, True)
    with Engine(model, **how) as second:
        answers = second.fresh(prompts)
        assert same(answers, expected)
        # What follows a part of the stored prompt is computed.
        whole = [page_tokens * (tokens // page_tokens) for tokens in (299, 300, 200)]
        assert [answer.stored for answer in answers] == whole
        assert [answer.cached for answer in answers] == whole
        # The stored bytes are used: with zeros, the answer is another one.
        zero(daemon, layout_of(tmp_path / "layout"), keys_of(asked, page_tokens))
        [changed] = second.fresh([asked])
        assert (changed.stored, changed.says(expected[0])) == (whole[0], False)


def test_a_hit_of_the_store_is_bit_identical_to_one_of_the_engine(
    plain: Engine, model: Path, daemon: LocalDaemon
) -> None:
    asked = [prompt(15 + i, 150 + 37 * i) for i in range(4)]
    plain.fresh(asked[:1])
    with Engine(model, **hicache(daemon, model="bits")) as served:
        served.store(asked)
        for each in asked:
            plain.flush()
            plain.generate([each], max_new_tokens=1)
            [own] = plain.generate([each])
            [loaded] = served.fresh([each])
            assert (own.cached, loaded.stored) == (full_pages(len(each)),) * 2
            assert (own.tokens, own.logprobs) == (loaded.tokens, loaded.logprobs)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_prefetch_policies(plain: Engine, model: Path, daemon: LocalDaemon, policy: str) -> None:
    asked = [prompt(20, 500)]
    engine = {"hicache_storage_prefetch_policy": policy}
    with Engine(model, **hicache(daemon, engine=engine, model=policy)) as served:
        served.store(asked)
        again = served.fresh(asked)
        assert same(again, plain.fresh(asked))
        # With best_effort, a request waits for nothing.
        assert again[0].stored == full_pages(500) or (policy == "best_effort" and again[0].stored < 500)


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_write_policies(plain: Engine, model: Path, daemon: LocalDaemon, policy: str) -> None:
    """Blocks are stored when they are evicted from the device, or when they are used again."""
    asked = [prompt(30 + i, 600) for i in range(6)]
    expected = plain.fresh(asked)
    engine = {"hicache_write_policy": policy, "max_total_tokens": 2048}
    with Engine(model, **hicache(daemon, engine=engine, model=policy)) as served:
        for each, wanted in zip(asked, expected, strict=True):
            assert same([served.generate([each])[0] for _ in range(3)], [wanted] * 3)
        answers = served.fresh(asked)
        assert same(answers, expected)
        assert sum(answer.stored for answer in answers) >= 3 * full_pages(600)


def test_many_pages_at_once(plain: Engine, model: Path, daemon: LocalDaemon) -> None:
    """SGLang transfers 128 pages a call, and asks for all of a prompt at once."""
    asked = [prompt(40, 2200)]
    with Engine(model, **hicache(daemon, engine={"page_size": 1}, model="many")) as served:
        served.store(asked)
        again = served.fresh(asked)
        assert same(again, plain.fresh(asked))
        assert again[0].stored == 2199
        assert "failed" not in served.log


def test_without_prefix_keys_blocks_are_found_all_the_same(
    plain: Engine, model: Path, daemon: LocalDaemon
) -> None:
    asked = prompt(50, 300)
    prompts = [asked, asked + prompt(51, 200)]
    options: dict[str, Any] = {"hicache_storage_pass_prefix_keys": None, "model": "without prefixes"}
    with Engine(model, **hicache(daemon, **options)) as served:
        for each in prompts:
            served.store([each])
        assert 'add "hicache_storage_pass_prefix_keys"' in served.log
        again = served.fresh(prompts)
        assert same(again, plain.fresh(prompts))
        assert [answer.stored for answer in again] == [full_pages(300), full_pages(500)]


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_salts_share_nothing(model: Path, daemon: LocalDaemon, name: str) -> None:
    asked = [prompt(60, 200)]
    with Engine(model, **hicache(daemon, model=name)) as served:
        served.store(asked)
        for salt in ("red", "blue"):
            assert served.fresh(asked, **{name: [salt]})[0].stored == 0
            assert served.fresh(asked, **{name: [salt]})[0].stored == full_pages(200)
        assert served.fresh(asked)[0].stored == full_pages(200)


def test_concurrent_requests(plain: Engine, model: Path, daemon: LocalDaemon) -> None:
    shared = prompt(70, 160)
    asked = [shared + prompt(71 + i, 60 + 10 * i) for i in range(4)]
    with Engine(model, **hicache(daemon, model="concurrent")) as served:
        served.store(asked)
        served.flush()
        answers = served.generate(asked)
        assert same(answers, plain.fresh(asked))
        assert sum(answer.stored for answer in answers) >= 160
