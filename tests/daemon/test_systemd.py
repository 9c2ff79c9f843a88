"""What `make install` puts in place, checked by systemd's own tools, without a running systemd."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import config
from tests.programs import need

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
UNITS = (
    *("kvstore.service", "kvstore.socket", "kvstore-admin.service"),
    *("kvstore@.service", "kvstore@.socket", "kvstore-admin@.service"),
)
PRESERVE = ("kvstore.service.d/preserve.conf", "kvstore@.service.d/preserve.conf")


def make(target: str, dest: Path, prefix: Path | str, **variables: object) -> None:
    given = {"DESTDIR": dest, "PREFIX": prefix, "INSTALL_ENV": "no", "PYTHON": sys.executable, **variables}
    command = ["make", "--no-print-directory", target, *(f"{name}={value}" for name, value in given.items())]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of units. Its prefix is real, so that the executable that they name can be there."""
    prefix = tmp_path / "usr"
    make("install", Path("/"), prefix, SYSTEMD_VERSION=252, SYSCONFDIR=tmp_path / "etc")
    command = prefix / "lib" / "kvstore" / "bin" / "kvstore"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return prefix / "lib" / "systemd" / "system"


def analyze(*args: object) -> subprocess.CompletedProcess[str]:
    need("systemd-analyze")
    env = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_LOG_LEVEL": "info"}
    command = ["systemd-analyze", "--no-pager", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_installed_files_are_below_destdir_and_name_final_paths(tmp_path: Path) -> None:
    make("install", tmp_path, "/opt/kv", SYSTEMD_VERSION=254)
    units = {f"opt/kv/lib/systemd/system/{name}" for name in (*UNITS, *PRESERVE)}
    others = {"opt/kv/lib/sysusers.d/kvstore.conf", "opt/kv/lib/tmpfiles.d/kvstore.conf"}
    kept = "etc/kvstore/kvstore.toml"
    commands = ("kvstore", "kvstore-llama-proxy")
    assert files(tmp_path) == units | others | {kept, *(f"opt/kv/bin/{name}" for name in commands)}
    for name in commands:
        assert os.readlink(tmp_path / "opt/kv/bin" / name) == f"/opt/kv/lib/kvstore/bin/{name}"
    for name in (*UNITS, *PRESERVE):
        text = (tmp_path / "opt/kv/lib/systemd/system" / name).read_text()
        assert not re.search(r"@[A-Z]+@", text)
        assert str(tmp_path) not in text
    make("uninstall", tmp_path, "/opt/kv")
    assert files(tmp_path) == {kept}


def test_an_existing_configuration_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "etc" / "kvstore" / "kvstore.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# mine\n")
    make("install", tmp_path, "/usr")
    assert mine.read_text() == "# mine\n"


@pytest.mark.parametrize(("version", "there"), [(253, False), (254, True), (258, True), ("", False)])
def test_descriptors_are_preserved_where_systemd_can(tmp_path: Path, version: object, there: bool) -> None:
    make("install", tmp_path, "/usr", SYSTEMD_VERSION=version)
    for name in PRESERVE:
        assert (tmp_path / "usr/lib/systemd/system" / name).exists() == there


def test_the_configuration_fits_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # the service's user has the same default sockets
    make("install", tmp_path, "/usr")
    text = (tmp_path / "usr/lib/systemd/system/kvstore.service").read_text()
    listens = (tmp_path / "usr/lib/systemd/system/kvstore.socket").read_text()
    loaded = config.load(tmp_path / "etc/kvstore/kvstore.toml")
    assert f"ListenStream={loaded.daemon.socket}\n" in listens
    assert f"SocketMode=0{loaded.daemon.socket_mode:o}\n" in listens
    assert "FileDescriptorName=kvstore\n" in listens
    assert "StateDirectory=kvstore\n" in text
    assert loaded.nvme.path == Path("/var/lib/kvstore")
    assert loaded.daemon.socket.parent == Path("/run/kvstore")
    assert "RuntimeDirectory=kvstore\n" in text
    assert loaded.admin.socket.parent == loaded.daemon.socket.parent
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert timeout
    assert int(timeout[1]) > loaded.daemon.stop_timeout


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_understood(installed: Path, unit: str) -> None:
    ran = analyze("verify", installed / unit)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_unknown_directives_are_reported(installed: Path) -> None:
    # It ends with 0 all the same: only what it says counts.
    unit = installed / "kvstore.service"
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in analyze("verify", unit).stderr


@pytest.mark.parametrize(
    ("unit", "who"),
    [
        ("kvstore.service", "the daemon"),
        ("kvstore@.service", "the daemon"),
        ("kvstore-admin.service", "its interface"),
        ("kvstore-admin@.service", "its interface"),
    ],
)
def test_the_exposure_equals_the_documented_one(installed: Path, unit: str, who: str) -> None:
    if "@" in unit:
        one = unit.replace("@", "@one")
        (installed / one).write_text((installed / unit).read_text())
        unit = one
    ran = analyze("security", "--offline=true", installed / unit)
    level = re.search(r"Overall exposure level for \S+ ([0-9.]+)", ran.stdout)
    assert level, ran.stdout + ran.stderr
    said = re.search(rf"`systemd-analyze security` rates [^;]*{who} ([0-9.]+)", PAGE)
    assert said
    assert float(level[1]) == float(said[1]) <= 2.0


@pytest.mark.parametrize("unit", ["kvstore.service.in", "kvstore-admin.service.in"])
def test_every_restriction_has_its_reason(unit: str) -> None:
    text = (ROOT / "systemd" / unit).read_text()
    restrictions = text[
        text.index("# A dedicated user without other files.") : text.index("[Install]")
    ].splitlines()
    settings = [i for i, line in enumerate(restrictions) if re.match(r"[A-Z]\w*=", line)]
    assert len(settings) > 25
    for i in settings:
        assert re.match(r"# \S.{15}", restrictions[i - 1]), restrictions[i]


def test_user_and_folders_are_made(tmp_path: Path) -> None:
    need("systemd-sysusers")
    need("systemd-tmpfiles")
    make("install", tmp_path, "/usr")
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")

    def run(*command: str) -> None:
        ran = subprocess.run(
            [command[0], f"--root={tmp_path}", *command[1:], "kvstore.conf"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "kvstore.conf:" not in ran.stderr, ran.stderr

    run("systemd-sysusers", "--dry-run")
    if os.geteuid():
        pytest.skip("only root can make users and their folders")
    run("systemd-sysusers")
    user = re.search(
        r"^kvstore:x:(\d+):(\d+):[^:]*:/var/lib/kvstore:", (tmp_path / "etc/passwd").read_text(), re.M
    )
    assert user
    run("systemd-tmpfiles", "--create")
    for path, mode in {"run/kvstore": 0o755, "var/lib/kvstore": 0o700}.items():
        made = (tmp_path / path).stat()
        assert (made.st_uid, made.st_gid) == (int(user[1]), int(user[2]))
        assert stat.S_IMODE(made.st_mode) == mode


def test_memory_and_threads_are_bounded() -> None:
    unit = (ROOT / "systemd" / "kvstore.service.in").read_text()
    assert "\nMemoryMax=" in unit
    assert "\nTasksMax=" in unit
    assert "\nRestart=on-failure" in unit, "what ends by a signal, SIGBUS say, is started again"
