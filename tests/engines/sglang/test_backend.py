"""The backend between SGLang's own host pool and a daemon, without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import Client, Layout
from kvstore.errors import ConfigError
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.package import (
    AsymmetricMHATokenToKVPoolHost,
    HiCacheKVStore,
    HostTensorAllocator,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    pages,
    storage,
    weights,
)

PAGES = 8
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def make_pool(
    layout: str = "page_first", page_tokens: int = 16, dtype: Any = torch.bfloat16, count: int = PAGES
) -> Any:
    """SGLang's host pool with random bytes, without a pool of a device."""
    pool = object.__new__(MHATokenToKVPoolHost)
    pool.layout, pool.page_size, pool.page_num, pool.size = layout, page_tokens, count, count * page_tokens
    pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim = 3, 2, 8, 8
    return filled(pool, dtype)


def make_latent_pool(
    layout: str = "page_first", page_tokens: int = 16, dtype: Any = torch.bfloat16, count: int = PAGES
) -> Any:
    """That of latent attention, see `make_pool`."""
    pool = object.__new__(MLATokenToKVPoolHost)
    pool.layout, pool.page_size, pool.page_num, pool.size = layout, page_tokens, count, count * page_tokens
    pool.layer_num, pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim = 3, 16, 8, 24
    return filled(pool, dtype)


def filled(pool: Any, dtype: Any) -> Any:
    pool.dtype, pool.device, pool.pin_memory = dtype, "cpu", False
    pool.allocator, pool._transfer_device = HostTensorAllocator(), torch.device("cpu")
    pool.kv_buffer = pool.init_kv_buffer()
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def page(pool: Any, number: int) -> torch.Tensor:
    """A copy of a page, as SGLang's generic backends get it."""
    copied: torch.Tensor = pool.get_data_page(number * pool.page_size, flat=True).clone()
    return copied


def indices(pool: Any, *numbers: int) -> torch.Tensor:
    """The indices of the tokens of pages."""
    return torch.cat([torch.arange(pool.page_size) + n * pool.page_size for n in numbers])


def some_keys(count: int) -> list[str]:
    return [os.urandom(32).hex() for _ in range(count)]


def behind(*prefix: str) -> Any:
    return SimpleNamespace(prefix_keys=list(prefix))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, daemon: LocalDaemon) -> Iterator[Any]:
    """A backend of a model of its own."""
    monkeypatch.setattr(storage, "check_engine", lambda config: None)
    monkeypatch.setattr(storage, "watch_updates", lambda: None)
    name = os.urandom(4).hex()
    monkeypatch.setattr(
        storage,
        "layout_of",
        lambda config, pool_pages, model, revision, pool: Layout(
            model, pool_pages.page_bytes, revision, kv_layout=f"{pool} {pool_pages.layout}"
        ),
    )
    options = {"url": daemon.url, "deadline_s": 5.0, "weights_revision": "1", "model": name}
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "is_mla_model": False}
    options |= {"interface_v1": 1}
    config = SimpleNamespace(extra_config=options, enable_storage_metrics=True, **ranks)
    made = HiCacheKVStore(config, {})
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [make_pool, make_latent_pool])
def test_pages_come_back_bit_for_bit(
    backend: Any, make: Callable[..., Any], layout: str, page_tokens: int, dtype: Any
) -> None:
    pool = make(layout, page_tokens, dtype)
    backend.register_mem_pool_host(pool)
    keys, before = some_keys(3), [page(pool, n) for n in range(PAGES)]
    assert backend.batch_set_v1(keys, indices(pool, 5, 0, 2), behind()) == [True] * 3
    assert backend.batch_exists([*keys, *some_keys(1)], behind()) == 3
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1([*keys, *some_keys(1)], indices(pool, 1, 7, 4, 6), behind()) == [
        True, True, True, False,
    ]  # fmt: skip
    for target, source in ((1, 5), (7, 0), (4, 2)):
        assert torch.equal(page(pool, target), before[source])
    assert not any(page(pool, n).any() for n in (0, 2, 3, 5, 6))
    assert backend.failures == {}


def test_parents_are_known_from_prefix_keys(backend: Any, daemon: LocalDaemon) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    keys = some_keys(4)
    assert all(backend.batch_set_v1(keys[:2], indices(pool, 0, 1), behind()))
    assert all(backend.batch_set_v1(keys[2:], indices(pool, 2, 3), behind(*keys[:2])))
    with Client(daemon.url, deadline_s=5.0) as client:
        decoded = [bytes.fromhex(key) for key in keys]
        namespace = client.namespace(backend._namespaces["kv"].layout)
        # A block with children leaves a hole, so the chain is whole again with one put.
        assert namespace.invalidate(decoded[1:2]) == 1
        assert namespace.lookup(decoded) == 1
        assert backend.batch_set_v1(keys[1:2], indices(pool, 1), behind(keys[0])) == [True]
        assert namespace.lookup(decoded) == 4


@pytest.mark.parametrize("odd", ["", "zz", "abc", "ab" * 65, 7, None])
def test_odd_keys_are_misses(backend: Any, odd: Any) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    [good] = some_keys(1)
    assert backend.batch_set_v1([good, odd], indices(pool, 0, 1), behind()) == [False, False]
    assert backend.batch_get_v1([odd], indices(pool, 0), behind()) == [False]
    assert backend.batch_exists([odd], behind()) == 0
    assert backend.exists(odd) is False
    assert set(backend.failures) == {"batch_set_v1", "batch_get_v1", "batch_exists", "exists"}


def test_odd_indices_are_misses(backend: Any) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    keys = some_keys(2)
    for wrong in (
        indices(pool, 0),
        indices(pool, 0, 1)[1:],
        indices(pool, 0, 1) + 1,
        indices(pool, 0, PAGES),
        indices(pool, 0, 1) - 32,
        torch.empty(0, dtype=torch.int64),
    ):
        assert backend.batch_set_v1(keys, wrong, behind()) == [False, False]
        assert backend.batch_get_v1(keys, wrong, behind()) == [False, False]
    assert backend.batch_exists(keys, behind()) == 0
    assert backend.batch_get_v1([], torch.empty(0, dtype=torch.int64), behind()) == []
    assert backend.batch_exists([], behind()) == 0


def test_a_pool_that_is_registered_again_is_used(backend: Any) -> None:
    first, second = make_pool(), make_pool()
    backend.register_mem_pool_host(first)
    [key] = some_keys(1)
    assert backend.batch_set_v1([key], indices(first, 0), behind()) == [True]
    backend.register_mem_pool_host(second)
    assert backend.batch_get_v1([key], indices(second, 3), behind()) == [True]
    assert torch.equal(page(second, 3), page(first, 0))
    # Pages of another size have another namespace.
    backend.register_mem_pool_host(make_pool(page_tokens=64))
    assert backend.batch_exists([key], behind()) == 0


def test_before_a_pool_is_registered_everything_misses(backend: Any) -> None:
    assert backend.batch_exists(some_keys(1), None) == 0
    assert backend.batch_get_v1(some_keys(1), indices(make_pool(), 0), None) == [False]
    assert backend.batch_set_v1(some_keys(1), indices(make_pool(), 0), None) == [False]
    assert backend.failures == {}


def test_clear_deletes_this_model_alone(backend: Any, daemon: LocalDaemon) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    keys = some_keys(2)
    assert all(backend.batch_set_v1(keys, indices(pool, 0, 1), behind()))
    with Client(daemon.url, deadline_s=5.0) as client:
        other = client.namespace(Layout("another model", 4096))
        assert other.put([b"k"], [bytes(4096)]).stored == 1
        backend.clear()
        assert backend.batch_exists(keys, behind()) == 0
        assert other.lookup([b"k"]) == 1


def test_stats_are_of_transfers_since_the_last_call(backend: Any) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    keys = some_keys(2)
    backend.batch_set_v1(keys, indices(pool, 0, 1), behind())
    backend.batch_get_v1(keys, indices(pool, 2, 3), behind())
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
    assert backend.get_stats().prefetch_pgs == []


def test_calls_without_indices_miss(backend: Any) -> None:
    backend.register_mem_pool_host(make_pool())
    [key] = some_keys(1)
    assert (backend.set(key, torch.zeros(1)), backend.batch_set([key], [])) == (False, False)
    assert (backend.get(key), backend.batch_get([key])) == (None, [None])


def test_nothing_is_loaded_or_stored_once_weights_have_changed(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    backend.register_mem_pool_host(pool)
    keys = some_keys(1)
    assert backend.batch_set_v1(keys, indices(pool, 0), behind()) == [True]
    monkeypatch.setattr(weights.changed, "is_set", lambda: True)
    assert backend.batch_exists(keys, behind()) == 0
    assert backend.batch_get_v1(keys, indices(pool, 1), behind()) == [False]
    assert backend.batch_set_v1(some_keys(1), indices(pool, 0), behind()) == [False]


def test_other_pools_are_refused(backend: Any) -> None:
    with pytest.raises(ConfigError, match="AsymmetricMHATokenToKVPoolHost"):
        pages.HostPages(object.__new__(AsymmetricMHATokenToKVPoolHost))
    with pytest.raises(ConfigError, match="--hicache-mem-layout is page_head"):
        pages.HostPages(make_pool("page_head"))
    with pytest.raises(ConfigError, match="--hicache-mem-layout is page_unified"):
        pages.HostPages(make_latent_pool("page_unified"))
    with pytest.raises(ConfigError, match=r"a page is too large for a block: .*a smaller --page-size"):
        pages.HostPages(make_pool(page_tokens=1 << 19, count=1))
    backend.register_mem_host_pool_v2(make_pool(), "kv")
    backend.register_mem_host_pool_v2(make_pool(), "swa")
    for name in ("mamba", "indexer", "draft"):
        with pytest.raises(ConfigError, match=f"a host pool {name} beside"):
            backend.register_mem_host_pool_v2(make_pool(), name)
