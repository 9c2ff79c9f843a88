"""Tiny random models as GGUF files, and what they answer with and without a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp import Llama

BLOCK = 16
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, WORDS = 4, 256, 4, 2, 64, 256, 512
WINDOW = 48

Q4_0, Q8_0, F16, F32 = (getattr(llama_cpp, f"GGML_TYPE_{name}") for name in ("Q4_0", "Q8_0", "F16", "F32"))
KINDS: dict[str, dict[str, Any]] = {
    "f16": {},
    "f16 flash": {"flash_attn": True},
    "f32": {"type_k": F32, "type_v": F32},
    "keys q8_0": {"type_k": Q8_0},
    "q8_0 flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
    "q4_0 flash": {"type_k": Q4_0, "type_v": Q4_0, "flash_attn": True},
}
"""Types of KV, with values by token (flash attention) and transposed. Quantised values need flash attention."""


def write_model(
    path: Path, architecture: str = "llama", seed: int = 0, layers: int = LAYERS, **more: Any
) -> Path:
    """Writes a model whose weights the seed decides. `more`: keys of the file, by their names behind the architecture."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(WORDS)
    for name, value in more.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    _add_words(writer)
    for name, shape in _shapes(architecture, layers):
        weights = rng.standard_normal(shape).astype(np.float32) * 0.2
        # Weights of norms and biases have one axis, and are not of 16 bits.
        writer.add_tensor(name, 1 + weights if len(shape) == 1 else weights.astype(np.float16))
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


def _shapes(architecture: str, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (WORDS, WIDTH)),
        ("output_norm.weight", (WIDTH,)),
        ("output.weight", (WORDS, WIDTH)),
    ]
    of_a_layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (queries, WIDTH),
        "attn_k.weight": (keys, WIDTH),
        "attn_v.weight": (keys, WIDTH),
        "attn_output.weight": (WIDTH, queries),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (INNER, WIDTH),
        "ffn_up.weight": (INNER, WIDTH),
        "ffn_down.weight": (WIDTH, INNER),
    }
    if architecture == "qwen2":
        of_a_layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture in ("qwen3", "gemma3"):
        of_a_layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    if architecture == "gemma3":
        of_a_layer |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return shapes + [
        (f"blk.{i}.{name}", shape) for i in range(layers) for name, shape in of_a_layer.items()
    ]


def tokens(n: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens behind the one that begins a text."""
    return [1, *np.random.default_rng(seed).integers(3, WORDS, n - 1).tolist()]


def loaded(path: Path, **options: Any) -> Llama:
    """A Llama on one thread: with more of them, bits may differ."""
    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7}
    return Llama(str(path), **{**settings, **options})


def answer(llm: Llama, prompt: list[int], n: int = 12) -> tuple[str, list[Any]]:
    """The text of a completion, and the logits before each of its tokens."""
    seen: list[Any] = []

    def note(_: Any, scores: Any) -> Any:
        seen.append(np.array(scores))
        return scores

    said = llm.create_completion(
        prompt, max_tokens=n, temperature=0.0, logits_processor=llama_cpp.LogitsProcessorList([note])
    )
    return said["choices"][0]["text"], seen


def same(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> bool:
    """Whether text and logits are equal, bit for bit."""
    return one[0] == other[0] and np.array_equal(np.array(one[1]), np.array(other[1]))


def split_answer(llm: Llama, prompt: list[int], at: int, first: Sequence[int] = ()) -> tuple[str, list[Any]]:
    """What a Llama without a store answers that has the first `at` tokens of the prompt in its context.

    It has evaluated them with all tokens of `first`, by default the prompt: kernels may round rows differently
    in batches of other sizes.
    """
    llm.reset()
    if at:
        llm.eval(first or prompt)
        llm._ctx.kv_cache_seq_rm(-1, at, -1)
        llm.n_tokens = at
        llm._requires_eval = True
    return answer(llm, prompt)
