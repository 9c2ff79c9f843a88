"""vLLM's own OffloadingConnector on a CPU, with the daemon below its CPU tier.

Its worker needs CUDA or XPU, so `MemcpyWorker` is a stand-in for it: everything else is vLLM's.
"""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.lab.local_daemon import LocalDaemon

PAGE = (Path(__file__).parents[3] / "docs/vllm.md").read_text(encoding="utf-8")
BELOW, BEHIND = [json.loads(flag) for flag in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
"""The flags of the page."""


def offloading(daemon: LocalDaemon | str, cpu_mib: int = 64, **options: Any) -> dict[str, Any]:
    """The flag that makes an engine use OffloadingConnector with the tier; `options`: of the tier."""
    flag = copy.deepcopy(BELOW)
    extra = _on_a_cpu(flag, cpu_mib)
    [tier] = extra["secondary_tiers"]
    tier |= {"url": daemon if isinstance(daemon, str) else daemon.url, "deadline_s": 10.0, **options}
    return {"kv_transfer_config": flag}


def behind(daemon: LocalDaemon | str, first: str = "OffloadingConnector", **extra: Any) -> dict[str, Any]:
    """The flag that makes an engine use OffloadingConnector, with a CPU tier alone, before this one."""
    flag = copy.deepcopy(BEHIND)
    before, ours = flag["kv_connector_extra_config"]["connectors"]
    _on_a_cpu(before, 64)
    before |= {"kv_connector": first, "kv_connector_module_path": __name__}
    ours["kv_connector_extra_config"] = {
        "url": daemon if isinstance(daemon, str) else daemon.url,
        "deadline_s": 10.0,
        **extra,
    }
    return {"kv_transfer_config": flag}


def _on_a_cpu(flag: dict[str, Any], cpu_mib: int) -> dict[str, Any]:
    """Puts the stand-in into a flag, and returns the connector's options."""
    extra: dict[str, Any] = flag["kv_connector_extra_config"]
    extra |= {"spec_name": "MemcpySpec", "spec_module_path": __name__, "cpu_bytes_to_use": cpu_mib << 20}
    return extra


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
