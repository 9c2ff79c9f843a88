"""The vLLM connector, which vLLM loads by module path.

--kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    """Imports the connector when vLLM asks for it: `python -m kvstore_vllm` sets vLLM's environment first."""
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_vllm.connector import KVStoreConnector  # noqa: PLC0415

    return KVStoreConnector
