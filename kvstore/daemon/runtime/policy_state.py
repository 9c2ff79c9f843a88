"""What was learned of blocks' reuse, from one daemon to the next: a file in the folder of the NVMe tier.

Written at an orderly stop and kept until the next one, so that after a crash it is what was known at the stop
before: old, but never wrong, since all that follows from it is who goes first. A file that cannot be read is
not used. Of keys, only fingerprints are in it.
"""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core import events as ev
from kvstore.core.reuse.classes import CLASSES
from kvstore.core.reuse.curves import Counts
from kvstore.core.reuse.reuse import ReuseState

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

_log = logging.getLogger(__name__)

_NAME = "learned.npz"
_FORMAT = 1


def collect(shell: Shell) -> ReuseState:
    """All of it, as it is now."""
    return shell.placement.view.reuse_state(shell.now())


def save(shell: Shell, learned: ReuseState) -> None:
    """Puts it in the place of what is there; a file that cannot be written is only told."""
    path = _path(shell)
    if path is None:
        return
    new = path.with_suffix(".new")
    tenants = [shell.tenancy.registry.name(number) for number in learned.curves]
    counts = [np.stack(counts) for counts in learned.curves.values()]
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            np.savez(
                file,
                format=np.array(_FORMAT),
                written_at=np.array(shell.clock()),
                seed=np.array(learned.seed, np.uint64),
                ticks=np.array(learned.ticks),
                room=np.array(learned.room),
                at=learned.at,
                words=learned.words,
                tenants=np.array(tenants, np.str_),
                counts=np.array(counts, np.float32),
            )
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        _log.warning("what was learned of reuse is not kept: %s", error)


def restore(shell: Shell) -> None:
    """Has the core go on from what an earlier daemon knew, if that can be read. Before any block is there."""
    path = _path(shell)
    if path is None:
        return
    try:
        with np.load(path, allow_pickle=False) as file:
            if int(file["format"]) != _FORMAT:
                raise ValueError(f"format {file['format']}")
            counts = file["counts"].reshape(-1, 2, *CLASSES)
            curves = {}
            for name, (used, reached) in zip(file["tenants"].tolist(), counts, strict=True):
                tenant = shell.tenancy.known(name)
                if tenant is not None:
                    curves[tenant] = Counts(used, reached)
            learned = ReuseState(
                int(file["seed"]), int(file["ticks"]), curves, int(file["room"]), file["at"], file["words"]
            )
            elapsed_s = shell.clock() - float(file["written_at"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be used: reuse is learned anew: %s", path, error)
        return
    shell.handle(ev.RestoreReuse(learned, elapsed_s))


def discard(shell: Shell) -> None:
    """What was written at the last stop is no more: a tenant has been deleted, which it still names."""
    path = _path(shell)
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("what was learned of a deleted tenant stays until the next stop: %s", error)


def _path(shell: Shell) -> Path | None:
    folder = shell.config.nvme.path
    return folder / _NAME if folder is not None else None
