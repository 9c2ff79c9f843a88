"""What is asked of a GPU, with a fake of torch.cuda: copies, in which stream, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvstore_trtllm.pages import Pages
from kvstore_trtllm.settings import Model
from kvstore_trtllm.staging import Staging
from tests.engines.trtllm.conftest import Make, answers, prompt

PROMPT = prompt(100, 43)


class FakeCuda:
    """A fake of streams and events: `log` has what was asked for. `passed`: what events say."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.passed = True
        log, outer = self.log, self

        @contextmanager
        def stream(which: Any) -> Iterator[None]:
            log.append(("in", which))
            yield
            log.append(("out", which))

        class Event:
            def record(self, which: Any) -> None:
                log.append(("record", which))

            def query(self) -> bool:
                return outer.passed

            def synchronize(self) -> None:
                log.append(("wait", self))

        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "Event", Event)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def pages_of(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> tuple[Pages, torch.Tensor]:
    pool = torch.zeros(8, 2, 2, 64, dtype=torch.bfloat16)
    pages = Pages(pool, Model(None, "", 2, 2, 8), 4, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(pages, "is_cuda", True)
    copy = torch.Tensor.copy_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        cuda.log.append(("copy", non_blocking))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    return pages, pool


def test_copies_are_enqueued_on_the_stream_of_the_forward_pass(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, pool = pages_of(cuda, monkeypatch)
    rows = torch.arange(3 * 512, dtype=torch.int16).view(torch.uint8).view(3, -1)[:, :512].contiguous()
    mark = pages.load(list(rows), [5, 0, 7], "a stream")
    assert cuda.log == [
        ("in", "a stream"), *[("copy", True)] * 3, ("record", "a stream"), ("out", "a stream"),
    ]  # fmt: skip
    assert [pool[i].view(torch.uint8).flatten().tolist() for i in (5, 0, 7)] == rows.tolist()
    cuda.log.clear()
    out = torch.zeros(2, 512, dtype=torch.uint8)
    saved = pages.save(list(out), [7, 5], "a stream")
    assert cuda.log[0] == ("in", "a stream")
    assert cuda.log[-2:] == [("record", "a stream"), ("out", "a stream")]
    assert torch.equal(out, rows[[2, 0]])
    cuda.passed = False
    assert not mark.passed()
    cuda.log.clear()
    saved.wait()
    assert [what for what, _ in cuda.log] == ["wait"]


@pytest.mark.parametrize("bad", [-1, 8])
def test_a_number_that_is_no_page_copies_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    pages, _ = pages_of(cuda, monkeypatch)
    rows = list(torch.zeros(2, 512, dtype=torch.uint8))
    for copy in (pages.load, pages.save):
        with pytest.raises(IndexError, match=f"the KV pool has 8 pages, and no page {bad}"):
            copy(rows, [3, bad], "a stream")
    assert cuda.log == []


def test_an_engine_waits_for_no_copy_but_its_stores_do(
    engine: Make, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    for executor in (first, second):
        monkeypatch.setattr(executor.worker._pages, "is_cuda", True)
    expected = answers(first.run(PROMPT))
    first.settle()
    [request] = second.run(PROMPT)
    assert (request.matched, [request.answer]) == (40, expected)
    recorded = [which for what, which in cuda.log if what == "record"]
    assert recorded
    assert all(which.name == "the stream of the forward pass" for which in recorded)
    assert any(what == "wait" for what, _ in cuda.log)


@pytest.mark.parametrize("failed", [0, 2])
def test_memory_for_loads_is_page_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failed: int
) -> None:
    asked = []

    class Runtime:
        """A fake of CUDA's runtime."""

        def cudaHostRegister(self, *what: int) -> int:
            asked.append(what)
            return failed

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    staging = Staging.make([4096, 8192], 1 << 20)
    try:
        tensor = staging.tensor(1, is_cuda=True)
        assert asked == [(tensor.data_ptr(), 85 * 8192, 0)]
        assert ("loads are slower" in caplog.text) == bool(failed)
        staging.part(1)[3] = 7
        assert (tensor[3] == 7).all(), "the same memory"
    finally:
        staging.close()
