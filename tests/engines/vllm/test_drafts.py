"""Speculative decoding with a draft that has KV: hits change no token, and as many drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.models import make_eagle, make_eagle3, make_model, make_mtp
from tests.engines.vllm.shapes import AMX, SHAPES, need_amx
from tests.engines.vllm.stored import answers_from_the_store, blocks_of

ASKED = prompt(860, 300)
HEADS = {"eagle": make_eagle, "eagle3": make_eagle3}


@dataclass(frozen=True)
class Drafted:
    """A model with a draft. `dropped`: tokens that vLLM drops at the end of a hit.

    `depends`: what the draft says depends on its KV of the prompt. None: on some CPUs. `partly`: some of its
    tokens are accepted, others are not.
    """

    model: Path
    options: dict[str, Any]
    dropped: int = 0
    depends: bool | None = True
    partly: bool = False


def drafted(model: Path, method: str, draft: Path, dropped: int = 0, **options: Any) -> Drafted:
    speculative = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    return Drafted(model, {"max_model_len": 1024, "speculative_config": speculative, **options}, dropped)


CASES = [
    "draft model",
    "eagle",
    "eagle3",
    "eagle, two shards",
    "mtp",
    "mtp beside latent attention",
    "mtp beside latent attention, two shards",
    "draft model with windows",
    "eagle3 with windows",
]
MTP: dict[str, tuple[str, dict[str, Any], tuple[float, float]]] = {
    "mtp": ("predicts two tokens", {}, (0.02, 0.13)),
    "mtp beside latent attention": ("latent queries", AMX, (0.05, 0.025)),
}
"""Shapes, with options and the sizes of weights that make some drafts right and others wrong."""
SHARDS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    folder = tmp_path_factory.mktemp("drafts")
    method, _, shards = request.param.partition(", ")
    if method in HEADS:
        # Small weights repeat a token, which these drafts expect.
        model = make_model(folder / "model", initializer_range=0.02)
        head = HEADS[method](folder / "head", model)
        return drafted(model, method, head, BLOCK_TOKENS, **SHARDS if shards else {})
    if request.param == "draft model":
        # A draft that is a copy of the model is always right, if its KV is.
        return drafted(
            make_model(folder / "model", initializer_range=0.06),
            "draft_model",
            make_model(folder / "copy", initializer_range=0.06),
        )
    if method in MTP:
        name, options, (scale, of_attention) = MTP[method]
        if options:
            need_amx()
        shape = SHAPES[name]
        small = replace(shape, config=shape.config | {"initializer_range": scale})
        saved = make_mtp(repeating(small.save(folder / "model")), of_attention)
        case = drafted(saved, "mtp", saved, BLOCK_TOKENS, **options, **SHARDS if shards else {})
        case.options["speculative_config"]["num_speculative_tokens"] = 1
        return replace(case, partly=True)
    shape = SHAPES["sinks"]
    # Small weights make the first layers decide.
    model = shape.config | {"initializer_range": 0.02}
    saved = replace(shape, config=model).save(folder / "model")
    if request.param == "eagle3 with windows":
        head = make_eagle3(folder / "head", repeating(saved), 0.02)
        return drafted(saved, "eagle3", head, BLOCK_TOKENS, **shape.engine)
    # vLLM wants all layers of a draft in one group.
    draft = model | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    small = like(replace(shape, config=draft).save(folder / "draft"), saved)
    # With its KV zeroed, the draft is right about one token on some CPUs, as about none with it.
    return replace(drafted(saved, "draft_model", small, **shape.engine), depends=None)


def repeating(model: Path) -> Path:
    """Makes a model with small weights repeat a token, which an EAGLE head expects."""
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def like(draft: Path, model: Path) -> Path:
    """Gives a draft the weights of the model where they have the same names."""
    drafts, models = load_file(draft / "model.safetensors"), load_file(model / "model.safetensors")
    save_file({name: models[name] for name in drafts}, draft / "model.safetensors", {"format": "pt"})
    return draft


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "256MiB", "huge_pages": False}, "scrub": {"rate": 0}}) as daemon:
        yield daemon


def asks(engine: Engine, own_cache: bool = False) -> tuple[Any, list[int], list[int]]:
    """What the engine says, how many tokens were cached, how many of drafts were accepted and drafted."""
    before = engine("accepted")
    answer = (engine.generate if own_cache else engine.fresh)([ASKED], max_tokens=40)
    return (
        said(answer),
        cached(answer),
        [now - then for now, then in zip(engine("accepted"), before, strict=True)],
    )


def test_a_draft_finds_its_kv(case: Drafted, own: LocalDaemon) -> None:
    with Engine(case.model, **case.options) as plain:
        cold, hit = asks(plain), asks(plain, own_cache=True)
        num_blocks = plain("num_blocks")
    expected, found, accepted = hit
    assert (cold[1], found) == ([0], [full_blocks(300) - case.dropped])
    assert accepted[0] or not case.depends
    assert 0 < accepted[0] < accepted[1] or not case.partly
    with Engine(case.model, **case.options, **connector(own)) as first:
        assert first("num_blocks") == num_blocks
        assert asks(first) == cold
        assert asks(first) == hit
        assert first("failures") == {}
        # Shards take long to start.
        shards = "tensor_parallel_size" in case.options
        other = nullcontext(first) if shards else Engine(case.model, **case.options, **connector(own))
        with other as second:
            assert asks(second) == hit
            zero_the_drafts_kv(second, own.url)
            answers, again, others = asks(second)
            assert again == found
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
            assert case.depends is None or others != accepted


def zero_the_drafts_kv(engine: Engine, url: str) -> None:
    """Stores the blocks again without the KV of the draft's layers."""
    with Client(url, deadline_s=10.0) as client:
        for group in range(engine("groups")):
            drafts = np.array(engine("drafts", group=group))
            for shard in range(len(engine("layouts", group=group))):
                keys, ns = blocks_of(engine, client, ASKED, group, shard)
                payloads = np.empty((len(keys), ns.layout.block_bytes), np.uint8)
                assert ns.get(keys, payloads) == len(keys)
                payloads.reshape(len(keys), len(drafts), -1)[:, drafts] = 0
                ns.invalidate(keys)
                assert ns.put(keys, payloads).stored == len(keys)


def test_n_grams_are_proposed_behind_a_hit(own: LocalDaemon, tmp_path: Path) -> None:
    """vLLM cannot start a second engine in a process whose first one has drafted by n-grams."""
    model = make_model(tmp_path / "model", initializer_range=0.02)
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with Engine(model, speculative_config=ngrams) as plain:
        expected, _, accepted = asks(plain)
        assert 0 < accepted[0] < accepted[1]
    with Engine(model, speculative_config=ngrams, **connector(own)) as engine:
        for found in (0, full_blocks(300)):
            assert asks(engine) == (expected, [found], accepted)
        assert answers_from_the_store(engine, own, ASKED)


def test_another_draft_has_other_blocks(own: LocalDaemon, tmp_path: Path) -> None:
    """The draft's KV depends on its weights; without a draft there is none."""
    model = make_model(tmp_path / "model")
    layouts = []
    for draft in (None, make_model(tmp_path / "one", 1), make_model(tmp_path / "two", 2)):
        case = drafted(model, "draft_model", draft) if draft else Drafted(model, {"max_model_len": 1024})
        with Engine(model, **case.options, **connector(own)) as engine:
            layouts.append(Layout(**engine("layout")))
    assert len({(layout.kv_layout, layout.revision) for layout in layouts}) == 3


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"load": "sync"}, "load is 'sync' with speculative decoding by 'draft_model'"),
        ({"block_tokens": 64}, "block_tokens is 64 with speculative decoding"),
    ],
)
def test_what_no_test_covers_is_refused(
    own: LocalDaemon, tmp_path: Path, extra: dict[str, Any], why: str
) -> None:
    model = make_model(tmp_path / "model")
    case = drafted(model, "draft_model", make_model(tmp_path / "copy"))
    with (
        pytest.raises(RuntimeError, match=f"(?s)ConfigError.*{why}"),
        Engine(model, **case.options, **connector(own, **extra)),
    ):
        pass
