"""The TensorRT-LLM connector: a scheduler half and a worker half for `kv_connector_config`."""

from kvstore_trtllm.scheduler import KVStoreScheduler
from kvstore_trtllm.worker import KVStoreWorker

__all__ = ["KVStoreScheduler", "KVStoreWorker"]
