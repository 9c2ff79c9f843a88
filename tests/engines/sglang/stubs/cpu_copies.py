"""A plug-in of SGLang for tests: copies between the device's KV and the host pool, on a CPU.

SGLang has kernels of `sgl_kernel` for them, which need a GPU. Here, both are memory of the host. Every other
part of HiCache is SGLang's own.
"""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]
_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def install() -> None:
    """Gives SGLang the copies, and host pools that are not pinned. Called in each of its processes."""
    from sglang.srt.mem_cache.pool_host import mha, mla  # noqa: PLC0415 - SGLang imports plug-ins first
    from sglang.srt.models.deepseek_common.attention_backend_handler import (  # noqa: PLC0415
        AttentionBackendRegistry,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for module, pool in ((mha, mha.MHATokenToKVPoolHost), (mla, mla.MLATokenToKVPoolHost)):
        for copy in (
            transfer_kv_direct,
            transfer_kv_all_layer_direct_lf_pf,
            transfer_kv_per_layer_direct_pf_lf,
        ):
            setattr(module, copy.__name__, copy)
        name = f"{module.__name__}.{pool.__name__}"
        HookRegistry.register(f"{name}.__init__", _not_pinned, HookType.BEFORE)
    AttentionBackendRegistry.register("torch_native", _absorbed)
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        HookRegistry.register(f"{_TORCH_NATIVE}.{name}", _in_own_pool, HookType.BEFORE)


def _absorbed(*_: Any) -> Any:
    """Latent attention on the cached latents, always: `torch_native` cannot read keys that are not cached."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (  # noqa: PLC0415
        AttnForwardMethod,
    )

    return AttnForwardMethod.MLA


def _in_own_pool(backend: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Gives a layer with a window the positions of its tokens in the pool of windows, not in the full one."""
    if backend.use_sliding_window_kv_pool and options["sliding_window_size"] is not None:
        [*before, positions] = arguments[:5]
        own = backend.token_to_kv_pool.translate_loc_from_full_to_swa(positions)
        arguments = (*before, own, *arguments[5:])
    return (backend, *arguments), options


def _not_pinned(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    return arguments, options | {"pin_memory": False}


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, **_: Any
) -> None:
    """Copies tokens of layers of one form."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies tokens of all layers, keys and then values, to pages that have all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for n, source in enumerate(src_ptrs):
        target = dst_ptrs[n // layers]
        for first, page in _pages(src_indices, dst_indices, page_size):
            target[page // page_size, n % layers].copy_(source[first : first + page_size])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of pages that have all layers, keys and values."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for page, first in _pages(src_indices, dst_indices, page_size):
            target[first : first + page_size].copy_(source[page // page_size, layer_id])


def _pages(one: torch.Tensor, other: torch.Tensor, page_size: int) -> list[tuple[int, int]]:
    """Returns the first token of each page, in both places."""
    firsts = (indices.view(-1, page_size)[:, 0].tolist() for indices in (one, other))
    return list(zip(*firsts, strict=True))
