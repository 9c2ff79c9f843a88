"""Names the weights of an engine for its namespaces: by a given name, by the hub's commit, or by content.

A connector is created when the engine has loaded its model. Reading the files again takes a part of the time
of the load, so it happens in the background: see `WeightsNaming`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from kvstore.errors import ConfigError
from kvstore.weights.digest import files_digest, newest_file, process_started_ns

_BY_CONTENT = "blake3:"
_AT_START_S = 0.5
"""The longest time that the start of an engine waits for a name: no engine with a GPU starts within 5 s."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model: `name` names them, or the content of the files at `path` does.

    `chosen`: which of the files are read, if that is not the engine's default. A connector has a subclass
    with the name of its engine, its logger, and the hint how to name weights by an option.
    """

    name: str = ""
    path: Path | None = None
    chosen: str = ""

    engine: ClassVar[str] = "the engine"
    hint: ClassVar[str] = "name the weights yourself"
    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)

    @classmethod
    def of_model(cls, model: str, commit: str | None, chosen: str = "") -> Self:
        """Returns the weights of a local folder or file, or of a model of the hub with this commit.

        Raises ConfigError if it is neither.
        """
        if Path(model).exists():
            return cls(path=Path(model), chosen=chosen)
        if commit:
            return cls(f"commit:{commit}", chosen=chosen)
        raise ConfigError(f"nothing tells which weights {model!r} has", cls.hint)

    @property
    def by_content(self) -> bool:
        """Whether the content of files names them, so that their path says nothing."""
        return self.path is not None or self.is_by_content(self.name)

    @staticmethod
    def is_by_content(revision: str) -> bool:
        """Returns whether a revision is a digest of all files of the model."""
        return revision.startswith(_BY_CONTENT)

    def check(self) -> None:
        """Raises ConfigError if files are missing or unreadable, or changed after the engine started."""
        if self.path is not None:
            with self._hinted():
                found = newest_file(self.path)
            self._check_unchanged(*found)

    def revision(self, background: bool = False) -> str:
        """Returns the name. Reads the files if no process of this node has read them. Raises ConfigError.

        `background`: with the lowest priority.
        """
        if self.path is None:
            return f"{self.name}{self.chosen}"
        with self._hinted():
            found = files_digest(self.path, self.logger, background)
        self._check_unchanged(found.newest, found.changed_ns)
        return f"{_BY_CONTENT}{found.hexdigest}{self.chosen}"

    @contextmanager
    def _hinted(self) -> Iterator[None]:
        """Adds the connector's hint to a ConfigError."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(error.message, f"{error.hint}: {self.hint}") from error

    def _check_unchanged(self, newest: str, changed_ns: int) -> None:
        """Raises ConfigError if a file may have changed since the engine has read it in this process."""
        if changed_ns >= process_started_ns():
            raise ConfigError(
                f"{newest} in {self.path} was changed after the engine started: "
                f"{self.engine} may have read it before",
                f"restart the engine, or {self.hint}",
            )


class WeightsNaming:
    """The name of a model's and its draft's weights together, made by a thread of its own.

    What can be checked without reading the files is checked in the constructor, which raises ConfigError.
    `failed`: called with what prevents a name later.
    """

    def __init__(
        self, weights: Sequence[Weights], failed: Callable[[BaseException], None] | None = None
    ) -> None:
        self._weights = weights
        self._failed = failed
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

    def known(self) -> str:
        """Returns the name; empty if there is none yet, or if it cannot be made."""
        if not self._revision.done() or self._revision.exception() is not None:
            return ""
        return self._revision.result()

    def _make(self) -> None:
        try:
            names = dict.fromkeys(each.revision(background=True) for each in self._weights)
            self._revision.set_result(", draft ".join(names))
        except BaseException as error:
            if self._failed is not None:
                self._failed(error)
            self._revision.set_exception(error)
