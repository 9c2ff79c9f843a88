"""Tiny random models, prompts, and what they generate with and without a store."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

BLOCK = 16
VOCABULARY = 512
EOS = 7

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


class EndsFirstRow(LogitsProcessor):  # type: ignore[misc]
    """Row 0 says EOS at a length, and nobody says it elsewhere."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, EOS] = -torch.inf
        if input_ids.shape[1] == self._length:
            scores[0, EOS] = torch.inf
        return scores


def two_rows(who: Any, ends_at: int, **options: Any) -> list[list[int]]:
    """Two rows of 40 tokens and 60 generated ones; the first row says EOS at a length, and is padded."""
    options = {"eos_token_id": EOS, "pad_token_id": 0, "max_new_tokens": 60, **options}
    prompts = tokens(40, seed=1), tokens(40, seed=2)
    output = generated(who, *prompts, logits_processor=[EndsFirstRow(ends_at)], **options)
    rows: list[list[int]] = output.sequences.tolist()
    return rows


def own_step(cache: Any, model: Any, inputs: dict[str, Any]) -> tuple[int, Any]:
    """One step of a decoding loop of one's own. Returns the column where it began, and the next logits."""
    past = cache.restore(**inputs)
    start = past.get_seq_length()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(
            inputs["input_ids"][:, start:],
            attention_mask=inputs["attention_mask"],
            position_ids=positions[:, start:],
            past_key_values=past,
        )
    cache.store(past, inputs["input_ids"], inputs["attention_mask"])
    return start, output.logits[:, -1]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs have the same tokens and bit for bit the same logits."""
    return torch.equal(one.sequences, other.sequences) and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )
