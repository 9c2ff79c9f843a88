"""The TensorRT-LLM connector with KV pools on a real GPU. A fake executor calls it, not TensorRT-LLM."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parents[1] / "engines/trtllm/stubs"))

from tests.engines.trtllm.conftest import (  # noqa: E402
    Make,
    answers,
    daemon,
    engine,
    model,
    options,
    prompt,
)

__all__ = ["daemon", "engine", "model", "options"]

DEVICE = "cuda"
PROMPT = prompt(100, 43)


def test_another_engine_loads_what_one_has_stored(engine: Make) -> None:
    first, second = engine(device=DEVICE), engine(device=DEVICE)
    [one] = first.run(PROMPT, max_tokens=14)
    first.settle()
    [two] = second.run(PROMPT, max_tokens=14)
    assert (two.matched, two.answer) == (40, one.answer)
    pages = [first.page(i) for i in one.block_ids[:10]]
    assert [second.page(i) for i in two.block_ids[:10]] == pages
    assert not first.worker.failures
    assert not second.worker.failures


def test_pages_may_be_written_again_before_they_are_stored(engine: Make) -> None:
    first, second = engine(device=DEVICE, pages=16), engine(device=DEVICE)
    expected = answers(engine(device=DEVICE, store=False).run(PROMPT))
    late = threading.Event()
    first.worker._saver.submit(late.wait, 20)
    first.run(PROMPT)
    first.forget_pages()
    first.run(prompt(5000, 43))
    late.set()
    first.settle()
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (40, expected)


def test_memory_beside_a_gpu_is_page_locked(engine: Make) -> None:
    worker = engine(device=DEVICE).worker
    assert worker._outgoing.is_pinned() == (DEVICE == "cuda")
    assert worker._staged.is_pinned() == (DEVICE == "cuda")
