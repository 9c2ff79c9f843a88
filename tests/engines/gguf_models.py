"""Tiny random models as GGUF files, and prompts for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, WORDS = 4, 256, 4, 2, 64, 256, 512
WINDOW = 48

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with experts": ("llama", {"expert_count": 4, "expert_used_count": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": (
        "qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": INNER}
    ),
    "phi3": ("phi3", {"rope.scaling.original_context_length": 384}),
    "gemma2": ("gemma2", {"attention.sliding_window": WINDOW}),
    # By default, the sixth layer is the first without a window.
    "gemma3": ("gemma3", {"attention.sliding_window": WINDOW, "block_count": 6}),
    "gpt-oss": (
        "gpt-oss",
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": INNER,
            "attention.sliding_window": WINDOW,
        },
    ),
}  # fmt: skip
"""By name: the architecture, and keys of the file by their names behind it."""


def write_model(path: Path, name: str = "llama", seed: int = 0, **more: int) -> Path:
    """Writes a model whose weights the seed decides. `more`: other values of keys, e.g. `block_count`."""
    # Programs that take other names of this module have no gguf.
    import gguf  # noqa: PLC0415

    architecture, keys = MODELS[name]
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")  # llama.cpp expects words of models that it knows by name
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    sizes = {
        "context_length": 2048,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "vocab_size": WORDS,
        **keys,
        **more,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    _add_words(writer)
    for tensor, shape in _shapes(name, sizes["block_count"]):
        weights = rng.standard_normal(shape).astype(np.float32) * 0.2
        if len(shape) == 1:  # of norms they are near 1
            weights += 1
        # Norms and biases are not of 16 bits.
        plain = len(shape) == 1 or tensor.endswith("bias")
        writer.add_tensor(tensor, weights if plain else weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_words(writer: Any) -> None:
    words = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    fill = WORDS - len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words + [f"\u2581t{i}".encode() for i in range(fill)])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types(kinds + [1] * fill)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _shapes(name: str, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    architecture, sizes = MODELS[name]
    queries, keys, experts = HEADS * HEAD, KV_HEADS * HEAD, sizes.get("expert_count", 0)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (WORDS, WIDTH)), ("output_norm.weight", (WIDTH,))
    ]  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (queries, WIDTH),
        "attn_k.weight": (keys, WIDTH),
        "attn_v.weight": (keys, WIDTH),
        "attn_output.weight": (WIDTH, queries),
        "ffn_norm.weight": (WIDTH,),
    }
    if experts:
        layer |= {
            "ffn_gate_inp.weight": (experts, WIDTH),
            "ffn_gate_exps.weight": (experts, INNER, WIDTH),
            "ffn_up_exps.weight": (experts, INNER, WIDTH),
            "ffn_down_exps.weight": (experts, WIDTH, INNER),
        }
    elif architecture == "phi3":
        layer |= {"ffn_up.weight": (2 * INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)}
        shapes += [(f"rope_factors_{length}.weight", (HEAD // 2,)) for length in ("long", "short")]
    else:
        layer |= {
            "ffn_gate.weight": (INNER, WIDTH),
            "ffn_up.weight": (INNER, WIDTH),
            "ffn_down.weight": (WIDTH, INNER),
        }
    if architecture != "gemma2":
        shapes.append(("output.weight", (WORDS, WIDTH)))
    if architecture in ("qwen2", "gpt-oss"):
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    if architecture in ("gemma2", "gemma3"):
        layer |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    if architecture == "gpt-oss":
        del layer["ffn_norm.weight"]
        layer |= {
            "post_attention_norm.weight": (WIDTH,),
            "attn_sinks.weight": (HEADS,),
            "attn_output.bias": (WIDTH,),
            "ffn_gate_inp.bias": (experts,),
            "ffn_gate_exps.bias": (experts, INNER),
            "ffn_up_exps.bias": (experts, INNER),
            "ffn_down_exps.bias": (experts, WIDTH),
        }
    return shapes + [(f"blk.{i}.{tensor}", shape) for i in range(layers) for tensor, shape in layer.items()]


def tokens(n: int, seed: int = 0) -> list[int]:
    """A prompt of random words behind the token that begins a text.

    Without tokens of bytes: a Llama does not end an answer within a character, which some models repeat.
    """
    return [1, *np.random.default_rng(seed).integers(259, WORDS, n - 1).tolist()]


if __name__ == "__main__":
    # For programs whose environment cannot write such files: PATH KEY=VALUE...
    write_model(Path(sys.argv[1]), **{key: int(value) for key, value in (a.split("=") for a in sys.argv[2:])})
