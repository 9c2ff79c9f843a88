"""Identifies the LoRA adapter of a request's KV. Name and path do not, because files can change."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore import files_digest
from kvstore.errors import ConfigError

logger = logging.getLogger("vllm.kvstore")


_SETTLED_NS = 2 * 10**9
"""A state is remembered once it is this old. A second write in one tick of the clock does not change it."""


class Adapters:
    """Salts for the keys of an adapter's blocks, by the content of its files.

    vLLM computes with the files that it loaded until it loads them again: before each step with
    `load_inplace`, otherwise at an unknown time. Content is read again only if the state of the files (names,
    sizes, times) has changed.
    """

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._own = uuid.uuid4().hex
        self._first: dict[tuple[str, str, int], str] = {}
        self._contents: dict[str, tuple[str, bytes]] = {}
        self._warned: set[str] = set()

    def salt(self, lora: Any) -> bytes | None:
        """Returns a 16-byte salt for the loaded adapter; None if its weights cannot be identified."""
        found = _state(Path(lora.lora_path))
        if found is None:
            self._warn(lora, "has no files in a local folder")
            return None
        state, changed_ns = found
        if not lora.load_inplace:  # otherwise vLLM loads the adapter before each step
            first = self._first.setdefault((lora.lora_name, lora.lora_path, lora.lora_int_id), state)
            if first != state:
                self._warn(lora, "was changed in place after its first use")
                return None
        content = self._content(lora.lora_path, state, changed_ns)
        if content is None:
            self._warn(lora, "has files that change or cannot be read")
            return None
        # Files newer than the engine may have changed since it loaded them: no sharing with other engines.
        own = "" if lora.load_inplace or changed_ns < self._started_ns else self._own
        return blake3(content + own.encode()).digest(16)

    def _content(self, folder: str, state: str, changed_ns: int) -> bytes | None:
        """Returns a digest of the files in this state; None if they change meanwhile or cannot be read."""
        known_state, known = self._contents.get(folder, ("", b""))
        if known_state == state:
            return known
        before_ns = time.time_ns()
        content = _digest(Path(folder))
        if content is None or (_state(Path(folder)) or ("", 0))[0] != state:
            return None
        if changed_ns < before_ns - _SETTLED_NS:
            self._contents[folder] = state, content
        return content

    def _warn(self, lora: Any, why: str) -> None:
        if lora.lora_name not in self._warned:
            self._warned.add(lora.lora_name)
            logger.warning("the adapter %r %s: its KV is neither loaded nor stored", lora.lora_name, why)


def _state(folder: Path) -> tuple[str, int] | None:
    """Returns the state of the files in a folder and the time of the last change (ns since 1970)."""
    try:
        files = [(file.name, file.stat()) for file in _files(folder)]
    except OSError:
        return None
    if not files:
        return None
    facts = [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in files]
    return repr(facts), max(max(state.st_mtime_ns, state.st_ctime_ns) for _, state in files)


def _digest(folder: Path) -> bytes | None:
    """Returns a digest of names and content of the files in a folder; None if one cannot be read."""
    try:
        return "".join(files_digest(file, logger).hexdigest for file in _files(folder)).encode()
    except (ConfigError, OSError):
        return None


def _files(folder: Path) -> list[Path]:
    """Returns the files in a folder. vLLM reads none below it, where training keeps large checkpoints."""
    return sorted(file for file in folder.iterdir() if file.is_file())
