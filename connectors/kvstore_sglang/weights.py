"""Names the weights of an engine: by option, by the hub's commit, or by the content of local files.

SGLang creates the backend when it has loaded the model. Reading the files again takes a part of the time of
the load, so it happens in the background: see `Naming`. Weights that change later have no name: see
`changed`.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_model, process_model_config

from kvstore import files_digest, newest_file, process_started_ns
from kvstore.errors import ConfigError

logger = logging.getLogger("sglang.kvstore")

_BY_CONTENT = "blake3:"
_HINT = "set weights_revision in --hicache-storage-backend-extra-config"
_READ_OWN_FILES = ("auto", "safetensors")
"""Load formats whose weights come from the files of the model, and that a test covers."""

_AT_START_S = 0.5
"""The longest time that the start of an engine waits for a name: no engine with a GPU starts within 5 s."""

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


class Naming:
    """The name of the engine's weights, made by a thread of its own if files must be read.

    What can be checked without reading them is checked in the constructor, which raises ConfigError. `given`:
    the option. `by_content`: whether files name them, so that their path says nothing.
    """

    def __init__(self, given: str) -> None:
        self._path, name = _source(given)
        self._revision: Future[str] = Future()
        if self._path is None:
            self._revision.set_result(name)
            return
        _check_unchanged(self._path, *newest_file(self._path))
        # A daemon: a process that ends does not wait for it.
        threading.Thread(target=self._make, name="kvstore-weights", daemon=True).start()
        wait([self._revision], _AT_START_S)

    @property
    def by_content(self) -> bool:
        """Whether the content of files names the weights."""
        return self._path is not None

    def revision(self) -> str:
        """Returns the name; empty if there is none yet, or if it cannot be made."""
        if not self._revision.done() or self._revision.exception() is not None:
            return ""
        return self._revision.result()

    def _make(self) -> None:
        try:
            assert self._path is not None
            found = files_digest(self._path, logger, background=True)
            _check_unchanged(self._path, found.newest, found.changed_ns)
            self._revision.set_result(f"{_BY_CONTENT}{found.hexdigest}")
        except BaseException as error:
            logger.warning("nothing is loaded or stored: %s", error)
            self._revision.set_exception(error)


def _source(given: str) -> tuple[Path | None, str]:
    """Returns the path of files whose content names the weights, or None and a name. Raises ConfigError."""
    if given:
        return None, given
    options, model = get_model(), process_model_config()
    load_format = getattr(options.load_format, "value", options.load_format)
    if load_format not in _READ_OWN_FILES:
        raise ConfigError(
            f"with --load-format {load_format} nothing tells which weights are read",
            f"{_HINT}; without it, {' and '.join(_READ_OWN_FILES)} are served",
        )
    path = str(options.model_path)
    if Path(path).exists():
        return Path(path), ""
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return None, f"commit:{commit}"
    raise ConfigError(f"nothing tells which weights {path!r} has", _HINT)


def _check_unchanged(path: Path, newest: str, changed_ns: int) -> None:
    """Raises ConfigError if a file may have changed since SGLang has read it in this process."""
    if changed_ns >= process_started_ns():
        raise ConfigError(
            f"{newest} in {path} was changed after the engine started: SGLang may have read it before",
            f"restart the engine, or {_HINT}",
        )
