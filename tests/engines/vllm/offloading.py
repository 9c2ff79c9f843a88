"""vLLM's own OffloadingConnector on a CPU, with the daemon below its CPU tier.

Its worker needs CUDA or XPU, so `MemcpyWorker` is a stand-in for it: everything else is vLLM's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import connector

TIER = {"type": "KVStoreTier", "module_path": "kvstore_vllm.offloading_tier"}


def offloading(daemon: LocalDaemon | str, cpu_mib: int = 64, **options: Any) -> dict[str, Any]:
    """The flag that makes an engine use OffloadingConnector with the tier; `options`: of the tier."""
    url = daemon if isinstance(daemon, str) else daemon.url
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "MemcpySpec",
                "spec_module_path": "tests.engines.vllm.offloading",
                "cpu_bytes_to_use": cpu_mib << 20,
                "secondary_tiers": [{**TIER, "url": url, "deadline_s": 10.0, **options}],
            },
        }
    }


def behind(daemon: LocalDaemon | str, first: str = "OffloadingConnector", **extra: Any) -> dict[str, Any]:
    """The flag that makes an engine use OffloadingConnector, with a CPU tier alone, before this one."""
    before = offloading(daemon)["kv_transfer_config"]
    before["kv_connector_extra_config"]["secondary_tiers"] = []
    before |= {"kv_connector": first, "kv_connector_module_path": __name__}
    ours = connector(daemon, **extra)["kv_transfer_config"]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [before, ours]},
        }
    }


class HandshakingConnector(OffloadingConnector):
    """OffloadingConnector with a handshake of its own, as NixlConnector has one, which needs a network."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return KVConnectorHandshakeMetadata()


class MemcpyWorker(OffloadingWorker):
    """A stand-in for CPUOffloadingWorker: copies between pages in host memory and rows of the CPU tier."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._pages = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self._rows = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]
        self._layers = [sorted({ref.tensor_idx for ref in refs}) for refs in caches.group_data_refs]
        self._region = region
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, pages: Any, rows: Any, store: bool) -> bool:
        started_s, nbytes = time.perf_counter(), 0
        pairs = iter(zip(pages.block_ids.tolist(), rows.chunk_ids.tolist(), strict=True))
        for layers, size in zip(self._layers, pages.group_sizes, strict=True):
            for page, row in (next(pairs) for _ in range(size)):
                for layer in layers:
                    ends = self._pages[layer][page], self._rows[layer][row]
                    source, target = ends if store else ends[::-1]
                    target.copy_(source)
                    nbytes += source.numel()
        self._ended.append(TransferResult(job_id, True, nbytes, time.perf_counter() - started_s))
        return True


class MemcpySpec(TieringOffloadingSpec):
    """vLLM's spec of a CPU tier with tiers below it, with the stand-in for its worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "the stand-in copies one block a chunk"
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)
        return self._worker
