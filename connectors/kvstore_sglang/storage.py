"""`HiCacheKVStore`: SGLang asks it for prefixes and gives it pages to fill and to store.

SGLang calls it from its own threads: one asks which pages are stored, one loads, one stores. No call delays a
step of the engine. Refusals are raised while the engine starts; afterwards, every failure is a miss.

A model with windows may have a host pool for their layers beside that of full attention. Each pool has a
namespace. SGLang uses the functions `..._v2` for the second pool.

Not covered: pools of states and drafts, which are refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore import Client, ExceptionBarrier, Key, Namespace, Put, Reservation, split_urls
from kvstore.errors import ConfigError
from kvstore_sglang.identity import layout_of, model_name, shard_number
from kvstore_sglang.pages import HostPages
from kvstore_sglang.settings import BackendSettings, check_engine
from kvstore_sglang.weights import changed, naming_of, watch_updates, weights_of

logger = logging.getLogger("sglang.kvstore")

_GB = 1e9
_SERVED_POOLS = (PoolName.KV, PoolName.SWA)


class HiCacheKVStore(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """A HiCache storage backend whose pages are blocks of a kvstore daemon.

    The constructor raises ConfigError for unknown options, and for engines that are not served, and
    MisuseError for invalid URLs. It needs no daemon. `failures` counts internal failures by hook.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        settings = BackendSettings.of(storage_config.extra_config or {})
        check_engine(storage_config)
        watch_updates()
        self._config = storage_config
        self._settings = settings
        weights = weights_of(settings.weights_revision)
        self._naming = naming_of(weights)
        # A revision may name the weights of several models, so the path counts.
        self._model = settings.model or model_name(weights.by_content)
        # With several daemons, each has the blocks of some shards.
        urls = split_urls(settings.url)
        url = urls[shard_number(storage_config) % len(urls)]
        self._client = Client(url, settings.token or None, settings.deadline_s)
        self._guard = ExceptionBarrier(logger)
        self.failures = self._guard.failures
        self._lock = threading.Lock()
        self._pages: dict[PoolName, HostPages] = {}
        self._namespaces: dict[PoolName, Namespace] = {}
        self._stats = StorageMetrics()
        self._has_told_of_prefixes = False

    # -- set-up, on the scheduler's thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the host pool of full attention. Raises ConfigError if it is not served."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a host pool of a model that has several. Raises ConfigError if it is not served."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name not in _SERVED_POOLS:
            raise ConfigError(
                f"the model has a host pool {host_pool_name!s} beside its keys and values",
                "no test covers it: leave out --hicache-storage-backend",
            )
        # SGLang has registered the pool of full attention before.
        if host_pool_name != PoolName.KV:
            self._register(host_pool, PoolName(host_pool_name))

    def close(self) -> None:
        """Closes all connections; later calls miss."""
        with self._guard("close"):
            self._client.close()

    # -- calls of the storage threads

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many leading pages are stored."""
        with self._guard("batch_exists"):
            namespace, _ = self._open()
            return namespace.lookup(_decoded(keys)) if namespace else 0
        return 0

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fills pages of the host pool; returns which are filled: the leading ones that arrive in time."""
        with self._guard("batch_get_v1"):
            return self._get(PoolName.KV, keys, host_indices)
        return [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool; returns for each whether all are stored."""
        with self._guard("batch_set_v1"):
            return self._set(PoolName.KV, keys, host_indices, self._parent(extra_info))
        return [False] * len(keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Returns which leading pages can be loaded, of a model with windows.

        A prefix can be loaded if all its pages of full attention are stored, and the pages at its end of the
        pools in `pool_transfers`: as many as a transfer has keys, of which the names do not count.
        """
        transfers = pool_transfers or []
        with self._guard("batch_exists_v2"):
            opened = [self._open(name)[0] for name in (PoolName.KV, *(each.name for each in transfers))]
            full, *others = [namespace for namespace in opened if namespace]
            if len(others) == len(transfers):
                decoded = _decoded(keys)
                [prefix], masks = self._client.lookup(
                    [(full, decoded, None, None)], [(namespace, decoded) for namespace in others]
                )
                return _restorable(prefix.blocks, list(zip(transfers, masks, strict=True)))
        return PoolTransferResult.empty()

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[PoolName, list[bool]]:
        """Fills pages of several host pools, see `batch_get_v1`. The result has a list for each pool."""
        results = {each.name: [False] * len(each.keys or ()) for each in transfers}
        for each in transfers:
            with self._guard("batch_get_v2"):
                results[each.name] = self._get(each.name, each.keys or [], each.host_indices)
        return results

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[PoolName, list[bool]]:
        """Stores pages of several host pools, see `batch_set_v1`. The result has a list for each pool."""
        results = {each.name: [False] * len(each.keys or ()) for each in transfers}
        for each in transfers:
            with self._guard("batch_set_v2"):
                parent = self._parent(extra_info) if each.name == PoolName.KV else None
                results[each.name] = self._set(each.name, each.keys or [], each.host_indices, parent)
        return results

    def exists(self, key: str) -> bool:
        """Returns whether a page is stored."""
        with self._guard("exists"):
            namespace, _ = self._open()
            return bool(namespace and namespace.contains(_decoded([key]))[0])
        return False

    # -- calls of the scheduler's thread

    def clear(self) -> None:
        """Deletes the stored pages of this engine's model and tenant. Needs the role admin."""
        with self._guard("clear"):
            for name in list(self._pages):
                namespace, _ = self._open(name)
                if namespace:
                    logger.info("deleted %d blocks of %s (%s)", namespace.invalidate(), self._model, name)

    def get_stats(self) -> StorageMetrics:
        """Returns pages and GB/s of each transfer since the last call, for SGLang's metrics."""
        with self._lock:
            stats, self._stats = self._stats, StorageMetrics()
        return stats

    # -- calls of the interface without host indices, which SGLang makes only without `interface_v1`

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Misses: `batch_get_v1` loads."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Misses: `batch_get_v1` loads."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores nothing: `batch_set_v1` does."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores nothing: `batch_set_v1` does."""
        return False

    # -- within

    def _register(self, pool: Any, name: PoolName) -> None:
        pages = HostPages(pool)
        with self._lock:
            self._pages[name] = pages
            self._namespaces.pop(name, None)

    def _open(self, name: PoolName = PoolName.KV) -> tuple[Namespace | None, HostPages | None]:
        """Returns the namespace and the pages of a pool; no namespace while the weights have no name."""
        if changed.is_set():
            return None, None
        with self._lock:
            pages = self._pages.get(name)
            if name not in self._namespaces and pages is not None and (revision := self._naming.known()):
                layout = layout_of(self._config, pages, self._model, revision, name)
                self._namespaces[name] = self._client.namespace(layout)
            return self._namespaces.get(name), pages

    def _get(self, name: PoolName, keys: list[str], host_indices: Any) -> list[bool]:
        """Fills pages of a pool; returns which are filled."""
        namespace, pages = self._open(name)
        if not namespace or not pages:
            return [False] * len(keys)
        began = time.perf_counter()
        filled = self._load(namespace, pages, _decoded(keys), pages.ids(host_indices, len(keys)))
        self._note("prefetch", filled, pages.page_bytes, began)
        return [i < filled for i in range(len(keys))]

    def _set(self, name: PoolName, keys: list[str], host_indices: Any, parent: Key | None) -> list[bool]:
        """Stores pages of a pool; returns for each whether all are stored."""
        namespace, pages = self._open(name)
        if not namespace or not pages:
            return [False] * len(keys)
        began = time.perf_counter()
        stored = self._store(namespace, pages, _decoded(keys), pages.ids(host_indices, len(keys)), parent)
        self._note("backup", stored, pages.page_bytes, began)
        return [stored == len(keys)] * len(keys)

    def _load(
        self, namespace: Namespace, pages: HostPages, keys: Sequence[Key], ids: npt.NDArray[np.int64]
    ) -> int:
        """Fills leading pages; returns how many.

        Asks for a damaged block once more: another tier may have a good copy.
        """
        left, filled, bad = _timer(self._settings.deadline_s), 0, -1
        while filled < len(keys):
            with namespace.acquire(keys[filled:], left()) as lease:
                granted = len(lease)
                good = pages.load(lease, ids[filled : filled + granted]) if granted else 0
            filled += good
            if not granted or (good < granted and filled == bad):
                break
            if good < granted:
                bad = filled
        return filled

    def _store(
        self,
        namespace: Namespace,
        pages: HostPages,
        keys: Sequence[Key],
        ids: npt.NDArray[np.int64],
        parent: Key | None,
    ) -> int:
        """Stores pages that are not stored yet; returns how many are stored then."""

        def fill(reservation: Reservation) -> bool:
            pages.save(reservation, ids[reservation.wanted])
            return True

        left = _timer(self._settings.deadline_s)
        [result] = self._client.put([Put(namespace, keys, fill, parent)], left())
        if result.denied == len(keys) and parent is not None and not namespace.contains([parent], left())[0]:
            # The daemon has lost the prefix, which the engine still has: it will ask for what follows alone.
            [result] = self._client.put([Put(namespace, keys, fill)], left())
        if result.denied:
            logger.debug("%d of %d pages are not stored: %s", result.denied, len(keys), result.why)
        return result.stored + result.present

    def _parent(self, extra_info: Any) -> Key | None:
        """Returns the key of the page before those of a call; None if there is none, or it is unknown."""
        prefix = None if extra_info is None else extra_info.prefix_keys
        if prefix is None and not self._has_told_of_prefixes:
            self._has_told_of_prefixes = True
            logger.warning(
                "blocks are stored without their prefixes, so the daemon evicts them one by one: add "
                '"hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config'
            )
        return bytes.fromhex(prefix[-1]) if prefix else None

    def _note(self, kind: str, pages: int, page_bytes: int, began: float) -> None:
        """Notes a transfer, "prefetch" or "backup", for SGLang's metrics, if they are on."""
        if self._config.enable_storage_metrics and pages:
            bandwidth = pages * page_bytes / _GB / (time.perf_counter() - began)
            with self._lock:
                getattr(self._stats, f"{kind}_pgs").append(pages)
                getattr(self._stats, f"{kind}_bandwidth").append(bandwidth)


def _timer(deadline_s: float) -> Callable[[], float]:
    """Returns a function that returns the seconds until the deadline of a call that begins now."""
    ends = time.monotonic() + deadline_s
    # A deadline of 0 would be misuse.
    return lambda: max(0.001, ends - time.monotonic())


def _decoded(keys: Sequence[str]) -> list[Key]:
    """Returns SGLang's hashes, hexadecimal digits, as keys."""
    return [bytes.fromhex(key) for key in keys]


def _restorable(stored: int, pools: list[tuple[PoolTransfer, npt.NDArray[np.bool_]]]) -> PoolTransferResult:
    """Returns which prefixes of `stored` pages can be loaded. `pools`: which pages of others are stored."""
    lengths = np.arange(1, stored + 1)
    every = np.ones(stored, np.bool_)
    hits = {PoolName.KV: stored} if stored else {}
    for transfer, mask in pools:
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            raise ValueError(f"the pool {transfer.name} has the policy {transfer.hit_policy.value}")
        is_window = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        needed = np.minimum(max(1, len(transfer.keys or ())), lengths) if is_window else lengths
        # How many pages are stored without a gap up to the end of each prefix.
        gaps = np.maximum.accumulate(np.where(mask[:stored], 0, lengths))
        good = lengths - gaps >= needed
        if good.any():
            hits[transfer.name] = int(lengths[good][-1])
        every &= good
    prefixes = lengths[every].tolist()
    return PoolTransferResult(prefixes[-1] if prefixes else 0, hits, prefixes)
