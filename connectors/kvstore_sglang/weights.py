"""Names the weights of an engine: by option, by the hub's commit, or by the content of local files.

Weights that change later have no name: see `changed`.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_model, process_model_config

import kvstore
from kvstore import WeightsNaming
from kvstore.errors import ConfigError

logger = logging.getLogger("sglang.kvstore")

_HINT = "set weights_revision in --hicache-storage-backend-extra-config"
_READ_OWN_FILES = ("auto", "safetensors")
"""Load formats whose weights come from the files of the model, and that a test covers."""

_UPDATES = (
    "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)  # fmt: skip
"""The methods of SGLang's WeightUpdater that change weights."""

changed = threading.Event()
"""Set when SGLang has begun to change weights in this process. Its KV has no name from then on."""


def watch_updates() -> None:
    """Sets `changed` before an update of weights, by hooks of SGLang's plugin framework.

    Raises ConfigError if they have no effect.
    """
    for name in _UPDATES:
        before = getattr(WeightUpdater, name)
        if getattr(before, "_kvstore", False):
            continue
        HookRegistry.register(
            f"{WeightUpdater.__module__}.{WeightUpdater.__qualname__}.{name}", _note_update, HookType.BEFORE
        )
        HookRegistry.apply_hooks()
        after = getattr(WeightUpdater, name)
        if after is before:
            raise ConfigError(
                f"an update of weights would not be noticed: WeightUpdater.{name} has another hook",
                "remove the plugin that hooks it (SGLANG_PLUGINS selects plugins)",
            )
        after._kvstore = True


def _note_update(*_: Any, **__: Any) -> None:
    if not changed.is_set():
        changed.set()
        logger.warning(
            "nothing is loaded or stored from now on: SGLang updates weights, and blocks have the name of "
            "those at its start. Restart the engine to use the store again"
        )


class Weights(kvstore.Weights):
    """The weights of a model of SGLang."""

    __slots__ = ()
    engine = "SGLang"
    hint = _HINT
    logger = logger


def weights_of(given: str) -> Weights:
    """Returns the weights of the engine's model. `given`: the option.

    Raises ConfigError if nothing names them.
    """
    if given:
        return Weights(given)
    options, model = get_model(), process_model_config()
    load_format = getattr(options.load_format, "value", options.load_format)
    if load_format not in _READ_OWN_FILES:
        raise ConfigError(
            f"with --load-format {load_format} nothing tells which weights are read",
            f"{_HINT}; without it, {' and '.join(_READ_OWN_FILES)} are served",
        )
    return Weights.of_model(str(options.model_path), getattr(model.hf_config, "_commit_hash", None))


def naming_of(weights: Weights) -> WeightsNaming:
    """Returns the naming of weights after the time that the start of an engine may wait for it.

    Raises ConfigError for weights that cannot be named. What prevents a name later is logged.
    """
    made = WeightsNaming([weights], lambda error: logger.warning("nothing is loaded or stored: %s", error))
    made.wait_at_start()
    return made
