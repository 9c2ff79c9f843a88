"""Checks a machine against a configuration. Each check has one line, with advice if something is wrong.

A check is a function of values that were read, so it is tested without a machine. Not covered here: the state
of a running daemon (`kvstore status`) and the integrity of stored blocks (`kvstore fsck`).
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstore import native
from kvstore.arena import HUGE_BYTES, Extent
from kvstore.config import SOCKET_PATH_BYTES, Config, format_size, group_limits
from kvstore.cuda.device import Gpu, resolve, uuids
from kvstore.cuda.device import why_not as no_cuda
from kvstore.cuda.errors import CudaError
from kvstore.errors import KVStoreError, TierError
from kvstore.tiers.network import open_network
from kvstore.tiers.nvme.io.kvikio_engine import why_not
from kvstore.types import ALIGN, extent_bytes

Level = Literal["ok", "warn", "fail"]
OK: Level = "ok"
WARN: Level = "warn"
FAIL: Level = "fail"

PACKAGES = ("numpy", "lmdb", "msgpack", "xxhash", "blake3", "pydantic", "uvloop")
_KERNEL = (
    ((5, 14), "memory that is there before the first put needs 5.14 (MADV_POPULATE_WRITE)"),
    ((6, 1), "huge pages for shared memory need 6.1 (MADV_COLLAPSE)"),
)
_OTHER_FILES = 64
_NETWORK_WITHIN_S = 5.0
_PRESERVING_SYSTEMD = 254


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its level, the state that was found, and the advice, empty if nothing is to be done."""

    level: Level
    name: str
    found: str
    advice: str = ""


def _graded(name: str, found: str, *problems: tuple[bool, Level, str]) -> Check:
    """Returns the first problem, of (whether it is there, level, advice). Returns an OK if there is none."""
    for is_there, level, advice in problems:
        if is_there:
            return Check(level, name, found, advice)
    return Check(OK, name, found)


def examine(config: Config) -> list[Check]:
    """Runs all checks on this machine. Changes nothing but a temporary file in each NVMe folder."""
    lines = [
        kernel(platform.release()),
        packages(platform.python_version(), {name: _version(name) for name in PACKAGES}),
        copies(native.IMPLEMENTATION, native.WHY_NOT),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE), config),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], config.dram.limit),
        memory(Path("/proc/meminfo").read_text(encoding="ascii"), group_limits(), config.dram.limit),
        huge_pages(config.dram.huge_pages, _gets_huge_pages, Path("/sys/kernel/mm/transparent_hugepage")),
        socket(config.daemon.socket),
        *operators(config),
    ]
    if not config.nvme.paths:
        lines.append(Check(OK, "nvme", "no nvme.path: no such tier"))
    for name, path in config.nvme.paths.items():
        folder = _existing(path)
        lines += [direct_io(folder), space(path, _free_bytes(folder), config.nvme.limits[name])]
        lines += [lock(path), records(path)]
    modules = {name: importlib.util.find_spec(name) is not None for name in ("cupy", "kvikio")}
    if config.nvme.paths:
        lines.append(engine(why_not(), Path("/proc/driver/nvidia-fs").exists()))
    lines += gpu(Path("/dev"), Path("/proc/driver"), _loads("libcuda.so.1"), modules)
    lines += hbm(config)
    lines.append(network(config))
    lines.append(systemd(_output("systemctl", "--version")))
    return lines


def kernel(release: str) -> Check:
    """Checks the kernel's version. `release` is that of uname."""
    found = tuple(map(int, re.findall(r"\d+", release)[:2]))
    return _graded(
        "kernel", release, *((found < least, WARN, f"a newer kernel: {why}") for least, why in _KERNEL)
    )


def packages(python: str, versions: Mapping[str, str | None]) -> Check:
    """Checks that packages are installed. `versions` are by package, None for absent ones."""
    found = ", ".join([f"python {python}", *(f"{name} {v or 'absent'}" for name, v in versions.items())])
    absent = [name for name, version in versions.items() if version is None]
    level = WARN if absent == ["uvloop"] else FAIL
    return _graded("packages", found, (bool(absent), level, f"pip install {' '.join(absent)}"))


def copies(implementation: str, why_not: str) -> Check:
    """Checks that the C extension copies and verifies blocks. `why_not`: why it does not, else empty."""
    advice = f"copies are slower ({why_not}): unset KVSTORE_NATIVE, or reinstall beside gcc and Python.h"
    return _graded("copies", implementation, (bool(why_not), WARN, advice))


def open_files(limit: tuple[int, int], config: Config) -> Check:
    """Checks the (soft, hard) limit of open files: each extent and each client has one."""
    extents = config.dram.limit // extent_bytes(config.dram.limit)
    for name in config.nvme.paths:
        nbytes = config.nvme.limits[name]
        extents += nbytes // extent_bytes(nbytes)
    least, need = extents + _OTHER_FILES, extents + _OTHER_FILES + config.limits.connections
    found = f"{_count(limit[0])} here, {need} for {extents} extents and limits.connections"
    advice = f"ulimit -n {need} before kvstore serve; a unit sets its own LimitNOFILE="
    return _graded(
        "open files", found, (0 <= limit[0] < least, FAIL, advice), (0 <= limit[0] < need, WARN, advice)
    )


def locked_memory(soft_bytes: int, dram_bytes: int) -> Check:
    """Checks the soft limit of locked memory, negative for none."""
    if soft_bytes < 0:
        return Check(OK, "locked memory", "unlimited")
    found = f"{format_size(soft_bytes)} here, dram.limit is {format_size(dram_bytes)}"
    advice = "who pins extents for a device needs LimitMEMLOCK=infinity or ulimit -l"
    return _graded("locked memory", found, (soft_bytes < dram_bytes, WARN, advice))


def memory(meminfo: str, cgroup_bytes: Iterable[int], dram_bytes: int) -> Check:
    """Checks for free memory. `meminfo` is /proc/meminfo, `cgroup_bytes` the limits of control groups."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    total = min([sizes["MemTotal"], *cgroup_bytes])
    free = min(sizes["MemAvailable"], total)
    found = f"{format_size(free)} available of {format_size(total)}, dram.limit is {format_size(dram_bytes)}"
    return _graded(
        "memory",
        found,
        (total < dram_bytes, FAIL, "lower dram.limit, or give machine or control group more memory"),
        (free < dram_bytes, WARN, "lower dram.limit, unless a running daemon has what is missing"),
    )


def huge_pages(wanted: bool, try_it: Callable[[], bool], settings: Path) -> Check:
    """Checks for huge pages by `try_it`. `settings` is the kernel's folder of transparent huge pages."""
    chosen = [f"{name} {_chosen(settings / name)}" for name in ("enabled", "shmem_enabled")]
    if not wanted:
        return Check(OK, "huge pages", "dram.huge_pages is off")
    if try_it():
        return Check(OK, "huge pages", f"the kernel gives them ({', '.join(chosen)})")
    advice = (
        f"echo advise > {settings / 'shmem_enabled'}, on Linux 6.1 or later; else dram.huge_pages = false"
    )
    return Check(WARN, "huge pages", f"the kernel gives none ({', '.join(chosen)})", advice)


def socket(path: Path) -> Check:
    """Checks that the daemon can make the socket at `path`."""
    found = f"{path}, {len(os.fsencode(path))} of at most {SOCKET_PATH_BYTES} bytes"
    if os.path.lexists(path) and not path.is_socket():
        return Check(FAIL, "socket", f"{path} is no socket", "set daemon.socket to another path")
    folder = _existing(path.parent)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        advice = "run this as the daemon's user, or set daemon.socket to a path that it may make"
        return Check(FAIL, "socket", f"{folder} is not writable for uid {os.geteuid()}", advice)
    return Check(OK, "socket", found)


def operators(config: Config) -> list[Check]:
    """Checks that root in a container with access to daemon.socket does not become an operator."""
    daemon, admin = config.daemon, config.admin
    lines = []
    if daemon.operator_socket is not None:
        lines.append(socket(daemon.operator_socket))
        folder = daemon.socket.parent
        if folder in (daemon.operator_socket.parent, admin.socket.parent):
            found = f"operators' sockets lie in {folder}, beside daemon.socket"
            advice = (
                "a folder of their own for daemon.operator_socket and admin.socket, which no container mounts"
            )
            lines.append(Check(WARN, "operators", found, advice))
        else:
            lines.append(Check(OK, "operators", f"by {daemon.operator_socket} only"))
    elif daemon.socket_mode & 0o006:
        advice = "daemon.operator_socket, if containers have daemon.socket: there, anybody may be root"
        lines.append(Check(WARN, "operators", "everybody may connect, and root is an operator", advice))
    if 0 in {uid for tenant in config.tenants.values() for uid in tenant.uids}:
        advice = "name users, or give it a token: root in any container is that tenant"
        lines.append(Check(WARN, "tenants", "root is a member of a tenant", advice))
    privileged, tenants = {0, os.geteuid()}, config.tenants.items()
    readers = [name for name, each in tenants if each.role == "read" and privileged & {*each.uids}]
    if readers:
        advice = "another user: root, and who runs the daemon, get no memory for reading only"
        lines.append(Check(WARN, "readers", f"{readers[0]} only reads, and is root or this user", advice))
    return lines


def direct_io(folder: Path) -> Check:
    """Checks direct I/O by writing a temporary file."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file, mmap.mmap(-1, ALIGN) as data:
            fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.pwrite(fd, data, 0)
            finally:
                os.close(fd)
    except PermissionError:
        found = f"{folder} is not writable for uid {os.geteuid()}"
        return Check(FAIL, "direct I/O", found, "run this as the daemon's user, or chown the folder to it")
    except OSError as error:
        advice = "use ext4 or XFS on a local device: without direct I/O the page cache takes memory too"
        return Check(WARN, "direct I/O", f"{folder}: {error.strerror}", advice)
    return Check(OK, "direct I/O", f"{folder} takes it")


def space(path: Path, free_bytes: int, limit_bytes: int) -> Check:
    """Checks for free space. Existing slabs have their full size already."""
    have = sum(slab.stat().st_blocks * 512 for slab in path.glob("slabs/*.slab"))
    sizes = f"{format_size(have)} in slabs, {format_size(free_bytes)} free"
    found = f"{sizes}, nvme.limit is {format_size(limit_bytes)}"
    advice = f"make room in {path}, or lower nvme.limit"
    return _graded("space", found, (have + free_bytes < limit_bytes, FAIL, advice))


def lock(path: Path) -> Check:
    """Shows which daemon uses the folder."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Check(OK, "folder", f"{path}: no daemon has used it")
    except OSError as error:
        return Check(FAIL, "folder", f"{path}: {error.strerror}", "run this as the daemon's user")
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Check(OK, "folder", f"{path}: not in use")
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
        return Check(OK, "folder", f"{path}: in use by pid {pid or 'unknown'}")
    finally:
        os.close(fd)


def records(path: Path) -> Check:
    """Shows the size of the records. Fails if corrupt records were moved aside."""
    aside = sorted(each.name for each in path.glob("records.corrupt-*"))
    if aside:
        advice = (
            f"blocks written before that are lost and computed again: look for a failing device "
            f"(dmesg, smartctl -a), then delete {path / aside[-1]}"
        )
        return Check(FAIL, "records", f"moved aside as corrupt: {', '.join(aside)}", advice)
    try:
        nbytes = (path / "records" / "data.mdb").stat().st_size
    except FileNotFoundError:
        return Check(OK, "records", "none yet")
    except OSError as error:
        return Check(FAIL, "records", f"{path}: {error.strerror}", "run this as the daemon's user")
    return Check(OK, "records", f"{format_size(nbytes)}, not checked (kvstore fsck does)")


def engine(why_not: str, nvidia_fs: bool) -> Check:
    """Shows the I/O engine. `why_not`: why kvikio is not used; `nvidia_fs`: whether its module is loaded."""
    if why_not:
        no_ring = native.why_no_io_uring()
        ring = f"without io_uring ({no_ring})" if no_ring else "with io_uring"
        return Check(OK, "NVMe I/O", f"posix, {ring}: {why_not}")
    way = "by GPUDirect Storage" if nvidia_fs else "in compatibility mode: nvidia-fs is not loaded"
    return Check(OK, "NVMe I/O", f"kvikio, to and from a GPU {way}")


def gpu(dev: Path, drivers: Path, libcuda: bool, modules: Mapping[str, bool]) -> list[Check]:
    """Checks the software beside a GPU, if there is one. The daemon needs no GPU."""
    devices = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if not devices:
        return [Check(OK, "GPU", "none, and the daemon needs none")]
    found = {
        "libcuda": (libcuda, "install the NVIDIA driver's user space (libcuda.so.1)"),
        "nvidia-fs": ((drivers / "nvidia-fs").exists(), "for GPUDirect Storage: modprobe nvidia-fs"),
        **{name: (there, f"pip install {name}") for name, there in modules.items()},
    }
    lines = [Check(OK, "GPU", ", ".join(devices))]
    for name, (there, advice) in found.items():
        lines.append(Check(OK, name, "found") if there else Check(WARN, name, "absent", advice))
    return lines


def hbm(config: Config) -> list[Check]:
    """Checks for pools of GPU memory. Without these, blocks are served from DRAM."""
    limit = config.hbm.limit
    if not limit:
        return [Check(OK, "hbm", "hbm.limit is 0: no pool of GPU memory")]
    if reason := no_cuda():
        return [Check(WARN, "hbm", reason, "pip install 'kvstore[cuda]' beside a driver, or hbm.limit = 0")]
    try:
        names = uuids() if config.hbm.gpus is None else config.hbm.gpus
        return [_pool(Gpu.open(resolve(name)), limit) for name in names]
    except KVStoreError as error:
        return [Check(WARN, "hbm", error.message, error.hint)]


def network(config: Config) -> Check:
    """Checks that the network tier's backend can be written and read."""
    if config.network.url is None:
        return Check(OK, "network", "no network.url: no such tier")
    backend, why_not = open_network(config.network)
    if backend is None:
        return Check(FAIL, "network", why_not[0], "without it, each node has only its own blocks")
    try:
        backend.health(time.monotonic() + _NETWORK_WITHIN_S)
    except KVStoreError as error:
        return Check(FAIL, "network", error.message, error.hint)
    finally:
        backend.close()
    return Check(OK, "network", f"{backend.kind}: can be written and read")


def _pool(gpu: Gpu, limit_bytes: int) -> Check:
    free, total = gpu.memory()
    found = f"{gpu.uuid}: {format_size(free)} of {format_size(total)} free, limit {format_size(limit_bytes)}"
    if total < limit_bytes:
        return Check(WARN, "hbm", found, "lower hbm.limit: there will be no pool on this GPU")
    if free < limit_bytes:
        return Check(WARN, "hbm", found, "lower hbm.limit, unless a running daemon has what is missing")
    piece = gpu.allocate(1)
    try:
        gpu.export(piece)
    except CudaError as error:
        return Check(WARN, "hbm", error.message, error.hint)
    finally:
        gpu.free(piece)
    return Check(OK, "hbm", found)


def systemd(output: str) -> Check:
    """Checks the version of systemd. `output` is that of `systemctl --version`, empty without systemd."""
    version = re.match(r"systemd (\d+)", output)
    if version is None:
        return Check(OK, "systemd", "none: run kvstore serve under another supervisor")
    advice = f"{_PRESERVING_SYSTEMD} keeps DRAM's contents over a stop too; older ones over a restart"
    return _graded("systemd", version[1], (int(version[1]) < _PRESERVING_SYSTEMD, WARN, advice))


def _existing(path: Path) -> Path:
    """Returns the nearest existing folder, `path` itself or one above it."""
    return next((each for each in (path, *path.absolute().parents) if os.path.isdir(each)), Path("/"))


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _gets_huge_pages() -> bool:
    try:
        extent = Extent.create("kvstore-doctor", HUGE_BYTES)
    except TierError:
        return False
    try:
        return extent.populate(huge=True)
    finally:
        extent.close()


def _chosen(file: Path) -> str:
    """Returns the choice in brackets, as in `always [madvise] never`."""
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else text.strip()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _count(n: int) -> str:
    return "unlimited" if n < 0 else str(n)
