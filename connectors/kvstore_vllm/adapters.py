"""Identifies the LoRA adapter of a request's KV. Name and path do not, because files can change."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path
from typing import Any

from blake3 import blake3

logger = logging.getLogger("vllm.kvstore")


class Adapters:
    """Salts for the keys of an adapter's blocks, by the state of its files.

    vLLM computes with the files that it loaded until it loads them again: before each step with
    `load_inplace`, otherwise at an unknown time.
    """

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._own = uuid.uuid4().hex
        self._first: dict[tuple[str, str, int], str] = {}
        self._warned: set[str] = set()

    def salt(self, lora: Any) -> bytes | None:
        """Returns a 16-byte salt for the loaded adapter; None if its weights cannot be identified."""
        state = _state(Path(lora.lora_path))
        if state is None:
            self._warn(lora, "has no files in a local folder")
            return None
        revision, changed_ns = state
        if lora.load_inplace:  # vLLM loads the adapter before each step
            return blake3(revision.encode()).digest(16)
        first = self._first.setdefault((lora.lora_name, lora.lora_path, lora.lora_int_id), revision)
        if first != revision:
            self._warn(lora, "was changed in place after its first use")
            return None
        # Files newer than the engine may have changed since it loaded them: no sharing with other engines.
        own = self._own if changed_ns >= self._started_ns else ""
        return blake3((revision + own).encode()).digest(16)

    def _warn(self, lora: Any, why: str) -> None:
        if lora.lora_name not in self._warned:
            self._warned.add(lora.lora_name)
            logger.warning("the adapter %r %s: its KV is neither loaded nor stored", lora.lora_name, why)


def _state(folder: Path) -> tuple[str, int] | None:
    """Returns the state of the files in a folder and the time of the last change (ns since 1970)."""
    try:
        files = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    except OSError:
        return None
    if not files:
        return None
    facts = [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in files]
    return repr(facts), max(max(state.st_mtime_ns, state.st_ctime_ns) for _, state in files)
