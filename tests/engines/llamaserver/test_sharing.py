"""Which models, settings, programs and tenants share blocks, and which do not."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.environments import folder_of
from tests.engines.gguf_models import BLOCK, tokens, write_model
from tests.engines.llamaserver.build import program
from tests.engines.llamaserver.serving import RUNS_MAIN, alone, proxied, timings
from tests.engines.stores import SETTINGS

PROMPT = tokens(5 * BLOCK + 3)


_EXPECTED: dict[tuple[str, tuple[str, ...]], str] = {}


def expected(model: Path, folder: Path, arguments: tuple[str, ...]) -> str:
    """The answer of llama-server alone."""
    asked = hashlib.sha256(model.read_bytes()).hexdigest(), arguments
    if asked not in _EXPECTED:
        with alone(model, folder, *arguments) as direct:
            _EXPECTED[asked] = direct.text(PROMPT)
    return _EXPECTED[asked]


def cached(model: Path, folder: Path, url: str, *arguments: str, **more: object) -> int:
    """The tokens that a new proxy restores for the prompt; its answer is right."""
    with proxied(model, folder, url, *arguments, **more) as proxy:  # type: ignore[arg-type]
        said = proxy.complete(PROMPT)
        assert said["content"] == expected(model, folder, arguments)
        assert proxy.settled()["failures"] == 0
    return timings(said)[0]


OTHERS = {
    "type of keys": ("-ctk", "q8_0"),
    "flash attention": ("-fa", "off"),
    "rope base": ("--rope-freq-base", "20000"),
    "rope scale": ("--rope-freq-scale", "0.5"),
    "context": ("-c", "1024"),
}


def test_other_settings_share_nothing(models: dict[str, Path], tmp_path: Path, daemon: LocalDaemon) -> None:
    settings = {"none": (), **OTHERS}
    for tokens_found in (0, 80):
        seen = {
            name: cached(models["llama"], tmp_path, daemon.url, *settings[name], options=("--revision", "x"))
            for name in settings
        }
        assert seen == dict.fromkeys(settings, tokens_found)


def test_these_settings_share(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> None:
    assert cached(models["llama"], tmp_path, own_daemon.url) == 0
    settings = ("-b", "64", "-np", "3", "--alias", "other", "-s", "3")
    assert cached(models["llama"], tmp_path, own_daemon.url, *settings) == 80


def test_revisions_and_block_sizes_share_nothing(
    models: dict[str, Path], tmp_path: Path, daemon: LocalDaemon
) -> None:
    def after(*options: str) -> int:
        return cached(models["llama"], tmp_path, daemon.url, options=options)

    assert (after("--revision", "a"), after("--revision", "a"), after("--revision", "b")) == (0, 80, 0)
    sized = ("--revision", "a", "--block-tokens", "32")
    assert (after(*sized), after(*sized)) == (0, 64)


def test_a_file_that_was_replaced_is_another_model(tmp_path: Path, own_daemon: LocalDaemon) -> None:
    """So is another quantisation of a model under the same name."""
    path = tmp_path / "model.gguf"
    seen = []
    for seed in (1, 2, 2, 1):
        path.unlink(missing_ok=True)
        write_model(path, seed=seed)
        seen.append(cached(path, tmp_path, own_daemon.url))
    assert seen == [0, 0, 80, 80]


def test_a_file_that_changes_during_the_start_is_refused(tmp_path: Path, own_daemon: LocalDaemon) -> None:
    """llama-server may have loaded the old one."""
    path = write_model(tmp_path / "model.gguf")
    changes = (
        "import os\n"
        "from kvstore_llamacpp.proxy.llama_server.trial import Trial\n"
        "real = Trial.run\n"
        "async def run(self):\n"
        f"    os.utime({str(path)!r})\n"
        "    return await real(self)\n"
        "Trial.run = run\n"
    )
    with (
        pytest.raises(AssertionError, match="has changed since llama-server started"),
        proxied(path, tmp_path, own_daemon.url, runs=changes + RUNS_MAIN),
    ):
        pass


def test_another_program_shares_nothing(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    """A copy with a byte more is another build: it has the same version, as one from an archive has."""
    other = tmp_path / "llama-server"
    shutil.copy(program(), other)
    with other.open("ab") as file:
        file.write(b"\0")
    assert cached(models["llama"], tmp_path, own_daemon.url) == 0
    assert cached(models["llama"], tmp_path, own_daemon.url, server=other) == 0


def test_another_library_shares_nothing(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    """As of a package of a distribution, whose libraries are elsewhere than the program."""
    [library] = folder_of("llamacpp").glob("lib/python*/site-packages/llama_cpp/lib/libggml-cpu.so")
    other = tmp_path / "libggml-cpu.so.0"
    shutil.copy(library, other)
    with other.open("ab") as file:
        file.write(b"\0")
    starts = tmp_path / "starts"
    starts.write_text(f'#!/bin/sh\nLD_PRELOAD={other} exec {program()} "$@"\n')
    starts.chmod(0o755)
    assert cached(models["llama"], tmp_path, own_daemon.url) == 0
    seen = [cached(models["llama"], tmp_path, own_daemon.url, server=starts) for _ in range(2)]
    assert seen == [0, 80]


TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue"))}


@pytest.fixture
def tenants() -> Iterator[LocalDaemon]:
    sections = {
        name: {"tokens": [{"hash": f"sha256:{hash_of(token).hex()}"}], "dram": {"limit": "64MiB"}}
        for name, token in TOKENS.items()
    }
    with LocalDaemon({**SETTINGS, "tenants": sections}) as served:
        yield served


def test_tenants_share_nothing(models: dict[str, Path], tmp_path: Path, tenants: LocalDaemon) -> None:
    for token in TOKENS.values():
        variables = {"KVSTORE_TOKEN": token}
        seen = [cached(models["llama"], tmp_path, tenants.url, variables=variables) for _ in range(2)]
        assert seen == [0, 80]


def test_a_wrong_token_costs_only_hits(models: dict[str, Path], tmp_path: Path, tenants: LocalDaemon) -> None:
    variables = {"KVSTORE_TOKEN": new_token(b"x" * 32)}
    seen = [cached(models["llama"], tmp_path, tenants.url, variables=variables) for _ in range(2)]
    assert seen == [0, 0]
