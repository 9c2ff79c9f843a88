"""Tiny models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engines.sglang.engine import VOCABULARY

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path, family: str = "Llama", seed: int = 0, **config: Any) -> Path:
    """A random model of 4 layers in `folder`. `family`: as transformers names its classes."""
    torch.manual_seed(seed)
    # Configurations of models for images have one for text within.
    of_text = getattr(transformers, f"{family}TextConfig", getattr(transformers, f"{family}Config"))
    made = of_text(**SMALL | config)
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    model.to(torch.float32).save_pretrained(folder)
    return folder
