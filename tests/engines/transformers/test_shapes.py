"""Every shape of model gives the same with hits as without a store, or is refused by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import BLOCK, generated, tokens
from tests.engines.transformers.shapes import REFUSED, SERVED

SETTINGS = {"dram": {"limit": "256MiB", "huge_pages": False}}
PROMPT = tokens(104)
FORKED = PROMPT[:48] + tokens(52, seed=2)
SHORTER = tokens(84, seed=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a daemon that is these tests' alone: blocks are found again by their models, without a salt."""
    with LocalDaemon(SETTINGS) as served:
        yield served.url


def restored(model: Any, cache: PrefixCache, *prompts: list[int]) -> int:
    """Tokens restored by a call whose output is that of the model alone, up to rounding."""
    ours, alone = generated(cache, *prompts), generated(model, *prompts)
    assert torch.equal(ours.sequences, alone.sequences)
    for one, other in zip(ours.logits, alone.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not cache.failures
    return cache.last.restored_tokens


@pytest.mark.parametrize("name", SERVED)
def test_served(url: str, name: str) -> None:
    model = SERVED[name]()
    with Client(url, deadline_s=10) as client:
        cache = PrefixCache(model, client, BLOCK)
        assert restored(model, cache, PROMPT) == 0
        assert restored(model, cache, PROMPT) == 80
        assert restored(model, cache, FORKED) == 48
        assert restored(model, cache, SHORTER) == 0
        # The second row begins behind 20 columns of padding.
        assert restored(model, cache, PROMPT, SHORTER) == 80 + 60


def elsewhere(url: str, answers: Any) -> None:
    torch.set_num_threads(1)
    with Client(url, deadline_s=10) as client:
        for name, make in SERVED.items():
            model = make()
            answers.put((name, restored(model, PrefixCache(model, client, BLOCK), PROMPT)))


def test_served_to_a_second_process(url: str) -> None:
    """What this process has stored is found by another one, which has made the same models."""
    with Client(url, deadline_s=10) as client:
        for make in SERVED.values():
            generated(PrefixCache(make(), client, BLOCK), PROMPT)
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.Queue()
    process = spawning.Process(target=elsewhere, args=(url, answers))
    process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in SERVED)
    finally:
        process.join(60)
    assert process.exitcode == 0
    assert found == dict.fromkeys(SERVED, 80)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(MisuseError, match=why) as refusal:
        PrefixCache(make(), Client("unix:///nowhere"))
    assert refusal.value.hint
