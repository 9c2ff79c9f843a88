"""A tiny random model and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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


def make_eagle(folder: Path, target: Path) -> Path:
    """An EAGLE head for a Llama of `make_model`: it drafts the target's last token again, more or less.

    Its layer is random and small, so that its KV decides some drafts.
    """
    config = json.loads((target / "config.json").read_text())
    hidden = config["hidden_size"]
    tensors = _draft_layer("layers.0", config, hidden, 0.06)
    tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    # Of the next token and the target's output, the latter.
    tensors["fc.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1)
    return _save_draft(folder, tensors, config)


def make_eagle3(folder: Path, target: Path, scale: float = 0.01) -> Path:
    """An EAGLE-3 head, a layer of Llama, for a model of 4 layers; it drafts like that of `make_eagle`.

    As in published heads, it sees outputs of three of the target's layers, has a vocabulary of its own, three
    of four tokens of the target's, and takes the target's embeddings.
    """
    whole = json.loads((target / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "max_position_embeddings")
    config = LlamaConfig(**{name: whole[name] for name in sizes + more}).to_dict()
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = _draft_layer("midlayer", config, 2 * hidden, scale)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    # Mostly the last of the three outputs.
    tensors["fc.weight"] = torch.cat((*torch.randn(2, hidden, hidden) * 0.01, torch.eye(hidden)), 1)
    known = torch.tensor([token for token in range(vocabulary) if token % 4 < 3])
    tensors["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"][known]
    tensors["d2t"] = known - torch.arange(len(known))
    tensors["t2d"] = torch.isin(torch.arange(vocabulary), known)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(known),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    return _save_draft(folder, tensors, config | own)


def make_mtp(model: Path, scale: float) -> Path:
    """Adds a layer that predicts a second token (MTP) to a saved model: mostly a copy of its last layer.

    It drafts the model's last token again, unless its attention, which `scale` weighs, says otherwise.
    """
    torch.manual_seed(2)
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    layer = f"model.layers.{last + 1}"
    for name in [each for each in weights if each.startswith(f"model.layers.{last}.")]:
        copied = weights[name]
        if copied.dim() > 1:
            # Queries and keys select tokens, the rest says what they are.
            selects = any(each in name for each in ("q_proj", "k_proj", "q_a_proj", "q_b_proj"))
            random = torch.randn_like(copied) * (0.3 if selects else scale)
            copied = random if "self_attn" in name else copied * 0.1
        weights[name.replace(f"layers.{last}.", f"layers.{last + 1}.")] = copied.clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}.{norm}.weight"] = torch.ones(hidden)
    # Of the next token and the model's output, the latter.
    weights[f"{layer}.eh_proj.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1)
    weights[f"{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def _draft_layer(prefix: str, config: dict[str, Any], inputs: int, scale: float) -> dict[str, torch.Tensor]:
    """Random weights of a layer whose attention sees `inputs` values; larger where they select tokens."""
    torch.manual_seed(1)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{each}_heads"] for each in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{prefix}.{name}.weight": torch.randn(shape) * (0.3 if name[-6] in "qk" else scale)
        for name, shape in shapes.items()
    }
    return tensors | {f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden)}


def _save_draft(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def quantize(model: Path, kv_scale: float = 0.0) -> Path:
    """Makes the weights of a saved model 8-bit integers. `kv_scale`: adds scales of an FP8 KV cache."""
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    for name in [each for each in weights if each.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name], weights[f"{name}_scale"] = (weights[name] / scale).round().to(torch.int8), scale
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**whole, "strategy": "channel"},
                "input_activations": {**whole, "strategy": "token", "dynamic": True},
            }
        },
    }
    if kv_scale:
        kind = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        config["quantization_config"]["kv_cache_scheme"] = kind
        for layer in range(config["num_hidden_layers"]):
            for which, scale in (("k", kv_scale), ("v", kv_scale / 2)):
                weights[f"model.layers.{layer}.self_attn.{which}_scale"] = torch.tensor([scale])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model


def make_adapter(folder: Path, seed: int, projections: str = "qv") -> Path:
    """A random LoRA of rank 8 on inputs of the attention, of 128 values each."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    names = [f"base_model.model.model.layers.{i}.self_attn.{p}_proj" for i in range(4) for p in projections]
    tensors = {}
    for name in names:
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [f"{each}_proj" for each in projections],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
