"""Chunks of a real model, SmolLM2-135M-Instruct: `bench blend` measures the quality, here is its order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers.blend import recompute
from tests.engines.transformers.serve import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two prompts with three documents each."""
    with LocalDaemon({"dram": {"limit": "512MiB", "huge_pages": False}}) as daemon, ExitStack() as stack:
        made = Served(stack)
        made.start(daemon.url, real=True, prompts=2, chunks=3, chunk_tokens=64)
        made.answers(tokens=8)
        yield made


def test_recomputing_more_is_closer_and_all_is_a_prefill(served: Served) -> None:
    without, reuse, some, most, whole = (served.quality(share) for share in (None, 0, 0.15, 0.999, 1))
    assert without["kl"] > reuse["kl"] > some["kl"] > most["kl"]
    for each in (most, whole):
        assert each["agreement"] == 1
        assert each["kl"] < 1e-4


def test_tokens_that_deviate_are_worth_more_than_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    deviating = served.quality(0.15)
    monkeypatch.setattr(recompute, "deviation", lambda exact, stored: torch.rand(exact[0].shape[2]))
    torch.manual_seed(0)
    assert deviating["kl"] < served.quality(0.15)["kl"]


def test_documents_of_every_prompt_are_loaded(served: Served) -> None:
    for number in range(2):
        assert served.first_token("0.15", number)["loaded"] == 3 * 64
        assert served.first_token("computed", number)["loaded"] == 0


def test_documents_are_found_in_another_order(served: Served) -> None:
    [prompt, _] = served._prompts
    assert served._chunks.blend(prompt.chunks[::-1], prompt.question).loaded_tokens == 3 * 64
