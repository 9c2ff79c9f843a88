"""Lists the files of a model with their states, from which a later change of a file is seen."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError

_NO_PART_ENDINGS = (".lock",)
_NO_PART_FOLDERS = {"__pycache__"}


class FileState(NamedTuple):
    """The identity of a file and of its content: every write changes `ctime_ns`, which no tool can set back.

    Times are in ns since 1970, `size` is in bytes.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def is_older_than(self, time_ns: int) -> bool:
        """Returns whether both times are before this time."""
        return max(self.mtime_ns, self.ctime_ns) < time_ns


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file to open, and its state when it was listed."""

    path: Path
    state: FileState


def model_files(root: Path) -> dict[str, ModelFile]:
    """Returns the files of a model by relative name, in the order of the names' bytes.

    All regular files count, also those that links lead to, because any of them may change the model. Hidden
    names (`.git`, `.cache`, `.gitattributes`), `*.lock` and `__pycache__` are left out, because no engine
    reads them as a part of a model. So are links to missing files. A `root` that is a file is the only one.
    Raises ConfigError if there is no file, or if a folder cannot be read.
    """
    try:
        found = _listed(root)
    except OSError as error:
        raise ConfigError(
            f"cannot list the files of a model in {root}: {error.strerror}",
            "give this user access, or name the weights yourself",
        ) from error
    if not found:
        raise ConfigError(
            f"there are no files of a model in {root}", "download the model, or name the weights yourself"
        )
    return dict(sorted(found.items(), key=lambda item: os.fsencode(item[0])))


def _listed(root: Path) -> dict[str, ModelFile]:
    status = root.stat()
    if stat.S_ISREG(status.st_mode):
        return {root.name: ModelFile(root, _state(status))}
    found: dict[str, ModelFile] = {}
    if stat.S_ISDIR(status.st_mode):
        _walk(root, "", frozenset({(status.st_dev, status.st_ino)}), found)
    return found


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]], found: dict[str, ModelFile]) -> None:
    """Adds the files below a folder. `above`: this folder and those around it, where a link may not lead."""
    for name in os.listdir(folder):
        path = folder / name
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # a link to a missing file, or a file that was just removed
        if stat.S_ISDIR(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            if not _is_no_part(name, folder=True) and identity not in above:
                _walk(path, f"{prefix}{name}/", above | {identity}, found)
        elif stat.S_ISREG(status.st_mode) and not _is_no_part(name, folder=False):
            found[prefix + name] = ModelFile(path, _state(status))


def _is_no_part(name: str, *, folder: bool) -> bool:
    if name.startswith("."):
        return True
    return name in _NO_PART_FOLDERS if folder else name.endswith(_NO_PART_ENDINGS)


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
