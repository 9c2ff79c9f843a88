"""The KV memory of vLLM's connector as torch tensors on a real GPU. vLLM itself does not run here."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from kvstore import Client, Layout  # noqa: E402
from kvstore.lab.local_daemon import LocalDaemon  # noqa: E402
from kvstore_vllm.pages import SKIPPED, DevicePages, DirectPages, pages_of  # noqa: E402
from tests.daemons import names  # noqa: E402
from tests.engines.vllm.test_pages import BLOCKS, caches  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("way", ["the pool", "kernels without a pool", "a host buffer"])
def test_blocks_are_loaded_into_other_pages(
    monkeypatch: pytest.MonkeyPatch, way: str, order: str, dtype: Any
) -> None:
    kv = caches(order, dtype, "cuda")
    before = {name: cache.clone() for name, cache in kv.items()}
    torch.cuda.synchronize()
    if way == "a host buffer":
        monkeypatch.setattr("kvstore_vllm.pages.why_no_gpu", lambda: "no cupy")
    pages = pages_of(kv, BLOCKS)
    assert type(pages) is (DevicePages if way == "a host buffer" else DirectPages)
    pool = {"limit": "16MiB" if way == "the pool" else 0}
    settings = {"dram": {"limit": "16MiB"}, "hbm": pool, "scrub": {"rate": 0}}
    keys = names(2)
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=20, strict=True) as client:
        ns = client.namespace(Layout(model="pages", block_bytes=2 * pages.block_bytes))
        with ns.reserve(keys, device=pages.device) as room:
            pages.save(room, 0, [[1, 5], [0, 7]])
            assert room.commit().stored == 2
        for cache in kv.values():
            cache.zero_()
        torch.cuda.synchronize()
        with ns.acquire(keys, device=pages.device) as lease:
            assert lease.in_hbm is (way == "the pool")
            assert pages.load(lease, 0, [[3, SKIPPED], [SKIPPED, 4]]) == 2
    for name, cache in kv.items():
        raw, was = cache.view(torch.uint8), before[name].view(torch.uint8)
        assert torch.equal(raw[3], was[1])
        assert torch.equal(raw[4], was[7])
        assert not raw[[0, 1, 2, 5, 6, 7]].any()
