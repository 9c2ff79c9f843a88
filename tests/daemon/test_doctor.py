"""Every check of `kvstore doctor`, told of machines that are right and of machines that are not."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore import config as configuration
from kvstore.daemon import doctor
from kvstore.daemon.doctor import FAIL, OK, WARN, Check
from kvstore.lab.local_daemon import LocalDaemon
from tests.cuda.faking import fake_cuda
from tests.daemons import WITH_NVME, cli

GIB = 1 << 30
NVME = configuration.parse('[nvme]\npath = "/nowhere"\n[limits]\nconnections = 100\n')
NEED = 8 + 16 + 64 + 100
"""Descriptors for extents of DRAM and NVMe, the rest and connections."""
MEMINFO = "MemTotal:  8388608 kB\nMemFree:  1 kB\nMemAvailable:  4194304 kB\nHugePages_Total:   0\n"


def told(line: Check, level: str, *words: str) -> None:
    assert line.level == level, line
    assert (line.advice == "") == (level == OK), line
    for word in words:
        assert word in f"{line.found} / {line.advice}", line


@pytest.mark.parametrize(
    ("release", "level", "words"),
    [
        ("6.1.0-18-amd64", OK, "6.1.0"),
        ("10.0.1", OK, "10.0.1"),
        ("6.0.19", WARN, "need 6.1"),
        ("5.14.0-427.el9.x86_64", WARN, "need 6.1"),
        ("5.4.0-150-generic", WARN, "needs 5.14"),
    ],
)
def test_kernel(release: str, level: str, words: str) -> None:
    told(doctor.kernel(release), level, words)


def test_packages() -> None:
    told(doctor.packages("3.11.7", {"numpy": "2.0", "uvloop": "1.0"}), OK, "python 3.11.7", "numpy 2.0")
    told(doctor.packages("3.11.7", {"numpy": "2.0", "uvloop": None}), WARN, "pip install uvloop")
    told(doctor.packages("3.11.7", {"numpy": "2.0", "lmdb": None}), FAIL, "pip install lmdb")


def test_copies() -> None:
    told(doctor.copies("native, AVX2", ""), OK, "native, AVX2")
    told(doctor.copies("numpy and xxhash", "KVSTORE_NATIVE=0"), WARN, "numpy", "unset KVSTORE_NATIVE", "gcc")


@pytest.mark.parametrize(
    ("soft", "level"), [(-1, OK), (NEED, OK), (NEED - 1, WARN), (NEED - 100, WARN), (NEED - 101, FAIL)]
)
def test_open_files(soft: int, level: str) -> None:
    told(doctor.open_files((soft, 1 << 20), NVME), level, str(NEED))


def test_open_files_without_nvme() -> None:
    limits = configuration.parse("[limits]\nconnections = 100\n")
    told(doctor.open_files((NEED - 16, -1), limits), OK, str(NEED - 16))


def test_locked_memory() -> None:
    told(doctor.locked_memory(-1, GIB), OK, "unlimited")
    told(doctor.locked_memory(GIB, GIB), OK)
    told(doctor.locked_memory(GIB - 1, GIB), WARN, "LimitMEMLOCK=infinity")


@pytest.mark.parametrize(
    ("dram", "groups", "level"),
    [
        (4 * GIB, [], OK),
        (4 * GIB + 1, [], WARN),
        (8 * GIB + 1, [], FAIL),
        (2 * GIB, [3 * GIB, 16 * GIB], OK),
        (4 * GIB, [3 * GIB, 16 * GIB], FAIL),
    ],
)
def test_memory(dram: int, groups: list[int], level: str) -> None:
    told(doctor.memory(MEMINFO, groups, dram), level, "dram.limit")


def test_huge_pages(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "shmem_enabled").write_text("always within_size advise never [deny] force\n")
    told(doctor.huge_pages(True, lambda: True, tmp_path), OK, "enabled madvise", "shmem_enabled deny")
    told(doctor.huge_pages(True, lambda: False, tmp_path), WARN, "shmem_enabled deny", "echo advise >")
    told(doctor.huge_pages(False, lambda: False, tmp_path), OK, "dram.huge_pages is off")
    told(doctor.huge_pages(True, lambda: False, tmp_path / "none"), WARN, "enabled unknown")


def test_socket(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kvstore.sock"
    told(doctor.socket(path), OK, f"{len(str(path))} of at most 107 bytes")
    assert not path.parent.exists()
    there = tmp_path / "there.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        told(doctor.socket(there), OK)
    (tmp_path / "file").touch()
    told(doctor.socket(tmp_path / "file"), FAIL, "is no socket")


def test_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = doctor.direct_io(tmp_path)
    if line.level != OK:
        pytest.skip(f"no direct I/O here: {line.found}")
    told(line, OK, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    real = os.open

    def refused(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(doctor.os, "open", refused)
    told(doctor.direct_io(tmp_path), WARN, "Invalid argument", "ext4 or XFS")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_another_user() -> None:
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    code = (
        "import os, sys; from pathlib import Path; from kvstore.daemon import doctor; os.seteuid(65534)\n"
        "p = Path(sys.argv[1])\n"
        "lines = doctor.direct_io(p), doctor.lock(p), doctor.records(p), doctor.socket(p / 'a.sock')\n"
        "print(*[(line.level, bool(line.advice)) for line in lines], sep='\\n')"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.stdout.splitlines() == ["('fail', True)"] * 4, ran


def test_space(tmp_path: Path) -> None:
    (tmp_path / "slabs").mkdir()
    with (tmp_path / "slabs" / "000000.slab").open("wb") as slab:
        os.posix_fallocate(slab.fileno(), 0, 1 << 20)
    told(doctor.space(tmp_path, 1 << 20, 2 << 20), OK, "1MiB in slabs, 1MiB free")
    told(doctor.space(tmp_path, 1 << 20, (2 << 20) + 8192), FAIL, "lower nvme.limit")


def test_records(tmp_path: Path) -> None:
    told(doctor.records(tmp_path), OK, "none yet")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "data.mdb").write_bytes(bytes(8192))
    told(doctor.records(tmp_path), OK, "8KiB")
    (tmp_path / "records.corrupt-20260102-030405").mkdir()
    line = doctor.records(tmp_path)
    told(line, FAIL, f"delete {tmp_path / 'records.corrupt-20260102-030405'}", "smartctl")


def test_gpu(tmp_path: Path) -> None:
    absent = {"cupy": False, "kvikio": False}
    [none] = doctor.gpu(tmp_path, tmp_path, False, absent)
    told(none, OK, "needs none")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    first, *rest = doctor.gpu(tmp_path, tmp_path, False, absent)
    told(first, OK, "nvidia0, nvidia1")
    assert [(line.name, line.level) for line in rest] == [
        ("libcuda", WARN),
        ("nvidia-fs", WARN),
        ("cupy", WARN),
        ("kvikio", WARN),
    ]
    assert all(line.advice for line in rest)
    (tmp_path / "nvidia-fs").mkdir()
    lines = doctor.gpu(tmp_path, tmp_path, True, dict.fromkeys(absent, True))
    assert {line.level for line in lines} == {OK}


def test_which_way_bytes_go_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.native, "why_no_io_uring", lambda: "")
    assert doctor.engine("no libcuda.so.1", False).found == "posix, with io_uring: no libcuda.so.1"
    monkeypatch.setattr(doctor.native, "why_no_io_uring", lambda: "Operation not permitted")
    refused = doctor.engine("no libcuda.so.1", False).found
    assert refused == "posix, without io_uring (Operation not permitted): no libcuda.so.1"
    assert "compatibility mode: nvidia-fs is not loaded" in doctor.engine("", False).found
    assert "by GPUDirect Storage" in doctor.engine("", True).found


def test_systemd() -> None:
    told(doctor.systemd("systemd 254 (254.5-1)\n+PAM"), OK, "254")
    told(doctor.systemd("systemd 252 (252.38-1~deb12u1)\n+PAM"), WARN, "254 keeps")
    told(doctor.systemd(""), OK, "none")


def test_a_running_daemon_is_named() -> None:
    with LocalDaemon(WITH_NVME) as daemon:
        ran = cli("doctor", "--json", "-c", str(daemon.folder / "kvstore.toml"))
        lines = {line["name"]: line for line in json.loads(ran.stdout)["lines"]}
        assert lines["folder"]["found"].endswith(f"in use by pid {daemon.pid}")
        assert lines["records"]["level"] == OK
        daemon.stop()
        line = doctor.lock(daemon.folder / "nvme")
        told(line, OK, "not in use")
        daemon.start()


def test_exit_codes(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    text = f'[daemon]\nsocket = "{tmp_path}/kvstore.sock"\n[dram]\nlimit = "2MiB"\n'
    text += f'[nvme]\npath = "{folder}"\nlimit = "2MiB"\n'
    fine = cli("doctor", config=text, folder=tmp_path, COLUMNS="250")
    assert fine.returncode == 0, fine.stdout
    assert f"{folder}: no daemon has used it" in fine.stdout
    (folder / "records.corrupt-1").mkdir(parents=True)
    bad = cli("doctor", config=text, folder=tmp_path, COLUMNS="250")
    assert bad.returncode == 1
    assert "moved aside as corrupt: records.corrupt-1" in bad.stdout
    wrong = cli("doctor", config="[dram]\nlimits = 1\n", folder=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean dram.limit?" in wrong.stderr


@pytest.mark.parametrize(
    ("fake", "limit", "level", "said"),
    [
        ({}, "0B", OK, "no pool of GPU memory"),
        ({}, "64MiB", OK, "GPU-01010101-0101-0101-0101-010101010101: 1GiB of 1GiB free, limit 64MiB"),
        ({}, "2GiB", WARN, "there will be no pool on this GPU"),
        ({"driver": "old"}, "64MiB", WARN, "the NVIDIA driver is too old"),
        ({"gpus": 0}, "64MiB", WARN, "no GPU is visible"),
        ({"ipc": "no"}, "64MiB", WARN, "--ipc=host"),
    ],
)
def test_whether_there_can_be_a_pool_of_gpu_memory(
    fake: dict[str, Any], limit: str, level: str, said: str
) -> None:
    with fake_cuda(**fake):
        [line] = doctor.hbm(configuration.parse(f'[hbm]\nlimit = "{limit}"'))
    assert line.name == "hbm"
    told(line, level, said)


def test_doctor_advises_to_install_cupy() -> None:
    [line] = doctor.hbm(configuration.parse('[hbm]\nlimit = "1GiB"'))
    told(line, WARN, "there is no package cupy", "pip install 'kvstore[cuda]'")


@pytest.mark.parametrize(
    ("url", "level", "said"),
    [
        (None, OK, "no network.url"),
        ("file://{}/shared", OK, "filesystem: can be written and read"),
        ("file://{}/absent/shared", FAIL, "mounted"),
        ("gopher://host", FAIL, "names no known system"),
        ("redis://127.0.0.1:1", FAIL, "127.0.0.1:1"),
    ],
)
def test_the_network_tier_is_tried(url: str | None, level: str, said: str, tmp_path: Path) -> None:
    text = "" if url is None else f'[network]\nurl = "{url.format(tmp_path)}"'
    line = doctor.network(configuration.parse(text))
    assert (line.name, line.level) == ("network", level)
    assert said in f"{line.found} {line.advice}"
