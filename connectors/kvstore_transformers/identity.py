"""What tells models apart whose keys and values must not mix: weights, configuration, shape, kernels."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from blake3 import blake3

from kvstore import Layout
from kvstore.errors import MisuseError
from kvstore_transformers.blocks import BlockShape

_SAYS_NOTHING = {"_name_or_path", "transformers_version"}
"""Fields of a configuration that differ between copies of one model."""


def layout_of(model: Any, shape: BlockShape, revision: str | None) -> Layout:
    """The namespace of a model's blocks. `revision` stands for the weights; None: they are read."""
    weights = weights_digest(model) if revision is None else revision
    return Layout(
        model=model.config._name_or_path or type(model).__name__,
        revision=f"{weights} config {config_digest(model.config)}",
        dtype=str(shape.dtype).removeprefix("torch."),
        block_tokens=shape.block_tokens,
        block_bytes=shape.block_bytes,
        # Kernels decide the last bits, and with them whether a hit changes an answer.
        kv_layout=f"layer, kv, head, token, dim; {model.config._attn_implementation} on {model.device.type}",
    )


def weights_digest(model: Any) -> str:
    """blake3 of every parameter and buffer: its name, dtype, shape and bytes.

    Raises MisuseError for a weight that is not in memory.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise MisuseError(f"weight {name} is not in memory", "name the weights yourself with revision=")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy())
    return f"blake3:{digest.hexdigest()}"


def config_digest(config: Any) -> str:
    """blake3 of what a configuration says, wherever it was loaded from."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _SAYS_NOTHING}
    return blake3(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
