"""Saves reuse statistics from one daemon to the next, in a file in the folder of one NVMe device.

The file is written at an orderly stop. After a crash it is older than the blocks, which is harmless: it
affects only the order of eviction. A file that cannot be read is ignored. The file has fingerprints of keys,
not keys.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.core import events as ev
from kvstore.core.reuse.classes import CLASSES
from kvstore.core.reuse.curves import Counts
from kvstore.core.reuse.history import GhostTable
from kvstore.core.reuse.reuse import ReuseState
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig

_log = logging.getLogger(__name__)

_NAME = "learned.npz"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PolicyStateFile:
    """The file of one daemon. Without an NVMe tier, nothing is saved.

    `name_of` and `number_of` translate tenants. `clock` returns Unix time in s.
    """

    _core: Executor
    _config: CurrentConfig
    _name_of: Callable[[int], str]
    _number_of: Callable[[str], int | None]
    _clock: Callable[[], float]

    def save(self, state: ReuseState) -> None:
        """Replaces the file. A failure is logged."""
        path = self._path
        if path is None:
            return
        new = path.with_suffix(".new")
        tenants = [self._name_of(number) for number in state.curves]
        counts = [np.stack((curves.used, curves.reached)) for curves in state.curves.values()]
        together = [curves.together for curves in state.curves.values()]
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                np.savez(
                    file,
                    format=np.array(_FORMAT),
                    written_at=np.array(self._clock()),
                    seed=np.array(state.ghosts.seed, np.uint64),
                    ticks=np.array(state.ghosts.ticks),
                    room=np.array(state.ghosts.room),
                    at=state.ghosts.at,
                    words=state.ghosts.words,
                    tenants=np.array(tenants, np.str_),
                    counts=np.array(counts, np.float32),
                    together=np.array(together, np.float32),
                )
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
        except OSError as error:
            _log.warning("reuse statistics were not saved: %s", error)

    def restore(self) -> None:
        """Sends the saved statistics to the core, before any block."""
        path = self._path
        if path is None:
            return
        try:
            state, written_at = self._read(path)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            _log.warning("%s cannot be used: reuse statistics start empty: %s", path, error)
            return
        self._core.handle(ev.RestoreReuse(state, self._clock() - written_at))

    def _read(self, path: Path) -> tuple[ReuseState, float]:
        with np.load(path, allow_pickle=False) as file:
            if int(file["format"]) != _FORMAT:
                raise ValueError(f"format {file['format']}")
            counts = file["counts"].reshape(-1, 2, *CLASSES)
            # Files of earlier versions do not tell: as if no blocks joined together.
            known = file["together"] if "together" in file else counts[:, 1, :, 0]
            curves = {}
            for name, (used, reached), together in zip(file["tenants"].tolist(), counts, known, strict=True):
                tenant = self._number_of(name)
                if tenant is not None:
                    curves[tenant] = Counts(used, reached, together.reshape(CLASSES[0]))
            seed, ticks, room = int(file["seed"]), int(file["ticks"]), int(file["room"])
            ghosts = GhostTable(seed, ticks, room, file["at"], file["words"])
            return ReuseState(curves, ghosts), float(file["written_at"])

    def discard(self) -> None:
        """Deletes the file, because it names a tenant that was deleted. A failure is logged."""
        path = self._path
        if path is not None:
            self.discard_in(path.parent)

    def discard_in(self, folder: Path) -> None:
        """Deletes the file in a folder, if any. A failure is logged."""
        try:
            (folder / _NAME).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("reuse statistics stay, also of deleted tenants: %s", error)

    @property
    def device(self) -> str:
        """The name of the device that has the file: the first one configured. Empty: there is none."""
        return next(iter(self._config().nvme.paths), "")

    @property
    def _path(self) -> Path | None:
        folder = self._config().nvme.paths.get(self.device)
        return folder / _NAME if folder is not None else None
