"""Names the weights of an engine: by option, or by the content of the model's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import kvstore
from kvstore import WeightsNaming
from kvstore_trtllm.options import VARIABLE

logger = logging.getLogger("tensorrt_llm.kvstore")


class Weights(kvstore.Weights):
    """The weights of a model of TensorRT-LLM."""

    __slots__ = ()
    engine = "TensorRT-LLM"
    hint = f"set weights_revision in {VARIABLE}"
    logger = logger


def naming_of(folder: Path, given: str) -> WeightsNaming:
    """Returns the naming of the weights in a folder. `given`: the option, which names them instead.

    Raises ConfigError for weights that cannot be named. What prevents a name later is logged.
    """
    weights = Weights(given) if given else Weights(path=folder)
    return WeightsNaming([weights], lambda error: logger.warning("nothing is loaded or stored: %s", error))
