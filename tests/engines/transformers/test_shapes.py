"""Every shape of model gives the same with hits as without a store, or is refused by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore import Client, Namespace
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import BLOCK, generated, tokens
from tests.engines.transformers.shapes import REFUSED, SERVED, STATES

SETTINGS = {"dram": {"limit": "256MiB", "huge_pages": False}}
PROMPT = tokens(104)
FORKED = PROMPT[:48] + tokens(52, seed=2)
FORKED_TOO = PROMPT[:48] + tokens(40, seed=4)
SHORTER = tokens(84, seed=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a daemon that is these tests' alone: blocks are found again by their models, without a salt."""
    with LocalDaemon(SETTINGS) as served:
        yield served.url


def restored(model: Any, cache: PrefixCache, *prompts: list[int], within: float = 1e-4) -> int:
    """Tokens restored by a call whose output is that of the model alone, up to rounding."""
    ours, alone = generated(cache, *prompts), generated(model, *prompts)
    assert torch.equal(ours.sequences, alone.sequences)
    for one, other in zip(ours.logits, alone.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)
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


@pytest.mark.parametrize("name", STATES)
def test_states(url: str, name: str) -> None:
    """Chunks of linear attention end elsewhere, which rounds more; test_states.py compares bits."""
    model = STATES[name]()
    with Client(url, deadline_s=10) as client:
        cache = PrefixCache(model, client, BLOCK)

        def found(*prompts: list[int]) -> int:
            return restored(model, cache, *prompts, within=1e-3)

        assert found(PROMPT) == 0
        # Six blocks of attention are full; the state is behind the fifth.
        assert cache.last.stored_blocks == 5 + 1
        assert found(PROMPT) == 80
        # The prompts part behind 48 tokens, where there is no state. It is stored for the next prompt.
        assert found(FORKED) == 0
        assert found(FORKED_TOO) == 48
        assert found(SHORTER) == 0
        # Each row is restored up to its own state.
        assert found(PROMPT, SHORTER) == 80 + 64
        assert found(PROMPT[:8], tokens(30, seed=5), PROMPT) == 80


@pytest.mark.parametrize("name", {**SERVED, **STATES})
def test_zeros_in_place_of_stored_bytes_change_the_output(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {**SERVED, **STATES}[name]()
    real, zeroed = Namespace.get, [False]

    def get(self: Namespace, keys: Any, out: Any, **options: Any) -> int:
        found = real(self, keys, out, **options)
        if self.layout.independent in zeroed:
            out[:] = 0
        return found

    with Client(url, deadline_s=10) as client:
        cache = PrefixCache(model, client, BLOCK, salt=b"zeros")
        [alone, *_] = generated(cache, PROMPT).logits
        monkeypatch.setattr(Namespace, "get", get)
        for independent in (False, True) if name in STATES else (False,):
            zeroed[:] = [independent]
            [first, *_] = generated(cache, PROMPT).logits
            assert cache.last.restored_tokens == 80
            assert (first - alone).abs().max() > 2e-3 * alone.abs().max()


def elsewhere(url: str, answers: Any) -> None:
    torch.set_num_threads(1)
    with Client(url, deadline_s=10) as client:
        for name, make in {**SERVED, **STATES}.items():
            model = make()
            answers.put((name, restored(model, PrefixCache(model, client, BLOCK), PROMPT)))


def test_served_to_a_second_process(url: str) -> None:
    """What this process has stored is found by another one, which has made the same models."""
    with Client(url, deadline_s=10) as client:
        for make in {**SERVED, **STATES}.values():
            generated(PrefixCache(make(), client, BLOCK), PROMPT)
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.Queue()
    process = spawning.Process(target=elsewhere, args=(url, answers))
    process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in {**SERVED, **STATES})
    finally:
        process.join(60)
    assert process.exitcode == 0
    assert found == dict.fromkeys({**SERVED, **STATES}, 80)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(MisuseError, match=why) as refusal:
        PrefixCache(make(), Client("unix:///nowhere"))
    assert refusal.value.hint
