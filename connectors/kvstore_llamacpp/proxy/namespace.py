"""Builds the namespace of a llama-server: weights, form of its state, options, program, processor."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvstore import Layout, files_digest, newest_file
from kvstore.errors import ConfigError, MisuseError, UnavailableError
from kvstore_llamacpp.proxy.llama_server.gguf_header import architecture_of
from kvstore_llamacpp.proxy.llama_server.options import ServerOptions
from kvstore_llamacpp.state import StateForm

SERVED_MODELS = ("llama", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Architectures, as GGUF files name them, whose slot files have all of their KV. All are tested."""

_WINDOWS = ("gemma2", "gemma3", "gpt-oss")
_PROGRAM_TIMEOUT_S = 60.0
_FILE = re.compile(r"llama(-server)?( |$)|lib(llama|ggml|mtmd).*\.so")
"""Files of llama.cpp in a process: the program, and libraries."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model's file as it was before llama-server opened it."""

    path: Path
    changed_ns: int


def check_model(options: ServerOptions, revision: str | None) -> ModelFile:
    """Returns the file of a model that is served. Raises MisuseError, or ConfigError if it cannot be read."""
    architecture = architecture_of(options.model)
    if architecture in _WINDOWS:
        raise MisuseError(
            f"{architecture} has sliding windows",
            "a slot file lacks the tokens outside: run without the proxy",
        )
    if architecture not in SERVED_MODELS:
        raise MisuseError(
            f"the architecture {architecture} is not tested", f"served are {', '.join(SERVED_MODELS)}"
        )
    parts = options.model.stem.rpartition("-of-")
    if parts[1] and parts[2].isdigit() and int(parts[2]) > 1 and revision is None:
        raise MisuseError(f"the weights of {options.model} are in several files", "name them with --revision")
    return ModelFile(options.model, newest_file(options.model)[1])


def check_configuration(variables: Mapping[str, str]) -> None:
    """Refuses files from which llama-server takes options beside its arguments. Raises MisuseError."""
    home = variables.get("XDG_CONFIG_HOME") or f"{variables.get('HOME', '')}/.config"
    for file in (Path("/etc/llama.cpp/config.ini"), Path(home) / "llama.cpp/config.ini"):
        if file.exists():
            raise MisuseError(f"{file} has options of llama-server", "move them to its command line")


def layout_of(
    options: ServerOptions,
    model: ModelFile,
    form: StateForm,
    program: str,
    cells: int,
    block_tokens: int,
    revision: str | None,
) -> Layout:
    """Returns the layout of a server's blocks. `program`: see `program_identity`; `cells`: its context.

    Raises MisuseError if the model's file has changed since llama-server started, or a block is too large.
    """
    if revision is None:
        found = files_digest(model.path)
        if found.changed_ns != model.changed_ns:
            raise MisuseError(f"{model.path} has changed since llama-server started", "start again")
        revision = f"blake3:{found.hexdigest}"
    # Some models have other RoPE frequencies in a longer context, which may follow from free memory.
    settings = repr((options.counted, cells, program, _processor(), repr(form)))
    return Layout(
        model=options.model.name,
        revision=revision,
        dtype=", ".join(form.dtypes),
        block_tokens=block_tokens,
        block_bytes=block_tokens * form.token_bytes,
        kv_layout="llama-server, state 3, tensor, column, token; "
        f"settings {blake3(settings.encode()).hexdigest(16)}",
    )


def program_identity(options: ServerOptions, pid: int) -> str:
    """Returns what names the build of a running llama-server and its devices.

    A build from an archive has no version: the content of the program and of its libraries counts. Raises
    MisuseError if a wrapper runs instead, or a file was replaced, and ConfigError if the program fails.
    """
    program = Path(options.program)
    contents = [files_digest(file).hexdigest for file in _program_files(program, pid)]
    said = [_output(program, "--version"), *_devices(_output(program, "--list-devices"))]
    return repr((contents, said))


def _program_files(program: Path, pid: int) -> list[Path]:
    """Returns the files of llama.cpp that a process runs, sorted."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        running = os.readlink(f"/proc/{pid}/exe")
    except OSError as error:
        raise UnavailableError(f"llama-server has ended: {error}", "its own output has the reason") from error
    # A line has six columns, of which the last is a path.
    names = {columns[5] for line in mapped if len(columns := line.split(maxsplit=5)) == 6}
    found = {name for name in names if _FILE.match(name.rpartition("/")[2])}
    if not found:
        raise MisuseError(
            f"{program} does not run llama.cpp in its own process",
            "give the program, or a script that ends in exec",
        )
    files = sorted({running, *found})
    if gone := [name for name in files if name.endswith(" (deleted)")]:
        raise MisuseError(f"{gone[0]}: replaced since llama-server started", "start again")
    return [Path(name) for name in files]


def _output(program: Path, argument: str) -> str:
    try:
        ran = subprocess.run(
            [program, argument],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROGRAM_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{program} {argument} fails: {error}", "check the program behind --") from error
    return ran.stdout + ran.stderr


def _devices(said: str) -> Iterator[str]:
    """Yields the devices without their free memory."""
    for line in said.splitlines():
        name, _, rest = line.strip().partition(": ")
        if rest.endswith("free)"):
            yield f"{name}: {rest.rpartition(' (')[0]}"


def _processor() -> str:
    """Returns the instruction sets, which select kernels."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {' '.join(sorted(flags.partition(':')[2].split()))}"
