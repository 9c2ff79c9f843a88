"""Runs the tests that need a serving engine, each engine in an environment of its own with pinned versions.

    python tests/engines/environments.py [ENGINE ...] [-- pytest arguments]
    python tests/engines/environments.py --python ENGINE        # makes it, prints its interpreter

Environments are made once, in KVSTORE_ENGINES or ~/.cache/kvstore/engines, under a name that changes with the
pins and the Python version, and are used by every clone: kvstore itself comes from the clone, by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINES = sorted(file.parent.name for file in HERE.glob("*/requirements.txt"))
NONE_SELECTED = 5
_SIDE_BY_SIDE = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
"""By default, files with few tests come last, which are the longest: one process would wait for the other."""
RUNS = {"sglang": (_SIDE_BY_SIDE,), "vllm": ([*_SIDE_BY_SIDE, "-m", "not alone"], ["-m", "alone"])}
"""Options of each run of pytest for an engine. Starting an engine, as tests of vLLM do, takes one core."""


def cache() -> Path:
    """Where environments are kept."""
    own = os.environ.get("KVSTORE_ENGINES")
    return Path(own) if own else Path.home() / ".cache" / "kvstore" / "engines"


def folder_of(engine: str) -> Path:
    """Where an engine's environment is, once it is made."""
    pins = (HERE / engine / "requirements.txt").read_bytes()
    return cache() / f"{engine}-{hashlib.sha256(pins + sys.version.encode()).hexdigest()[:12]}"


def interpreter(engine: str) -> Path:
    """The Python of an engine's environment, which is made if it is not there yet."""
    pins, folder = HERE / engine / "requirements.txt", folder_of(engine)
    python, ready = folder / "bin" / "python", folder / ".ready"
    with _only_one(cache() / f".{folder.name}.lock"):
        if not ready.exists():
            _make(engine, folder, python, pins)
            ready.touch()
        _build(engine, python)
    return python


def _make(engine: str, folder: Path, python: Path, pins: Path) -> None:
    started_s = time.monotonic()
    _say(f"making the {engine} environment in {folder}: some minutes, and gigabytes, once")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Some packages are built from source, which takes all cores for minutes: others go first.
    pip = ["nice", python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "-r", pins]
    with subprocess.Popen([str(part) for part in pip], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("Collecting", "Installing", "Successfully", "Building")):
                _say(f"{time.monotonic() - started_s:4.0f} s  {line.strip():.100}")
    if process.returncode:
        sys.exit(f"cannot install {pins}: pip ended with exit code {process.returncode}")


def _build(engine: str, python: Path) -> None:
    """Builds the program that an engine's tests need, if there is one. Without it they are skipped."""
    if (HERE / engine / "build.py").exists():
        command = [python, "-m", f"tests.engines.{engine}.build"]
        subprocess.run(command, cwd=ROOT, env=environment(engine), check=False)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Two clones may start at the same time: the second waits for the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(engine: str = "") -> dict[str, str]:
    """Environment variables for an engine's interpreter: kvstore and its connectors come from this clone.

    So do stubs of packages that the engine imports and its environment lacks, if there are some.
    """
    folders = [ROOT, ROOT / "connectors", *HERE.glob(f"{engine or '-'}/stubs")]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, folders)), "PYTHONNOUSERSITE": "1"}


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the tests of the engines named, all of them if none is; the worst exit code."""
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, more = arguments[:cut], arguments[cut + 1 :]
    only_path = "--python" in arguments
    engines = [name for name in arguments if name != "--python"] or ENGINES
    for name in engines:
        if name not in ENGINES:
            sys.exit(f"no engine is called {name!r} (there are {', '.join(ENGINES)})")
    for engine in engines:
        python = interpreter(engine)
        if only_path:
            print(python)
    if only_path:
        return 0
    # Those that use one core, two at a time; the longest come last in the alphabet, and start first.
    small = sorted((engine for engine in engines if engine not in RUNS), reverse=True)
    with ThreadPoolExecutor(2) as two:
        codes = list(two.map(lambda engine: _test(engine, more, quiet=len(small) > 1), small))
    codes += [_test(engine, more) for engine in engines if engine in RUNS]
    return max(codes, default=0)


def _test(engine: str, more: list[str], quiet: bool = False) -> int:
    """Runs the tests of one engine. Returns the worst exit code. `quiet`: the output comes at the end."""
    _say(f"testing with {engine}")
    # The conftest of the other tests wants packages that engines do not need; engines warn of themselves.
    options = [f"--confcutdir={HERE}", "-rs", "-Wignore::DeprecationWarning", "-Wignore::FutureWarning"]
    ended = []
    for run in RUNS.get(engine, ([],)):
        command = [interpreter(engine), "-m", "pytest", *options, *run, HERE / engine, *more]
        into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
        ran = subprocess.run(command, cwd=ROOT, env=environment(engine), check=False, text=True, **into)
        if quiet:
            print(f"{engine}:\n{ran.stdout}", flush=True)
        ended.append(ran.returncode)
    # Arguments may select tests of one run only.
    selected = [code for code in ended if code != NONE_SELECTED] if more else ended
    return max(selected or ended)


if __name__ == "__main__":
    sys.exit(main())
