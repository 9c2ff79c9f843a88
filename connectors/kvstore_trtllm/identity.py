"""Builds the namespace of a rank's KV from every property that can change its bytes.

Doubtful properties are included: a needless difference is a miss, a missing one would be wrong KV.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tensorrt_llm
import torch
from blake3 import blake3

from kvstore import Layout
from kvstore_trtllm.options import ConnectorOptions
from kvstore_trtllm.pages import Shape
from kvstore_trtllm.settings import Model

_OF_ENGINE = (
    "dtype", "attn_backend", "max_seq_len", "trust_remote_code", "moe_config", "nvfp4_gemm_config",
    "moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size",
    "torch_compile_config", "allreduce_strategy", "enable_autotuner", "enable_min_latency", "env_overrides",
)  # fmt: skip
"""Options of TensorRT-LLM that select kernels, or change what they compute."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What all blocks of an engine have in common, apart from the weights."""

    model: str
    engine: str

    @classmethod
    def of(cls, llm_args: Any, model: Model, options: ConnectorOptions) -> Identity:
        """Returns the identity of an engine."""
        facts = {
            "options": {name: getattr(llm_args, name, None) for name in _OF_ENGINE},
            "torch": [torch.__version__, torch.get_float32_matmul_precision()],
        }
        digest = blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(16)
        # A revision may name the weights of several models, so the path counts.
        path = str(model.folder) if options.weights_revision else model.architecture
        return cls(options.model or path, f"trtllm {tensorrt_llm.__version__}; {digest}")

    def layout(self, shape: Shape, rank: int, ranks: int, revision: str) -> Layout:
        """Returns the layout of a rank's blocks. `shape`: of its pages. `revision`: of the weights."""
        return Layout(
            model=self.model,
            block_bytes=shape.page_bytes,
            revision=revision,
            dtype=shape.dtype,
            block_tokens=shape.tokens,
            shard=f"tp {rank}/{ranks}",
            kv_layout=f"{self.engine}; {shape.layers} layers, {shape.heads} heads of {shape.dim}; "
            f"{shape.device}",
        )
