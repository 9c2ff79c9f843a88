"""The C extension under the sanitizers of addresses and of undefined behaviour, with random batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.sources import ROOT, SOURCES, copy_of_sources, run

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
BUILD = "from setuptools import setup; setup()"


def sanitizers(folder: Path) -> str:
    """Returns the compiler's run-time libraries of the sanitizers. Skips where it has none."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no compiler: {compiler[0]}")
    (folder / "empty.c").write_text("int main(void) { return 0; }")
    command = [*compiler, *FLAGS.split(), "empty.c", "-o", "empty"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"{compiler[0]} has no sanitizers: {built.stderr.strip()}")
    names = ("libasan.so", "libubsan.so")
    return ":".join(run(*compiler, f"-print-file-name={name}").strip() for name in names)


@pytest.mark.long
def test_random_batches_under_sanitizers(tmp_path: Path) -> None:
    libraries = sanitizers(tmp_path)
    source = copy_of_sources(tmp_path / "source", (*SOURCES, "tests"))
    env = os.environ | {"CFLAGS": f"{FLAGS} -g", "LDFLAGS": FLAGS}
    run(sys.executable, "-c", BUILD, "-q", "build_ext", "--inplace", cwd=source, env=env)
    assert (source / "kvstore/native/_native.abi3.so").exists()
    env = os.environ | {
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "PYTHONMALLOC": "malloc",  # the sanitizer knows where each of its pieces ends
        "PYTHONPATH": str(source),
    }
    said = run(sys.executable, "-m", "tests.native.fuzz", "--seconds", "40", cwd=source, env=env)
    assert "batches on" in said
    checked = [
        "tests/native/test_copies.py",
        "tests/native/test_files.py",
        "tests/native/test_index.py",
        "tests/native/test_io_queue.py",
        "tests/core/blocks/test_index.py",
        "tests/native/test_presence.py",
        "tests/native/test_chains.py",
        "tests/native/test_ghosts.py",
        "tests/native/test_records.py",
        "tests/native/test_slots.py",
    ]
    # That test counts page faults, of which the sanitizers' own memory has some too.
    but = ("-k", "not down_to_the_pages_of_memory")
    run(sys.executable, "-m", "pytest", "-q", *checked, *but, cwd=source, env=env)


def test_random_batches() -> None:
    pytest.importorskip("kvstore.native._native", reason="the C extension was not built")
    run(sys.executable, "-m", "tests.native.fuzz", "--seconds", "3", cwd=ROOT)
