"""The options of the connector: an environment variable, as `kv_connector_config` has no place for them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from kvstore import parse_options
from kvstore.errors import ConfigError

VARIABLE = "TRTLLM_KVSTORE"
"""TensorRT-LLM passes variables that begin with its name to all of its ranks."""
MIB = 1 << 20
_MOST_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The parsed options.

    `url`: the daemon; empty: `server_url` of kv_connector_config, KVSTORE_SOCKET or the default path.
    `token`: of the engine's tenant; empty: KVSTORE_TOKEN. `deadline_s`: bounds the load of a prompt; a
    store has ten times as long. `staging_mib`: host memory for loads, of all ranks together, and as much
    again for stores.
    `recompute_tokens_per_s`: the speed of a prefill; blocks that are slower to load are misses; 0: unknown.
    `weights_revision`: names the weights instead of their files. `model`: names the model.
    """

    url: str = ""
    token: str = field(default="", repr=False)
    deadline_s: float = 0.5
    staging_mib: int = 2048
    recompute_tokens_per_s: float = 0.0
    weights_revision: str = ""
    model: str = ""

    @classmethod
    def of(cls, llm_args: Any) -> ConnectorOptions:
        """Parses the JSON object in the environment variable. Raises ConfigError."""
        text = os.environ.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            # The text may have a token in it.
            raise ConfigError(f"{VARIABLE} is not JSON: {error}", 'for example {"deadline_s": 1}') from None
        if not isinstance(given, dict):
            raise ConfigError(f"{VARIABLE} is a {type(given).__name__}", "a JSON object")
        url = getattr(llm_args.kv_connector_config, "server_url", None)
        options = parse_options(cls, {"url": url, **given} if url else given, VARIABLE)
        if not 1 <= options.staging_mib <= _MOST_MIB:
            raise ConfigError(
                f"{VARIABLE}: staging_mib is {options.staging_mib}", f"a whole number from 1 to {_MOST_MIB}"
            )
        if options.recompute_tokens_per_s < 0:
            raise ConfigError(
                f"{VARIABLE}: recompute_tokens_per_s is {options.recompute_tokens_per_s}",
                "tokens per second, 0 if unknown",
            )
        return options
