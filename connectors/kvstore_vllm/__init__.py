"""The vLLM connector, which vLLM loads by module path.

--kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from kvstore_vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
