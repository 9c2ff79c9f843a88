"""What is built for others: wheel, image, manual pages, Debian package; installed and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvstore import Client, Tier, config
from kvstore.cli import app
from kvstore.socket_paths import default_folder
from tests.daemons import eventually, got, idle, names, new_layout, payloads, tier
from tests.packaging.machine import Machine, can_be_made
from tests.packaging.manifests import CONTAINERS
from tests.packaging.recipe import RECIPE
from tests.packaging.sources import ROOT, answers, copy_of_sources, run, running
from tests.programs import need, need_debian_python

# -- image


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the image's root, in which the first stage has run as written, but for where that is."""
    root = tmp_path_factory.mktemp("image")
    for copied in RECIPE.of(RECIPE.build, "COPY"):
        *sources, _ = copied.split()
        copy_of_sources(root / "source", tuple(sources))
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(sys.executable)
    [_, script] = RECIPE.of(RECIPE.build, "RUN")  # the first installs a compiler
    script = re.sub(r"(?<=\s)/(opt|dist)\b", rf"{root}/\1", script)
    env = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}"}
    run("sh", "-ec", script, env=env, cwd=root / "source")
    return root


@pytest.fixture
def clean(image: Path) -> dict[str, str]:
    """An environment with nothing in it but a PATH."""
    return {"PATH": f"{image}/opt/kvstore/bin:/usr/bin:/bin"}


def site(folder: Path, **daemon: str) -> tuple[Path, str]:
    """A configuration in a folder, and the URL of its daemon."""
    file = folder / "kvstore.toml"
    file.write_text(
        f'[daemon]\nsocket = "{folder}/kvstore.sock"\n[dram]\nlimit = "16MiB"\n'
        f'[nvme]\npath = "{folder}/nvme"\nlimit = "64MiB"\n[admin]\nsocket = "{folder}/admin.sock"\n'
    )
    return file, f"unix://{folder}/kvstore.sock"


@pytest.mark.long
def test_the_wheel_serves_from_a_clean_environment(
    image: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    file, url = site(tmp_path)
    [entry], [given] = RECIPE.of(RECIPE.final, "ENTRYPOINT"), RECIPE.of(RECIPE.final, "CMD")
    serve = [*yaml.safe_load(entry), *yaml.safe_load(given)]
    assert serve == ["kvstore", "serve", "-c", "/etc/kvstore/kvstore.toml"]
    kvstore = str(image / "opt/kvstore/bin/kvstore")
    with running(kvstore, *serve[1:-1], str(file), env=clean):
        eventually(lambda: answers(url), 30)
        assert '"pid"' in run(kvstore, "status", "--socket", url, "--json", env=clean)
        with running(kvstore, "admin", "-c", str(file), env=clean):
            for probe in ("readinessProbe", "livenessProbe"):
                command = [
                    part.replace("/run/operators", str(tmp_path))
                    for part in CONTAINERS["admin"][probe]["exec"]["command"]
                ]
                eventually(lambda command=command: subprocess.run(command, check=False).returncode == 0, 30)
    python = str(image / "opt/kvstore/bin/python")
    for absent in ("pytest", "matplotlib", "ruff", "pip"):
        assert subprocess.run([python, "-c", f"import {absent}"], check=False, stderr=-3).returncode == 1, (
            absent
        )


def test_the_image_has_its_own_user_and_copies_existing_files() -> None:
    assert RECIPE.of(RECIPE.final, "USER") == ["10001:10001"]
    assert "useradd --uid 10001 --gid 10001" in " ".join(RECIPE.of(RECIPE.final, "RUN"))
    for copied in RECIPE.of(RECIPE.build, "COPY") + RECIPE.of(RECIPE.final, "COPY"):
        *sources, _ = [part for part in copied.split() if not part.startswith("--from")]
        for source in sources:
            assert source == "/opt/kvstore" or (ROOT / source).exists(), source
    # Both stages have the same interpreter, or the environment would not run in the second.
    assert len({image.split()[0] for image in RECIPE.of(RECIPE.steps, "FROM")}) == 1
    assert RECIPE.of(RECIPE.final, "ENV")[0].startswith("PATH=/opt/kvstore/bin:")


@pytest.mark.long
def test_pipx_installs_the_wheel(image: Path, tmp_path: Path) -> None:
    [wheel] = (image / "dist").glob("kvstore-*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "pipx"))
    python = str(tmp_path / "pipx/bin/python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "pipx")
    homes = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    run(python, "-m", "pipx", "install", str(wheel), env={**os.environ, **homes})
    printed = run(str(tmp_path / "bin/kvstore"), "config", "example", env={"PATH": "/usr/bin:/bin"})
    assert printed == config.example(default_folder())


def test_versions_with_known_holes_are_excluded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = {name: floor for name, _, floor in (entry.partition(">=") for entry in project["dependencies"])}
    for name, floor in {"h11": (0, 16), "starlette": (0, 49, 1)}.items():
        assert tuple(map(int, floors[name].split("."))) >= floor, name


# -- manual pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each page as it is read, and that nothing in it makes groff complain."""
    need("groff")
    folder = tmp_path_factory.mktemp("man")
    run(sys.executable, str(ROOT / "packaging/man.py"), str(folder))
    shown = {}
    for page in folder.rglob("kvstore*"):
        command = ["groff", "-man", "-ww", "-Tutf8", "-Kutf8", "-P-cbou", "-rLL=200n", str(page)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stderr) == (0, ""), page.name
        shown[page.name] = ran.stdout
    return shown


def leaves(command: Any, path: str = "kvstore") -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, f"{path} {name}")
    if not getattr(command, "commands", {}):
        yield path, command


def test_the_manual_has_every_command_with_every_option(pages: dict[str, str]) -> None:
    found = dict(re.findall(r"^   (kvstore [a-z -]+)\n(.*?)(?=^   \S|^\S)", pages["kvstore.1"], re.M | re.S))
    expected = dict(leaves(get_command(app)))
    assert set(found) == set(expected)
    for path, command in expected.items():
        for param in command.params:
            if param.param_type_name == "option" and param.name != "help":
                for name in param.opts:
                    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", found[path]), (path, name)


def test_the_manual_has_the_whole_configuration(pages: dict[str, str]) -> None:
    page = pages["kvstore.toml.5"]
    lines = [line.strip() for line in page.splitlines()]
    for line in config.example().splitlines():
        assert line.strip() in lines
    for section in config.Config.model_fields:
        assert re.search(rf"^ +\[{section}(\.NAME)?\]", page, re.MULTILINE), section


# -- Debian package


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package, and the same as the next version of itself."""
    need("dpkg-deb")
    need_debian_python()
    folder = tmp_path_factory.mktemp("deb")
    source = copy_of_sources(folder / "source-of-it")
    traces = folder / "made-in-here"
    traces.mkdir()
    run("make", "deb", env={**os.environ, "TMPDIR": str(traces)}, cwd=source)
    assert not list(traces.iterdir())
    [built] = (source / "dist").glob("kvstore_*.deb")
    tree = folder / "tree"
    run("dpkg-deb", "--raw-extract", str(built), str(tree))
    for file in (tree / "DEBIAN/control", *tree.glob("usr/lib/kvstore/lib/*/*/kvstore-*.dist-info/METADATA")):
        file.write_text(re.sub(r"^Version: .*$", "Version: 99.0", file.read_text(), flags=re.MULTILINE))
    command = ["dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "--build", str(tree)]
    run(*command, str(folder / "next.deb"))
    return built, folder / "next.deb"


@pytest.mark.long
def test_the_package_names_nothing_of_where_it_was_made(packages: tuple[Path, Path]) -> None:
    tree = packages[1].parent / "tree"
    for file in tree.rglob("*"):
        if file.is_symlink():
            assert "made-in-here" not in os.readlink(file), file
        elif file.is_file():
            data = file.read_bytes()
            assert b"made-in-here" not in data, file
            assert b"source-of-it" not in data, file
    assert "home = /usr/bin\n" in (tree / "usr/lib/kvstore/pyvenv.cfg").read_text()


@pytest.mark.long
def test_the_package_has_completion_for_shells(packages: tuple[Path, Path]) -> None:
    share = packages[1].parent / "tree" / "usr/share"
    script = f"source {share}/bash-completion/completions/kvstore; complete -p kvstore"
    assert "_kvstore_completion kvstore" in run("bash", "-c", script)
    assert (share / "zsh/vendor-completions/_kvstore").read_text().lstrip().startswith("#compdef kvstore")
    assert "--command kvstore" in (share / "fish/vendor_completions.d/kvstore.fish").read_text()


@pytest.mark.long
def test_the_package_depends_on_linked_libraries(packages: tuple[Path, Path]) -> None:
    [depends] = re.findall(r"^ Depends: (.*)$", run("dpkg-deb", "--info", str(packages[0])), re.MULTILINE)
    named = {part.split()[0] for part in re.split(r"[,|]", depends)}
    tree = packages[1].parent / "tree"
    linked = run("ldd", *map(str, tree.glob("usr/lib/kvstore/lib/**/*.so")))
    assert "not found" not in linked
    libraries = set(re.findall(r"^\t\S+ => (/\S+)", linked, re.MULTILINE))
    system = sorted(path for path in libraries if not path.startswith(str(tree)))
    assert any("libc.so" in path for path in system)
    merged = [path if path.startswith("/usr") else f"/usr{path}" for path in system]
    for path, other in zip(system, merged, strict=True):
        owner = subprocess.run(
            ["dpkg", "-S", path, other], capture_output=True, text=True, check=False
        ).stdout
        assert {line.split(":")[0] for line in owner.splitlines()} & named, path


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[Path], Machine]]:
    """Makes a machine on which a package is installed."""
    if why := can_be_made():
        pytest.skip(why)
    made = Machine(tmp_path / "machine")

    def install(package: Path) -> Machine:
        shutil.copy(package, made.path("/kvstore.deb"))
        made.run("dpkg", "--install", "/kvstore.deb")
        return made

    try:
        yield install
    finally:
        made.close()


@pytest.mark.long
def test_an_upgrade_keeps_the_cache_and_only_a_purge_takes_it(
    machine: Callable[[Path], Machine], packages: tuple[Path, Path]
) -> None:
    there = machine(packages[0])
    assert there.asked_of_systemd() == ["daemon-reload", *there_restarts()]
    assert re.match(r"kvstore:x:\d+:\d+:", there.run("getent", "passwd", "kvstore"))
    assert there.run("stat", "--format=%U %a", "/var/lib/kvstore") == "kvstore 700\n"
    for unit in ("kvstore.service", "kvstore.socket", "kvstore-admin.service", "kvstore@.service"):
        assert there.run("systemd-analyze", "--no-pager", "verify", f"/usr/lib/systemd/system/{unit}") == ""
    assert there.run("kvstore", "config", "check", "/etc/kvstore/kvstore.toml")
    mine = (
        '[dram]\nlimit = "16MiB"\n[nvme]\npath = "/var/lib/kvstore"\nlimit = "64MiB"\n'
        '[policy]\neviction = "lru"\n[scrub]\nrate = 0\n'
    )
    there.path("/etc/kvstore/kvstore.toml").write_text(mine)
    url = f"unix://{there.path('/run/kvstore/kvstore.sock')}"
    there.run("install", "-d", "-o", "kvstore", "/run/kvstore")
    as_user = ["setpriv", "--reuid=kvstore", "--regid=kvstore", "--init-groups"]
    supervise = there.command(*as_user, "kvstore", "supervise", "-c", "/etc/kvstore/kvstore.toml")
    layout, keys = new_layout(), names(40)

    with running(*supervise) as supervisor:
        before = eventually(lambda: answers(url), 30)
        there.path("/supervisor.pid").write_text(str(supervisor.pid))
        with Client(url) as client:
            assert client.namespace(layout).put(keys, payloads(keys)).stored == 40
            eventually(lambda: tier(s := client.status(), "nvme")["blocks"] == 40 and idle(s))
        machine(packages[1])
        assert there.asked_of_systemd() == ["daemon-reload", *there_restarts()]
        assert there.path("/etc/kvstore/kvstore.toml").read_text() == mine
        after = eventually(lambda: answers(url, before["pid"]), 30)
        assert (before["version"], after["version"]) == (
            packages[0].name.split("_")[1], "99.0"
        )  # fmt: skip
        assert (tier(after, "dram")["blocks"], tier(after, "nvme")["blocks"]) == (40, 40)
        with Client(url) as client:
            ns = client.namespace(layout)
            with ns.acquire(keys) as lease:
                assert set(lease.tiers) == {Tier.DRAM}
            assert got(ns, keys) == 40

    with running(*supervise):
        status = eventually(lambda: answers(url), 30)
        assert (tier(status, "dram")["blocks"], tier(status, "nvme")["blocks"]) == (0, 40)
        with Client(url) as client:
            assert got(client.namespace(layout), keys) == 40

    there.run("dpkg", "--remove", "kvstore")
    assert "disable --now kvstore-admin.service kvstore.service kvstore.socket" in there.asked_of_systemd()
    assert not there.path("/usr/lib/kvstore").exists()
    assert there.path("/etc/kvstore/kvstore.toml").read_text() == mine
    assert len(list(there.path("/var/lib/kvstore/slabs").iterdir())) == 8
    there.run("dpkg", "--purge", "kvstore")
    assert not there.path("/var/lib/kvstore").exists()
    assert not there.path("/etc/kvstore").exists()


def there_restarts() -> list[str]:
    units = "kvstore.service kvstore@*.service kvstore-admin.service kvstore-admin@*.service"
    return [f"try-restart {units}"]
