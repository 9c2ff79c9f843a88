"""A tiny random model and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.vllm.engine import VOCABULARY


def make_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A random Llama of 4 layers in `folder`."""
    torch.manual_seed(seed)
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    LlamaForCausalLM(LlamaConfig(**small | config)).to(torch.float32).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """A random LoRA of rank 8 on the attention's inputs."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    names = [f"base_model.model.model.layers.{i}.self_attn.{p}_proj" for i in range(4) for p in "qv"]
    tensors = {}
    for name in names:
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
