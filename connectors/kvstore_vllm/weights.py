"""Names the weights of an engine: by option, by the hub's commit, or by the content of local files.

vLLM creates a connector when it has loaded the model. Reading the files again takes a part of the time of the
load, so it happens in the background: see `Naming`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.load import LoadConfig

from kvstore import files_digest, newest_file, process_started_ns
from kvstore.errors import ConfigError

logger = logging.getLogger("vllm.kvstore")

_BY_CONTENT = "blake3:"
_HINT = "set weights_revision in kv_connector_extra_config"

_READ_OWN_FILES = {
    "auto", "hf", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "safetensors", "sharded_state",
}  # fmt: skip
"""Load formats whose weights come from the files of the model."""

_AT_START_S = 0.5
"""The longest time that the start of an engine waits for a name: no engine with a GPU starts within 5 s."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model: `name` names them, or the content of the files at `path` does.

    `chosen`: which of the files are read, if that is not vLLM's default.
    """

    name: str = ""
    path: Path | None = None
    chosen: str = ""

    @property
    def by_content(self) -> bool:
        """Whether the content of files names them, so that their path says nothing."""
        return self.path is not None or named_by_content(self.name)

    def check(self) -> None:
        """Raises ConfigError if files are missing or unreadable, or changed after the engine started."""
        if self.path is not None:
            with _hinted():
                _check_unchanged(self.path, *newest_file(self.path))

    def revision(self, background: bool = False) -> str:
        """Returns the name. Reads the files if no process of this node has read them. Raises ConfigError.

        `background`: with the lowest priority.
        """
        if self.path is None:
            return f"{self.name}{self.chosen}"
        with _hinted():
            found = files_digest(self.path, logger, background)
        _check_unchanged(self.path, found.newest, found.changed_ns)
        return f"{_BY_CONTENT}{found.hexdigest}{self.chosen}"


def weights_of(config: Any, given: str) -> Weights:
    """Returns the weights of an engine's model. `given`: the option.

    Raises ConfigError if nothing names them.
    """
    return _weights(config.model_config, config.load_config, given)


def draft_of(config: Any, given: str) -> Weights | None:
    """Returns the weights of a draft model whose KV lies beside the model's, see `weights_of`.

    None: there is no such draft, or the model's own files may have the draft in them.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    draft, load = speculative.draft_model_config, speculative.draft_load_config
    if draft.model == config.model_config.model:
        return None
    return _weights(draft, load or config.load_config, given)


def _weights(model: Any, load: LoadConfig, given: str) -> Weights:
    if given or load.load_format == "dummy":
        return Weights(given or "dummy")
    # Of a model in an object store, the local files are its configuration alone.
    if model.model_weights:
        raise ConfigError(f"nothing tells which weights are in {model.model_weights!r}", _HINT)
    if load.load_format not in _READ_OWN_FILES:
        raise ConfigError(
            f"with load_format {load.load_format!r} nothing tells which weights are read", _HINT
        )
    chosen = _chosen(load)
    if Path(model.model).exists():
        return Weights(path=Path(model.model), chosen=chosen)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return Weights(f"commit:{commit}", chosen=chosen)
    raise ConfigError(f"nothing tells which weights {model.model!r} has", _HINT)


def _chosen(load: LoadConfig) -> str:
    """Returns what selects the files to read among those of a model; empty: vLLM's default."""
    extra, default = load.model_loader_extra_config, LoadConfig()
    options = {
        "load_format": load.load_format if load.load_format != default.load_format else None,
        "ignore_patterns": load.ignore_patterns if load.ignore_patterns != default.ignore_patterns else None,
        "pattern": extra.get("pattern") if isinstance(extra, dict) else None,
    }
    return "".join(f", {name} {value}" for name, value in options.items() if value is not None)


def revision_of(weights: Sequence[Weights], background: bool = False) -> str:
    """Returns the name of a model's and its draft's weights together, see `Weights.revision`."""
    return ", draft ".join(dict.fromkeys(each.revision(background) for each in weights))


def named_by_content(revision: str) -> bool:
    """Returns whether a revision is a digest of all files of the model."""
    return revision.startswith(_BY_CONTENT)


class Naming:
    """The name of weights, made by a thread of its own.

    What can be checked without reading the files is checked in the constructor, which raises ConfigError.
    """

    def __init__(self, weights: Sequence[Weights]) -> None:
        self._weights = weights
        self._revision: Future[str] = Future()
        for each in weights:
            each.check()
        if any(each.path for each in weights):
            # A daemon: a process that ends does not wait for it.
            threading.Thread(target=self._make, name="kvstore-weights", daemon=True).start()
        else:
            self._make()

    def wait(self, seconds: float) -> bool:
        """Waits until the name is made, or cannot be. Returns whether it is so."""
        return bool(wait([self._revision], seconds).done)

    def wait_at_start(self) -> bool:
        """Waits like `wait`, as long as the start of the engine may be held up."""
        return self.wait(_AT_START_S)

    def revision(self) -> str:
        """Returns the name after `wait`. Raises what has prevented it: a ConfigError as a rule."""
        return self._revision.result()

    def _make(self) -> None:
        try:
            self._revision.set_result(revision_of(self._weights, background=True))
        except BaseException as error:
            self._revision.set_exception(error)


@contextmanager
def _hinted() -> Iterator[None]:
    """Adds this connector's hint to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.message, f"{error.hint}: {_HINT}") from error


def _check_unchanged(path: Path, newest: str, changed_ns: int) -> None:
    """Raises ConfigError if a file may have changed since vLLM has read it in this process."""
    if changed_ns >= process_started_ns():
        raise ConfigError(
            f"{newest} in {path} was changed after the engine started: vLLM may have read it before",
            f"restart the engine, or {_HINT}",
        )
