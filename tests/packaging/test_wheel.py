"""Source archive and wheel: their contents, and the wheel installed for each Python on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from tests.daemons import eventually
from tests.packaging.sources import MINORS, ROOT, SOURCES, answers, copy_of_sources, run, running

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"{PROJECT['name']}-{PROJECT['version']}"
WHEEL = f"{NAME}-cp311-abi3-linux_{os.uname().machine}.whl"
"""One for every Python from 3.11 on."""
EXTENSION = "kvstore/native/_native.abi3.so"
PRIVATE = (".env", ".venv/lib.py", "tests/test_local.py", "kvstore/__pycache__/old.pyc", "trace.jsonl")
ROUND_TRIP = """
from kvstore import Client, Layout
layout = Layout(model="m", revision="1", dtype="float16", block_tokens=16, block_bytes=4096)
with Client(strict=True) as client:
    namespace = client.namespace(layout)
    assert namespace.put([b"key"], [bytes(range(256)) * 16]).stored == 1
    out = bytearray(2 * 4096)
    assert namespace.get([b"key", b"not"], out) == 1
    assert out[:4096] == bytes(range(256)) * 16
print("the block is the same")
"""


def modules(root: Path) -> set[str]:
    """Returns the files below the packages of a source folder, without notes for developers and byte code."""
    bases = (root / "kvstore", *(root / "connectors").glob("kvstore_*"))
    files = [file.relative_to(base.parent) for base in bases for file in base.rglob("*") if file.is_file()]
    return {path.as_posix() for path in files if path.suffix not in (".md", ".pyc", ".so")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source archive, and of the wheel that is built from this archive."""
    source = copy_of_sources(tmp_path_factory.mktemp("dist"))
    for private in PRIVATE:
        (source / private).parent.mkdir(parents=True, exist_ok=True)
        (source / private).write_text("private")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "out", ".", cwd=source)
    assert sorted(file.name for file in (source / "out").iterdir()) == [
        WHEEL,
        f"{NAME}.tar.gz",
    ]
    return source / "out"


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        files = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        licenses = wheel.read(f"{NAME}.dist-info/licenses/LICENSE").decode()
        metadata = Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())
    assert files == modules(ROOT) | {EXTENSION}
    connectors = (
        "kvstore_llamacpp", "kvstore_lmcache", "kvstore_sglang", "kvstore_transformers", "kvstore_trtllm",
        "kvstore_vllm",
    )  # fmt: skip
    typed = {f"{package}/py.typed" for package in ("kvstore", *connectors)}
    assert files >= typed | {
        "kvstore/admin/page/index.html",
        "kvstore/cuda/kernels.cu",
        "kvstore/native/module.c",
    }
    assert licenses == (ROOT / "LICENSE").read_text()
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def test_the_source_archive_has_what_is_built_from_it_and_nothing_private(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {PurePosixPath(member.name).relative_to(NAME) for member in archive if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"}
    files = {path.as_posix() for path in names if path.parts[0] != "kvstore.egg-info"} - generated
    inside = {path for path in files if path.startswith(("kvstore/", "connectors/"))}
    assert {path.removeprefix("connectors/") for path in inside} == modules(ROOT)
    expected = [ROOT / name for name in SOURCES if name not in ("kvstore", "connectors")]
    folders = [file for path in expected for file in (path.rglob("*") if path.is_dir() else [path])]
    assert files - inside == {
        file.relative_to(ROOT).as_posix() for file in folders if file.is_file() and file.suffix != ".pyc"
    }


def test_every_supported_python_is_a_classifier() -> None:
    listed = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith("Programming")]
    assert listed == ["Only", *(f"3.{minor}" for minor in MINORS)]
    assert PROJECT["requires-python"] == f">=3.{MINORS[0]}"


# -- installed


def pythons() -> dict[str, str]:
    """Returns an interpreter by version, from PATH and pyenv. The running one stands for its version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("versions/*/bin"), reverse=True)]
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for version in (f"3.{minor}" for minor in MINORS):
        for candidate in (folder / f"python{version}" for folder in folders):
            if version not in found and candidate.is_file() and _has_venv(candidate):
                found[version] = str(candidate)
    return found


def _has_venv(python: Path) -> bool:
    """Whether a file is an interpreter, not a script that selects one, and can make environments."""
    if python.read_bytes()[:2] == b"#!":
        return False
    command = [python, "-c", "import venv, ensurepip"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


PYTHONS = pythons()


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it depends on, without extras."""
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    run(PYTHONS[request.param], "-m", "venv", str(folder / "venv"))
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", str(dist / WHEEL))
    run(*pip, "check")
    return folder / "venv/bin"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder outside the clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_compiler_the_extension_is_left_out(tmp_path: Path) -> None:
    source = copy_of_sources(tmp_path)
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "out", "."),
        cwd=source,
        env=os.environ | {"CC": "/nonexistent/cc"},
    )
    [wheel] = (source / "out").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) >= modules(ROOT)
        assert EXTENSION not in archive.namelist()


@pytest.mark.parametrize("cc", ["", "/nonexistent/cc"], ids=["compiler", "no compiler"])
def test_an_editable_install_has_the_extension_if_there_is_a_compiler(tmp_path: Path, cc: str) -> None:
    source = copy_of_sources(tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--ignore-installed", "--prefix", str(tmp_path / "prefix")]
    run(*pip, *options, "--editable", ".", cwd=source, env=os.environ | ({"CC": cc} if cc else {}))
    assert (source / EXTENSION).exists() == (not cc)
    script = "from kvstore import native; print(native.__file__, native.IMPLEMENTATION)"
    ran = run(sys.executable, "-c", script, cwd=source)
    assert str(source) in ran
    assert ("numpy and xxhash" in ran) == bool(cc)


@pytest.mark.long
def test_the_help_and_the_demo_run_from_the_wheel(installed: Path, nowhere: Path) -> None:
    kvstore = str(installed / "kvstore")
    assert "demo" in run(kvstore, "--help", env={})
    assert "[dram]" in run(kvstore, "config", "example", env={})
    assert "DRAM" in run(kvstore, "demo", env={})
    assert list(nowhere.iterdir()) == []


@pytest.mark.long
def test_a_block_comes_back_through_a_daemon_from_the_wheel(installed: Path, nowhere: Path) -> None:
    url = f"unix://{nowhere}/kvstore.sock"
    file = nowhere / "kvstore.toml"
    file.write_text(f'[daemon]\nsocket = "{nowhere}/kvstore.sock"\n[dram]\nlimit = "16MiB"\n')
    with running(str(installed / "kvstore"), "serve", "-c", str(file), env={}):
        eventually(lambda: answers(url), 30)
        command = [str(installed / "python"), "-W", "error", "-c", ROUND_TRIP]
        assert "the block is the same" in run(*command, env={"KVSTORE_SOCKET": url})


@pytest.mark.long
def test_every_module_of_the_wheel_imports_without_extras(installed: Path, nowhere: Path) -> None:
    names = [path.removesuffix(".py").replace("/", ".") for path in modules(ROOT) if path.endswith(".py")]
    ours = [name for name in names if name.startswith("kvstore.") and not name.endswith("__main__")]
    script = f"import importlib\nfor name in {sorted(ours)}: importlib.import_module(name)"
    run(str(installed / "python"), "-W", "error", "-c", script, env={})
