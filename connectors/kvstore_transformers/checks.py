"""Refuses models, calls and settings that cannot be served. Each refusal is a MisuseError with a hint."""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    QuantizedCache,
    StaticCache,
    StaticLayer,
)

from kvstore.errors import MisuseError
from kvstore_transformers.caches import StateWindowLayer, WindowLayer, attention_layers, new_cache
from kvstore_transformers.tails import eos_ids

_SERVED_ROPES = {"default", "linear", "llama3", "proportional", "yarn"}
"""Rotary embeddings for which the key of a token depends only on its position."""

_SERVED_LAYERS = (
    DynamicLayer,
    WindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    StateWindowLayer,
    DummyLayer,
    StaticLayer,
)
"""Layers that keep the keys and values of every token, a state, both, or nothing."""

_SHARDED = {"_tp_size": "tensor parallelism", "_fsdp_size": "FSDP", "_device_mesh": "a device mesh"}
"""Attributes that transformers sets on a model that is sharded over processes."""

_INSTEAD = "call model.generate for it"

_NO_INPUTS = {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
}
"""Arguments of generate, besides its settings, that do not change keys and values."""

_SERVED_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_return_sequences": ((None, 1), "repeat the prompt in the batch"),
    "use_cache": ((None, True), f"there is nothing to restore into: {_INSTEAD}"),
    "cache_implementation": (
        (None,),
        f"restored are the default cache and a StaticCache passed as past_key_values; {_INSTEAD}",
    ),
    "output_attentions": ((None, False), f"restored tokens have none: {_INSTEAD}"),
    "output_hidden_states": ((None, False), f"restored tokens have none: {_INSTEAD}"),
    "token_healing": ((None, False), "heal the prompt first: its tokens are looked up without changes"),
}


def check_model(model: Any, revision: str | None) -> None:
    """Refuses models whose keys and values depend on more than the tokens of a prefix.

    Also refuses models whose DynamicCache does not keep all keys and values.
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise MisuseError(f"{name} is an encoder-decoder", "only decoders can be served")
    if config.get_text_config(decoder=True) is not config:
        raise MisuseError(f"{name} takes more than text", "pass its language model alone")
    check_not_sharded(model)
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise MisuseError(f"{name} has bidirectional attention", "a prefix's keys depend on what follows")
    takes = inspect.signature(model.forward).parameters
    for argument in ("past_key_values", "attention_mask", "position_ids"):
        if argument not in takes:
            raise MisuseError(f"{name} takes no {argument}", "only models with a DynamicCache can be served")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise MisuseError(f"{name} attends in chunks", "only full attention and windows can be served")
    if not model._supports_default_dynamic_cache():
        raise MisuseError(
            f"{name} has a cache class of its own", "only models with a DynamicCache can be served"
        )
    past = new_cache(config)
    check_layers(past)
    if not attention_layers(past):
        raise MisuseError(f"{name} has no attention", "only states beside attention can be served")
    for rope in sorted(_all_rope_types(model)):
        if rope not in _SERVED_ROPES:
            raise MisuseError(
                f"{name} has {rope} position embeddings",
                f"keys may depend on the sequence's length: served are {', '.join(sorted(_SERVED_ROPES))}",
            )
    if getattr(model, "is_quantized", False) and revision is None:
        raise MisuseError(
            f"the weights of {name} are quantized", "not all of them can be read: name them with revision="
        )


def check_not_sharded(model: Any) -> None:
    """Refuses a model that is sharded over ranks: blocks of different ranks would have the same name."""
    hint = "load it whole in each process, or on several GPUs of one process with device_map"
    for attribute, how in _SHARDED.items():
        if getattr(model, attribute, None) not in (None, 0, 1):
            raise MisuseError(f"{type(model).__name__} is sharded over ranks by {how}", hint)
    for path, module in model.named_modules():
        wrapped = "FullyShardedDataParallel" in {base.__name__ for base in type(module).__mro__}
        if wrapped or getattr(module, "_is_fsdp_managed_module", False):
            raise MisuseError(f"{path or type(model).__name__} is sharded over ranks by FSDP", hint)
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(weight, DTensor):
            raise MisuseError(f"weight {name} is a DTensor on {weight.device_mesh}", hint)
        if hasattr(weight, "ds_id"):
            raise MisuseError(f"weight {name} is sharded over ranks by DeepSpeed", hint)


def check_layers(past: Any) -> None:
    """Refuses caches with a layer that drops or alters the keys and values of tokens."""
    for i, layer in enumerate(past.layers):
        if type(layer) not in _SERVED_LAYERS:
            raise MisuseError(
                f"layer {i} of the cache is a {type(layer).__name__}",
                "layers with quantized, compressed or blended keys can't be restored, "
                "nor windows in a cache that PrefixCache.restore has not made",
            )


def check_own_cache(past: Any, rows: int, columns: int) -> None:
    """Refuses a cache of the caller, unless it is an empty StaticCache with room for the batch."""
    if not isinstance(past, StaticCache):
        why = "only a StaticCache is filled: leave it out for the default cache"
        if isinstance(past, QuantizedCache):
            why = f"its scales depend on the whole prompt, so a prefix has no bytes of its own: {_INSTEAD}"
        raise MisuseError(f"past_key_values is a {type(past).__name__}", why)
    if past.offloading:
        raise MisuseError("past_key_values is offloaded", _INSTEAD)
    for i, layer in enumerate(past.layers):
        if type(layer) is not StaticLayer:
            raise MisuseError(
                f"layer {i} of past_key_values is a {type(layer).__name__}",
                "windows and states are restored into the default cache only: leave past_key_values out",
            )
        if layer.max_cache_len < columns:
            raise MisuseError(
                f"past_key_values has room for {layer.max_cache_len} tokens, input_ids has {columns}",
                "make it longer: max_cache_len",
            )
        if layer.is_initialized and layer.keys.shape[0] != rows:
            raise MisuseError(
                f"past_key_values has {layer.keys.shape[0]} rows, input_ids {rows}",
                "make one for each batch size",
            )
    if int(past.get_seq_length()):
        raise MisuseError("past_key_values holds tokens", "call its reset() first")


def check_call(model: Any, settings: dict[str, str], then: dict[str, str]) -> None:
    """Refuses a model whose `settings` differ from those at the construction of its PrefixCache (`then`)."""
    if model.training:
        raise MisuseError(
            f"{type(model).__name__} is in training mode", "dropout changes keys and values: model.eval()"
        )
    for name, value in settings.items():
        if value != then[name]:
            raise MisuseError(
                f"{name} of {type(model).__name__} went from {then[name]} to {value}",
                "make a new PrefixCache after changing a model or torch's settings",
            )


def check_settings(model: Any, options: dict[str, Any]) -> Any:
    """Returns the GenerationConfig that generate will use. Refuses options that cannot be served."""
    given = options.get("generation_config")
    settings = copy.deepcopy(model.generation_config if given is None else given)
    settings.update(**model.generation_config.to_dict(), defaults_only=True)
    for name, value in settings.update(**options).items():
        if value is not None and name not in _NO_INPUTS:
            raise MisuseError(f"{name} is passed", f"stored blocks are found by token ids alone: {_INSTEAD}")
    for name, (served, hint) in _SERVED_SETTINGS.items():
        if getattr(settings, name, None) not in served:
            raise MisuseError(f"{name} is {getattr(settings, name)!r}", hint)
    mode = settings.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise MisuseError(
            f"the generation mode is {mode.value}", f"greedy search and sampling are served: {_INSTEAD}"
        )
    return settings


def check_pads(input_ids: Any, attention_mask: Any, settings: Any = None) -> list[int]:
    """Returns the number of padding columns at the start of each row.

    Without a mask the number is 0. Refuses input for which generate would infer padding from its `settings`,
    and padding that is not on the left.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        raise MisuseError(
            "input_ids is not a batch of token ids", "pass a (rows, columns) tensor of integers"
        )
    if attention_mask is None:
        pad = None if settings is None else settings.pad_token_id
        if pad is not None and pad not in eos_ids(settings) and bool((input_ids == pad).any()):
            raise MisuseError(
                f"attention_mask is missing, and input_ids has pad_token_id {pad}", "pass the tokenizer's"
            )
        return [0] * len(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise MisuseError(
            f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}",
            "one number for each token",
        )
    pads = (attention_mask == 0).sum(-1)
    columns = torch.arange(input_ids.shape[1], device=attention_mask.device)
    if not torch.equal((columns >= pads[:, None]).to(attention_mask.dtype), attention_mask):
        raise MisuseError(
            "attention_mask is not zeros followed by ones", "pad on the left: tokenizer.padding_side = 'left'"
        )
    if bool((pads == input_ids.shape[1]).any()):
        raise MisuseError("attention_mask has a row without tokens", "leave the row out")
    return [int(pad) for pad in pads]


def _all_rope_types(model: Any) -> set[str]:
    """Returns the kinds of rotary embedding in the configuration and in the modules."""
    config, found = model.config, set()
    for parameters in ("rope_parameters", "rope_scaling"):
        found |= _rope_types(getattr(config, parameters, None))
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        found |= {kind} if isinstance(kind, str) else set(kind.values()) if isinstance(kind, dict) else set()
    return found


def _rope_types(parameters: Any) -> set[str]:
    """Returns the kinds of rotary embedding; some configurations have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))
