"""The name of a model's weights: a digest of the names and bytes of its files."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvstore.errors import ConfigError
from kvstore.weights.cache import DigestCache, cache_folder
from kvstore.weights.files import FileState, ModelFile, model_files
from kvstore.weights.pieces import digest_each

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_SETTLED_NS = 10 * 10**9
"""Files that changed less than this before they are read are not remembered.

A second write within one tick of the file system's clock does not change a file's times.
"""


@dataclass(frozen=True, slots=True)
class FilesDigest:
    """A name for the content of files.

    `hexdigest` is BLAKE3 over the relative names and the bytes, 64 hexadecimal digits. `newest` is the
    relative name of the file that changed last, `changed_ns` the time of that change in ns since 1970: its
    ctime, which no tool can set back.
    """

    hexdigest: str
    newest: str
    changed_ns: int


def newest_file(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Returns `newest` and `changed_ns` of the files' digest, see `FilesDigest`, without reading the files.

    Raises ConfigError if there are no files, or this user may not read one of them.
    """
    files = model_files(Path(path))
    for file in files.values():
        if not os.access(file.path, os.R_OK):
            raise _unreadable(file.path, os.strerror(errno.EACCES))
    return _newest(files)


def process_started_ns() -> int:
    """Returns the time at which this process started, in ns since 1970.

    An engine has read none of its files before. It is up to 10 ms late: a process reads nothing so soon, and
    files written just before its start count as older.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[19]) + 1  # `starttime` in proc_pid_stat(5), which is rounded down
    since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns


def files_digest(
    path: str | os.PathLike[str], logger: logging.Logger = _log, background: bool = False
) -> FilesDigest:
    """Returns a digest of a file or of all files in a folder, by content: the name of a model's weights.

    Copies have the same digest. A changed byte, a renamed, additional or missing file gives another one. All
    regular files below the folder count, and links are followed. Hidden names (`.git`, `.cache`), `*.lock`
    and `__pycache__` are left out.

    As many threads as there are cores, 16 at most, read the files. Digests are remembered in
    `$XDG_CACHE_HOME/kvstore/weights` (or `~/.cache`) by device, inode, size and times of the file, so that a
    node reads each file once: of processes that start together one reads, the others wait. Files that changed
    in the last 10 s are not remembered. Reading for more than 2 s is logged, with progress every 10 s.
    `background`: at most 4 threads read, with the lowest priority.

    Raises ConfigError if there are no files, a file cannot be read, or files keep changing.
    """
    root = Path(path)
    files: Mapping[str, ModelFile] = model_files(root)
    changed = ""
    with DigestCache(cache_folder(), logger) as cache:
        for _ in range(_ATTEMPTS):
            digests, after = _digests(root, files, cache, logger, background)
            if after == files:
                return _named(files, digests)
            changed = next(name for name in files.keys() | after.keys() if files.get(name) != after.get(name))
            files = after
    raise ConfigError(
        f"{changed} in {root} changes while it is digested", "start again when the model is complete"
    )


def _digests(
    root: Path,
    files: Mapping[str, ModelFile],
    cache: DigestCache,
    logger: logging.Logger,
    background: bool,
) -> tuple[dict[FileState, bytes], Mapping[str, ModelFile]]:
    """Returns digests by state, and the files afterwards: if they are others, the digests may be wrong."""
    settled_ns = time.time_ns() - _SETTLED_NS
    settled = {file.state for file in files.values() if file.state.is_older_than(settled_ns)}
    known = cache.read()
    if settled - known.keys():
        cache.lock(os.fsencode(root.resolve()))
        known = cache.read()
    unknown = [file for file in files.values() if file.state not in known]
    if not unknown:
        return known, files
    made = _read(unknown, logger, background)
    after = model_files(root)
    same = {file.state for file in after.values()}
    if lasting := {state: digest for state, digest in made.items() if state in same & settled}:
        cache.add(lasting)
    return known | made, after


def _read(files: list[ModelFile], logger: logging.Logger, background: bool) -> dict[FileState, bytes]:
    """Returns the digests of files that are read; none if a file is gone. Raises ConfigError."""
    try:
        return digest_each(files, logger, background)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(error.filename, error.strerror) from error


def _unreadable(path: object, why: str | None) -> ConfigError:
    return ConfigError(f"cannot read {path}: {why}", "give this user access, or name the weights yourself")


def _newest(files: Mapping[str, ModelFile]) -> tuple[str, int]:
    name = max(files, key=lambda each: files[each].state.ctime_ns)
    return name, files[name].state.ctime_ns


def _named(files: Mapping[str, ModelFile], digests: Mapping[FileState, bytes]) -> FilesDigest:
    whole = blake3(b"kvstore files 1")
    for name, file in files.items():
        raw = os.fsencode(name)
        whole.update(len(raw).to_bytes(4, "little") + raw + digests[file.state])
    return FilesDigest(whole.hexdigest(), *_newest(files))
