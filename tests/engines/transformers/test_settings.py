"""What changes keys and values changes the namespace, and is refused when it changes under a PrefixCache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig

from kvstore import Layout
from kvstore.errors import MisuseError
from kvstore_transformers import PrefixCache
from kvstore_transformers.blocks import BlockShape
from kvstore_transformers.identity import layouts_of
from tests.engines.transformers.models import BLOCK, batch, llama, tokens

# torch and PEFT warn of what is done here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def namespace(model: Any, revision: str | None = "one") -> Layout:
    """With a revision, since then nothing of the weights' bytes tells models apart."""
    return layouts_of(model, BlockShape(model, BLOCK), revision)[0]


@contextmanager
def switched(module: Any, name: str, value: Any) -> Iterator[None]:
    """A setting of torch, put back afterwards."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def called(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    """The same, of those that are set by a function."""
    switch(value)
    try:
        yield
    finally:
        switch(before)


def test_each_option_of_a_model_is_another_namespace() -> None:
    models = {
        "as it is": llama(),
        "weights' names": llama(tie_word_embeddings=True),
        "dtype": llama(torch.bfloat16),
        "dtype of the same size": llama(torch.float16),
        "attention": llama(attention="sdpa"),
        "epsilon": llama(rms_norm_eps=1e-3),
        "rope's base": llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "linear rope": llama(rope_parameters={"rope_type": "linear", **ROPE}),
        "yarn": llama(rope_parameters={"rope_type": "yarn", **ROPE}),
        "yarn by another factor": llama(rope_parameters={"rope_type": "yarn", **ROPE, "factor": 8.0}),
        "longest prompt": llama(max_position_embeddings=4096),
    }
    frequencies = models["other frequencies in its buffers"] = llama()
    frequencies.model.rotary_emb.inv_freq *= 0.5
    scaling = models["another scaling in its module"] = llama()
    scaling.model.rotary_emb.attention_scaling = 2.0
    mixed = models["a layer in another dtype"] = llama()
    mixed.model.layers[1].mlp.double()
    mixed.model.layers[1].mlp.forward = lambda x: x
    layouts = {name: namespace(model) for name, model in models.items()}
    assert len({layout.fingerprint() for layout in layouts.values()}) == len(models)
    assert namespace(llama()) == layouts["as it is"]


SWITCHES = {
    "float32 precision": lambda: switched(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "deterministic algorithms": lambda: called(torch.use_deterministic_algorithms, True, False),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "math SDPA": lambda: called(torch.backends.cuda.enable_math_sdp, False, True),
    "flash SDPA": lambda: called(torch.backends.cuda.enable_flash_sdp, False, True),
    "memory-efficient SDPA": lambda: called(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "reduced precision of float16": lambda: switched(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "version": lambda: switched(torch, "__version__", "0.0.0"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_of_torch_is_another_namespace(cached: Callable[..., PrefixCache], name: str) -> None:
    model = llama()
    before, cache = namespace(model), cached(model)
    with SWITCHES[name]():
        after = namespace(model)
        with pytest.raises(MisuseError, match="went from"):
            cache.generate(**batch(tokens(20)))
    assert after.fingerprint() != before.fingerprint()
    assert namespace(model) == before


def adapted(rank: int = 2) -> Any:
    """With a LoRA adapter that changes the keys."""
    model = llama()
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=rank, target_modules=["k_proj"], init_lora_weights=False), "one")
    return model.eval()


def test_adapters_are_other_namespaces(cached: Callable[..., PrefixCache]) -> None:
    model = adapted()
    cache = cached(model, revision="one")
    layouts = [namespace(llama()), namespace(model), namespace(adapted(rank=4))]
    model.add_adapter(LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False), "two")
    layouts.append(namespace(model.eval()))
    model.set_adapter("one")
    layouts.append(namespace(model))
    model.disable_adapters()
    layouts.append(namespace(model))
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    with pytest.raises(MisuseError, match="adapters of LlamaForCausalLM went from"):
        cache.generate(**batch(tokens(20)))


def test_a_scaled_adapter_is_another_namespace() -> None:
    model = adapted()
    before = namespace(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj.set_scale("one", 3.0)
    assert namespace(model).fingerprint() != before.fingerprint()


def test_a_model_with_changed_settings_is_refused(cached: Callable[..., PrefixCache]) -> None:
    model = llama()
    cache = cached(model)
    model.config.rms_norm_eps = 0.5
    with pytest.raises(MisuseError, match="configuration of LlamaForCausalLM went from"):
        cache.generate(**batch(tokens(20)))
    model = llama()
    cache = cached(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(MisuseError, match=r"attention implementation of .* went from eager to sdpa"):
        cache.restore(**batch(tokens(20)))
