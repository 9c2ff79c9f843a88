"""Latent attention (DeepSeek): the workers of a model have the same KV, so it is stored once and read by all.

vLLM's kernels for any CPU cannot compute behind a prefix, so loads are compared by the bytes of pages here.
`test_modes.py` and `test_drafts.py` compare tokens, on CPUs with AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.shapes import REFERENCE, SHAPES
from tests.engines.vllm.stored import replace_payloads

ASKED = prompt(850, 300)
BLOCK_TOKENS = 16
"""These kernels take no other size."""
SHARDS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


OPTIONS = REFERENCE | {
    "max_model_len": 1024,
    "worker_extension_cls": "tests.engines.vllm.page_digests.PageDigests",
}


@pytest.fixture
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "64MiB", "huge_pages": False}, "scrub": {"rate": 0}}) as daemon:
        yield daemon


def latent(daemon: LocalDaemon, **extra: Any) -> dict[str, Any]:
    # vLLM turns prefix caching off for these kernels.
    reason = "the test compares bytes"
    return connector(daemon, without_prefix_caching=reason, weights_revision="latent", **extra)


@pytest.mark.parametrize(
    ("shape", "shards"),
    [("latent", {}), ("latent", SHARDS), ("latent queries", {})],
    ids=["V2", "V2, two", "V3"],
)
def test_latent_kv_is_stored_once_and_loaded_by_all(
    own: LocalDaemon, tmp_path: Path, shape: str, shards: dict[str, Any]
) -> None:
    deepseek, options = SHAPES[shape].save(tmp_path), OPTIONS | shards
    blocks = full_blocks(300, BLOCK_TOKENS) // BLOCK_TOKENS
    with Engine(deepseek, **options) as plain:
        expected = said(plain.generate([ASKED], max_tokens=1))
        computed = plain("page_digests")
        assert all(pages == computed[0] for pages in computed)
    with Engine(deepseek, **options, **latent(own)) as first:
        assert said(first.generate([ASKED], max_tokens=1)) == expected
        assert first("failures") == {}
    with Client(own.url, deadline_s=10.0) as client:
        status = client.status()
    assert (status["namespaces"], status["blocks"]) == (1, blocks)
    # Shards take long to start.
    for same in (blocks,) if shards else (blocks, 0):
        with Engine(deepseek, **options, **latent(own)) as second:
            assert cached(second.generate([ASKED], max_tokens=1)) == [full_blocks(300, BLOCK_TOKENS)]
            loaded = second("page_digests")
            assert second("failures") == {}
            replace_payloads(second, own.url, ASKED, True)
        # The page behind them differs: it was computed behind a prefix.
        assert [len(set(pages) & set(computed[0])) for pages in loaded] == [same] * len(computed)
