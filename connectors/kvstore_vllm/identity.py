"""Whose KV it is: everything that makes two engines' bytes differ goes into the namespace.

Where in doubt a difference counts: a namespace too many is a miss, one too few would be wrong KV.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from blake3 import blake3

from kvstore import Layout
from kvstore.errors import ConfigError


def weights_revision(config: Any, given: str) -> str:
    """Names the weights: what the user gave, the hub's commit, or the state of the files.

    Of files it takes names, sizes and the times of their last change and rename (which no tool sets back),
    not their bytes: reading those would delay the start by minutes. vLLM has read the files by then: whoever
    changes them while an engine starts has to name the weights. ConfigError if nothing tells.
    """
    model, load_format = config.model_config, config.load_config.load_format
    if given:
        return given
    if load_format == "dummy":
        return "dummy"
    if Path(model.model).exists():
        return files_revision(Path(model.model))
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"commit:{commit}"
    raise ConfigError(
        f"nothing tells which weights {model.model!r} has",
        "set weights_revision in kv_connector_extra_config",
    )


def in_epoch(layout: Layout, epoch: str) -> Layout:
    """The layout of blocks since the last reset, which gave it this name (empty: there was none)."""
    return replace(layout, revision=f"{layout.revision}+{epoch}") if epoch else layout


def files_revision(path: Path) -> str:
    """Names the state of a file, or of all files in a folder: another one after any of them has changed."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = blake3()
    for file in files:
        state = file.stat()
        digest.update(
            repr((str(file.relative_to(path)), state.st_size, state.st_mtime_ns, state.st_ctime_ns)).encode()
        )
    return f"files:{digest.hexdigest(16)}"


def kv_layout(config: Any, kv_caches: dict[str, torch.Tensor]) -> str:
    """What else decides the bytes: the model's configuration as it is run, engine and version, attention
    backend, each layer's shape and strides and, on a CPU, the instruction set, since its kernels pack keys
    and values as that likes them.
    """
    model = config.model_config
    layers = config.compilation_config.static_forward_context
    kernels = set()
    for name in kv_caches:
        backend = getattr(layers.get(name), "attn_backend", None)
        isa = getattr(layers.get(name), "isa", "")
        kernels.add(f"{backend.get_name() if backend else 'unknown'} {isa}".strip())
    shapes = [(name, str(t.dtype), t.shape[1:], t.stride()[1:]) for name, t in sorted(kv_caches.items())]
    settings = sorted(model.hf_config.to_dict().items(), key=lambda item: item[0])
    algorithm = config.cache_config.prefix_caching_hash_algo
    digest = blake3(repr((settings, str(model.quantization), algorithm, shapes)).encode()).hexdigest(16)
    if next(iter(kv_caches.values())).device.type == "cuda":
        machine = f"compute capability {torch.cuda.get_device_capability()}"
    else:
        machine = torch.backends.cpu.get_cpu_capability()
    return f"vllm {vllm.__version__}; {', '.join(sorted(kernels))}; {machine}; {digest}"
