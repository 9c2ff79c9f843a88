"""Names the weights of an engine: by option, or by the content of the model's folder.

TensorRT-LLM creates a connector when it has loaded the model. Reading the files again takes a part of the
time of the load, so it happens in the background: see `Naming`.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait
from pathlib import Path

from kvstore import files_digest, newest_file, process_started_ns
from kvstore.errors import ConfigError
from kvstore_trtllm.options import VARIABLE

logger = logging.getLogger("tensorrt_llm.kvstore")

_AT_START_S = 0.5
"""The longest time that the start of an engine waits for a name."""


class Naming:
    """The name of weights, made by a thread of its own if files must be read.

    What can be checked without reading them is checked in the constructor, which raises ConfigError. `given`:
    the option.
    """

    def __init__(self, folder: Path, given: str) -> None:
        self._folder = folder
        self._revision: Future[str] = Future()
        if given:
            self._revision.set_result(given)
            return
        _check_unchanged(folder, *newest_file(folder))
        # A daemon: a process that ends does not wait for it.
        threading.Thread(target=self._make, name="kvstore-weights", daemon=True).start()

    def wait_at_start(self) -> None:
        """Waits until the name is made, as long as the start of the engine may be held up."""
        wait([self._revision], _AT_START_S)

    def revision(self) -> str:
        """Returns the name; empty if there is none yet, or if it cannot be made."""
        if not self._revision.done() or self._revision.exception() is not None:
            return ""
        return self._revision.result()

    def _make(self) -> None:
        try:
            found = files_digest(self._folder, logger, background=True)
            _check_unchanged(self._folder, found.newest, found.changed_ns)
            self._revision.set_result(f"blake3:{found.hexdigest}")
        except BaseException as error:
            logger.warning("nothing is loaded or stored: %s", error)
            self._revision.set_exception(error)


def _check_unchanged(folder: Path, newest: str, changed_ns: int) -> None:
    """Raises ConfigError if a file may have changed since TensorRT-LLM has read it in this process."""
    if changed_ns >= process_started_ns():
        raise ConfigError(
            f"{newest} in {folder} was changed after the engine started: it may have been read before",
            f"restart the engine, or set weights_revision in {VARIABLE}",
        )
