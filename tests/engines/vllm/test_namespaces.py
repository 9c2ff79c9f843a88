"""What must not be shared is not: weights, dtypes, block sizes, resets, adapters; and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.models import make_adapter, make_model
from tests.engines.vllm.shapes import SHAPES

LONG = prompt(507, 1100)
DRAM_ONLY = {"dram": {"limit": "64MiB", "huge_pages": False}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def own() -> Any:
    with LocalDaemon(DRAM_ONLY) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def other(folder: Path, own: LocalDaemon) -> Any:
    """An engine with a model of its own."""
    with Engine(folder, **connector(own)) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_answers(folder: Path) -> Any:
    """What that model says to LONG without a store."""
    with Engine(folder) as engine:
        return said(engine.fresh([LONG]))


def test_other_dtypes_block_sizes_and_revisions_find_nothing(own: LocalDaemon, other: Engine) -> None:
    asked = [prompt(500, 300)]
    other.fresh(asked)
    assert cached(other.fresh(asked)) == [full_blocks(300)]

    for arguments in (
        {"dtype": "bfloat16"},
        {"block_size": 64},
        connector(own, block_tokens=64),
        connector(own, weights_revision="of the user"),
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}},
    ):
        with other.instead(**arguments):
            assert cached(other.fresh(asked)) == [0], arguments
            found = full_blocks(300, 64) if "64" in str(arguments) else full_blocks(300)
            assert cached(other.fresh(asked)) == [found], arguments

    # The same files: found.
    other.restart(**connector(own))
    assert cached(other.fresh(asked)) == [full_blocks(300)]


def test_weights_are_named_by_content(own: LocalDaemon, tmp_path: Path) -> None:
    """Other weights in the same place find nothing; the first ones, written elsewhere, find their blocks."""
    asked, hit = [prompt(504, 300)], [full_blocks(300)]
    for place, seed, found in (("here", 0, [0]), ("here", 1, [0]), ("there", 0, hit)):
        folder = make_model(tmp_path / place, seed=seed)
        with Engine(folder, **connector(own)) as engine:
            assert cached(engine.fresh(asked)) == found
            assert cached(engine.fresh(asked)) == hit
            if seed:
                make_model(folder, seed=2)
                with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*was changed after the engine st"):
                    engine.restart(**connector(own))


def test_another_version_of_vllm_finds_nothing(own: LocalDaemon, other: Engine) -> None:
    asked, version, [hit] = [prompt(505, 300)], "vllm:__version__", [full_blocks(300)]
    found = []
    for says in ("0.0.1", "0.0.1", "0.0.2"):
        with Engine(other._model) as engine:
            engine("change", **{version: says})
            engine.restart(**connector(own))
            found += cached(engine.fresh(asked))
    assert found == [0, hit, 0]


def test_another_window_finds_nothing(own: LocalDaemon, tmp_path: Path) -> None:
    """The same weights, whose groups of layers keep other parts of a prompt."""
    SHAPES["interleaved windows"].save(tmp_path)
    asked, hit = [prompt(506, 300)], [full_blocks(300)]
    with Engine(tmp_path, **connector(own)) as engine:
        assert [cached(engine.fresh(asked)) for _ in range(2)] == [[0], hit]
        with engine.instead(hf_overrides={"sliding_window": 128}):
            assert [cached(engine.fresh(asked)) for _ in range(2)] == [[0], hit]
        assert cached(engine.fresh(asked)) == hit


def test_a_daemon_that_cannot_hold_a_block_costs_only_hits(other: Engine, plain_answers: list[Any]) -> None:
    """Blocks of 1,024 tokens are larger than an eighth of this tier."""
    with (
        LocalDaemon({"dram": {"limit": "16MiB", "huge_pages": False}}) as small,
        other.instead(**connector(small, block_tokens=1024)),
    ):
        for _ in range(2):
            answers = other.fresh([LONG])
            assert (said(answers), cached(answers)) == (plain_answers, [0])
        assert other("counts")["not saved"] == 2


@pytest.mark.parametrize(("oldest", "newest", "served"), [(7, 7, True), (99, 99, False)])
def test_a_daemon_of_another_version(
    other: Engine, own: LocalDaemon, plain_answers: list[Any], oldest: int, newest: int, served: bool
) -> None:
    """Wire versions in common serve hits; without any, an engine is served without the store."""
    wire = "kvstore.wire.messages"
    with Engine(other._model) as engine:
        engine("change", **{f"{wire}:OLDEST": oldest, f"{wire}:VERSION": newest})
        engine.restart(**connector(own, weights_revision=f"wire {newest}"))
        found = []
        for _ in range(2):
            answers = engine.fresh([LONG])
            assert said(answers) == plain_answers
            found += cached(answers)
    assert found == [0, full_blocks(len(LONG)) if served else 0]


def test_a_reset_of_the_connector_makes_blocks_misses(other: Engine) -> None:
    asked = [prompt(501, 300)]
    expected = said(other.fresh(asked))
    assert cached(other.fresh(asked)) == [full_blocks(300)]
    assert other("reset", connector=True)
    again = other.generate(asked)
    assert (said(again), cached(again)) == (expected, [0])
    again = other.fresh(asked)
    assert (said(again), cached(again)) == (expected, [full_blocks(300)])


def test_adapters_have_blocks_of_their_own(own: LocalDaemon, other: Engine, tmp_path: Path) -> None:
    asked = [prompt(502, 300)]
    with other.instead(enable_lora=True, max_lora_rank=8):
        red = ["red", 1, str(make_adapter(tmp_path / "red", 1))]
        base = other.fresh(asked)
        assert cached(other.fresh(asked, lora=red)) == [0]
        with_red = other.fresh(asked, lora=red)
        assert cached(with_red) == [full_blocks(300)]
        assert said(with_red) != said(base)
    # Trained again under the same name: another adapter, once the engine has loaded it.
    make_adapter(tmp_path / "red", 2)
    with other.instead(enable_lora=True, max_lora_rank=8):
        assert cached(other.fresh(asked)) == [full_blocks(300)]
        assert cached(other.fresh(asked, lora=red)) == [0]


def test_an_adapter_that_is_loaded_again_in_place_is_another_one(
    own: LocalDaemon, other: Engine, tmp_path: Path
) -> None:
    asked = [prompt(503, 300)]
    red, anew = (["blue", 1, str(tmp_path / "blue"), None, inplace] for inplace in (False, True))
    make_adapter(tmp_path / "blue", 1)
    with other.instead(enable_lora=True, max_lora_rank=8):
        before = other.fresh(asked, lora=red)
        assert cached(other.fresh(asked, lora=red)) == [full_blocks(300)]
        make_adapter(tmp_path / "blue", 2)
        # Not loaded again yet, and nothing would tell when it is: neither loaded nor stored.
        for _ in range(2):
            same = other.fresh(asked, lora=red)
            assert (said(same), cached(same)) == (said(before), [0])
        after = other.fresh(asked, lora=anew)
        assert cached(after) == [0]
        assert said(after) != said(before)
        again = other.fresh(asked, lora=anew)
        assert (said(again), cached(again)) == (said(after), [full_blocks(300)])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            {"prefix_caching_hash_algo": "xxhash"},
            "--prefix-caching-hash-algo xxhash seeds its block hashes at random.*PYTHONHASHSEED",
        ),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail'.*recompute"),
        ({"extra": {"dead_line_s": 1.0}}, "unknown key 'dead_line_s'.*did you mean deadline_s"),
        ({"extra": {"load": "later"}}, "load is 'later'.*async or sync"),
        ({"extra": {"deadline_s": 0}}, "deadline_s is 0.*more than 0"),
        ({"extra": {"deadline_s": "1s"}}, "deadline_s is '1s'.*a float"),
        ({"extra": {"lookup_deadline_s": -1.0}}, "lookup_deadline_s is -1.0.*more than 0"),
        (
            {"extra": {"lookup_deadline": 1.0}},
            "unknown key 'lookup_deadline'.*lookup_deadline_s",
        ),
        ({"extra": {"block_tokens": 48}}, "block_tokens is 48.*multiple of the engine's block size, 32"),
        ({"extra": {"url": "tcp://there"}}, "cannot connect to 'tcp://there'.*unix:///"),
        (
            {"extra": {"load": "sync"}, "long_prefill_token_threshold": 64},
            "load is 'sync' with --long-prefill-token-threshold",
        ),
    ],
)
def test_unserved_engines_are_refused_with_a_hint(
    own: LocalDaemon, other: Engine, arguments: dict[str, Any], why: str
) -> None:
    arguments = dict(arguments)
    flag = connector(own)
    extra, policy = arguments.pop("extra", {}), arguments.pop("kv_load_failure_policy", None)
    flag["kv_transfer_config"]["kv_connector_extra_config"] |= extra
    if policy:
        flag["kv_transfer_config"]["kv_load_failure_policy"] = policy
    with pytest.raises(RuntimeError, match=f"(?s)(ConfigError|MisuseError).*{why}"):
        other.restart(**flag, **arguments)
