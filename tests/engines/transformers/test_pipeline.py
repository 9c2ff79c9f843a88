"""A text-generation pipeline over a model whose PrefixCache is attached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, pipeline

from kvstore.errors import MisuseError
from kvstore_transformers import PrefixCache
from tests.engines.tokenizer import add_tokenizer
from tests.engines.transformers.models import llama
from tests.engines.transformers.shapes import STATES

TEXTS = ["The first text of this batch is the longest one of all three. ", "The second is short. ", "Third. "]


@pytest.mark.parametrize("make", [llama, STATES["gated delta rule of Qwen3-Next"]], ids=["blocks", "states"])
def test_a_pipeline_restores_and_stores(
    cached: Callable[..., PrefixCache], tmp_path: Path, make: Callable[[], Any]
) -> None:
    model, tokenizer = make(), AutoTokenizer.from_pretrained(add_tokenizer(tmp_path))
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache = cached(model)
    options = {"do_sample": False, "max_new_tokens": 8, "batch_size": 3}
    alone = pipe(TEXTS, **options)
    with cache.attached():
        assert pipe(TEXTS, **options) == alone
        assert (cache.last.restored_tokens, cache.last.stored_blocks > 3) == (0, True)
        assert pipe(TEXTS[0], do_sample=False, max_new_tokens=8) == alone[0]
        assert cache.last.restored_tokens == 32
        with pytest.raises(MisuseError, match="mode is beam_sample"):
            pipe(TEXTS[0], num_beams=2)
    before = cache.last
    assert pipe(TEXTS, **options) == alone
    assert cache.last is before
    assert "generate" not in model.__dict__
