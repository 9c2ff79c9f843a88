"""Builds llama-server once, from the source package of llama-cpp-python, which has llama.cpp in it.

    python -m tests.engines.llamaserver.build

Only the server's own files are compiled: libllama and ggml come from the environment of llama-cpp-python. The
program is kept beside the environments, under a name that changes with that environment and the options here.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.engines.environments import cache, folder_of, interpreter

PACKAGE = "llama-cpp-python==0.3.36"
_OFF = (
    "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL", "LLAMA_ALL_WARNINGS", "MTMD_VIDEO", "BUILD_SHARED_LIBS",
)  # fmt: skip
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG",
    "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=16",
)  # fmt: skip
"""No optimisation, and 16 files at a time: two minutes of one core."""
_PROJECT = """
foreach(name ggml ggml-base ggml-cpu llama)
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION @LIBRARIES@/lib${name}.so)
    target_include_directories(${name} INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/include
                               ${CMAKE_CURRENT_SOURCE_DIR}/ggml/include)
endforeach()
target_link_libraries(ggml INTERFACE ggml-base ggml-cpu)
target_link_libraries(llama INTERFACE ggml)
macro(add_subdirectory folder)
    if(NOT "${folder}" STREQUAL "src")
        _add_subdirectory(${folder} ${ARGN})
    endif()
endmacro()
macro(install)
endmacro()
function(alone target)
    list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER CALL alone llama-common common/json.cpp)
cmake_language(DEFER CALL alone mtmd tools/mtmd/mtmd-helper.cpp tools/mtmd/mtmd-helper-gen.cpp)
"""
"""Runs before llama.cpp's own build files. Three of its files must not be compiled with others."""
_SAY_EVERY_S = 20.0
_LAST_LINES = 20


def program() -> Path:
    """Where llama-server is, once it is built."""
    made_of = repr((PACKAGE, _OFF, _OPTIONS, _PROJECT, folder_of("llamacpp").name, platform.machine()))
    return cache() / f"llama-server-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}" / "llama-server"


def why_not() -> str:
    """Why there is no llama-server; empty if there is one."""
    if program().exists():
        return ""
    reason = _failure()
    return reason.read_text(encoding="utf-8") if reason.exists() else "llama-server was not built"


def _failure() -> Path:
    return program().parent.with_suffix(".failed")


def main() -> int:
    """Builds the program, unless it is there. Prints the progress, and the reason of a failure."""
    if program().exists():
        return 0
    _say(f"building llama-server for {program().parent}: some minutes, once")
    cache().mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".llama-server-", dir=cache()) as folder:
            _build(Path(folder))
            made = Path(folder) / "made"
            made.mkdir()
            shutil.move(Path(folder) / "build/bin/llama-server", made)
            # Another process may have been faster.
            if not program().exists():
                made.rename(program().parent)
    except (OSError, ValueError, subprocess.CalledProcessError, StopIteration) as error:
        reason = f"llama-server cannot be built: {error}"
        _failure().write_text(reason, encoding="utf-8")
        _say(reason)
        return 1
    _failure().unlink(missing_ok=True)
    return 0


def _build(folder: Path) -> None:
    _run("pip", sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
         "--disable-pip-version-check", "--dest", folder, PACKAGE)  # fmt: skip
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "source", filter="data")
    source = next((folder / "source").glob("*/vendor/llama.cpp"))
    [libraries] = interpreter("llamacpp").parents[1].glob("lib/python*/site-packages/llama_cpp/lib")
    project = folder / "project.cmake"
    project.write_text(_PROJECT.replace("@LIBRARIES@", str(libraries)), encoding="utf-8")
    tools = Path(sys.executable).parent
    _run("cmake", tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
         *_OPTIONS, *(f"-D{name}=OFF" for name in _OFF), f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={project}",
         "-S", source, "-B", folder / "build")  # fmt: skip
    _run("ninja", "nice", tools / "ninja", "-C", folder / "build", "llama-server")


def _run(name: str, *command: object) -> None:
    """Runs a step, and prints its last line from time to time."""
    started_s = said_s = time.monotonic()
    lines: list[str] = []
    words = [os.fspath(each) if isinstance(each, Path) else str(each) for each in command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines, line.rstrip()][-_LAST_LINES:]
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                _say(f"{said_s - started_s:4.0f} s  {name}: {line.strip():.90}")
    if process.returncode:
        _say("\n".join(lines))
        raise subprocess.CalledProcessError(process.returncode, name)
    _say(f"{time.monotonic() - started_s:4.0f} s  {name} has ended")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
