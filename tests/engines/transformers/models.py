"""Tiny random models, prompts, and what they generate with and without a store."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = 16
VOCABULARY = 512

KINDS = [
    (torch.float32, "eager", 4),
    (torch.float32, "sdpa", 2),
    (torch.bfloat16, "eager", 2),
    (torch.bfloat16, "sdpa", 4),
]
"""dtype, attention, heads of keys and values."""


def llama(
    dtype: Any = torch.float32, attention: str = "eager", kv_heads: int = 2, seed: int = 0, **fields: Any
) -> Any:
    """A Llama of four layers, whose weights the seed decides."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "bos_token_id": None,
            "eos_token_id": None,
            "attn_implementation": attention,
            **fields,
        }
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype).eval()


def tokens(n: int, seed: int = 0) -> list[int]:
    """n token ids, never 0: that is for padding."""
    drawn = torch.randint(1, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def batch(*prompts: list[int]) -> dict[str, Any]:
    """Prompts as generate takes them, padded on the left with zeros."""
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
    }


def generated(who: Any, *prompts: list[int], **options: Any) -> Any:
    """What a model or a PrefixCache generates greedily, with all logits."""
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    return who.generate(**batch(*prompts), return_dict_in_generate=True, output_logits=True, **options)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs have the same tokens and bit for bit the same logits."""
    return torch.equal(one.sequences, other.sequences) and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )
