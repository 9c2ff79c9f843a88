"""`python -m kvstore_vllm check` tells before the start what an engine with the connector then does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tier_sizes import how_often
from kvstore_vllm import check as checks
from kvstore_vllm.check import Report, check, configuration
from kvstore_vllm.dry_engine import derive
from tests.daemons import eventually
from tests.engines.vllm.engine import Engine, connector, prompt
from tests.engines.vllm.shapes import SHAPES

GIB = 1 << 30
KV_BYTES = 64 << 20
"""The KV memory of a worker of the tests' engines."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (
        "llama", "interleaved windows", "sinks", "chunks", "linear attention", "short convolutions", "latent",
        "encoder and decoder", "bidirectional", "two block sizes and shared KV",
    )  # fmt: skip
    return {name: SHAPES[name].save(tmp_path_factory.mktemp("shape")) for name in names}


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Engine]:
    """A process whose engine the tests replace."""
    with Engine(model) as engine:
        yield engine


def options(name: str, shards: int = 1) -> dict[str, Any]:
    """The options of an engine with a shape."""
    more = {"tensor_parallel_size": shards, "distributed_executor_backend": "mp"} if shards > 1 else {}
    return {"dtype": "float32", "max_model_len": 2048, "block_size": 32, **SHAPES[name].engine, **more}


def flags(name: str, shards: int = 1) -> list[str]:
    """The same options as arguments of a command."""
    given = options(name, shards).items()
    return [part for key, value in given for part in (f"--{key.replace('_', '-')}", str(value))]


def report_of(folder: Path, name: str, *more: str, shards: int = 1) -> Report:
    return check(configuration(str(folder), [*flags(name, shards), *more]), GIB, 4 * GIB)


@pytest.mark.parametrize(
    "name",
    ["llama", "interleaved windows", "sinks", "chunks", "linear attention", "short convolutions", "latent",
     "two block sizes and shared KV"],
)  # fmt: skip
def test_groups_are_those_of_an_engine(process: Engine, folders: dict[str, Path], name: str) -> None:
    """An engine without the connector, so that refused models start as well."""
    process.restart(model=str(folders[name]), **options(name))
    assert_groups(process, folders[name], name)


def assert_groups(engine: Engine, folder: Path, name: str, shards: int = 1) -> None:
    decided = engine("kv_cache_config")
    found = derive(configuration(str(folder), flags(name, shards)))
    groups = found.kv_cache_config.kv_cache_groups
    assert [[list(each.layer_names), repr(each.kv_cache_spec)] for each in groups] == decided["groups"]
    assert found.kv_cache_config.cache_hit_alignment_tokens == decided["alignment_tokens"]
    [stage] = found.stages
    assert (stage.page_bytes, KV_BYTES // stage.page_bytes) == (decided["page_bytes"], decided["blocks"])


@pytest.mark.parametrize(
    "name", ["llama", "interleaved windows", "chunks", "linear attention", "two block sizes and shared KV"]
)
def test_a_prompt_is_stored_in_the_blocks_that_the_check_tells(
    process: Engine, folders: dict[str, Path], name: str
) -> None:
    with LocalDaemon({"dram": {"limit": "128MiB", "huge_pages": False}}) as own:
        named = connector(own, weights_revision="of this test")
        process.restart(model=str(folders[name]), **options(name), **named)
        assert_stored(process, own, folders[name], name)


def assert_stored(engine: Engine, own: LocalDaemon, folder: Path, name: str, shards: int = 1) -> None:
    report = report_of(folder, name, shards=shards)
    assert report.served, report.refusals
    asked, blocks = report.prompts[0], sum(report.prompts[0].blocks) * shards
    assert asked.tokens == 1024
    engine.generate([prompt(900, 1024)], max_tokens=1)
    with Client(own.url, deadline_s=10.0) as client:
        eventually(lambda: client.status()["blocks"] >= blocks)
        assert client.status()["blocks"] == blocks
        stored = [each["block_bytes"] for each in client.control("namespaces")["namespaces"]]
    assert sorted(stored) == sorted(each for group in report.groups for each in group.shard_bytes * shards)


def test_each_shard_has_the_bytes_that_the_check_tells(folders: dict[str, Path]) -> None:
    name, shards = "interleaved windows", 2
    with LocalDaemon({"dram": {"limit": "128MiB", "huge_pages": False}}) as own:
        named = connector(own, weights_revision="of this test")
        with Engine(folders[name], **options(name, shards), **named) as engine:
            assert_groups(engine, folders[name], name, shards)
            assert_stored(engine, own, folders[name], name, shards)


def test_numbers_add_up(folders: dict[str, Path]) -> None:
    report = report_of(folders["interleaved windows"], "interleaved windows", shards=2)
    window, full = report.groups
    assert [(each.kind, each.layers, each.window_tokens) for each in report.groups] == [
        ("sliding window", 2, 64),
        ("full attention", 2, 0),
    ]
    # Keys and values of 2 layers in 2 heads (1 a shard) of 32 values, in float32.
    assert (window.token_bytes, full.token_bytes) == (2 * 2 * 2 * 32 * 4,) * 2
    assert (full.block_bytes, full.shard_bytes) == (32 * full.token_bytes, [16 * full.token_bytes])
    short, long = report.prompts
    # Two blocks before each of its two ends, and all of full attention.
    assert (short.tokens, short.blocks, long.tokens, long.blocks) == (1024, [3, 32], 2048, [3, 64])
    assert short.stored_bytes == 3 * window.block_bytes + 32 * full.block_bytes
    blocks = {window.shard_bytes[0]: 2 * (3 + 32)}
    assert (short.dram, short.nvme) == (how_often(blocks, GIB, True), how_often(blocks, 4 * GIB, False))
    assert short.nvme == 4 * GIB // short.stored_bytes


def test_states_have_no_bytes_a_token(folders: dict[str, Path]) -> None:
    report = report_of(folders["linear attention"], "linear attention")
    state, full = report.groups
    assert (state.kind, state.layers, state.token_bytes, full.kind) == (
        "recurrent state",
        2,
        0,
        "full attention",
    )
    assert state.block_tokens == full.block_tokens == report.alignment_tokens
    assert report.prompts[0].blocks == [1, 1024 // full.block_tokens]


def test_stages_of_a_pipeline_are_added(folders: dict[str, Path]) -> None:
    whole = report_of(folders["llama"], "llama")
    parts = report_of(folders["llama"], "llama", "--pipeline-parallel-size", "2")
    assert [each.layers for each in parts.groups] == [each.layers for each in whole.groups]
    assert parts.groups[0].shard_bytes == [whole.groups[0].block_bytes // 2] * 2
    assert parts.prompts[0].stored_bytes == whole.prompts[0].stored_bytes


@pytest.mark.parametrize(
    ("name", "more", "reasons"),
    [
        ("latent", [], ["prefix caching is off"]),
        ("encoder and decoder", ["--max-model-len", "448"], ["has an encoder"]),
        ("bidirectional", ["--max-model-len", "512", "--runner", "pooling"], ["has a pooler"]),
        ("llama", ["--no-enable-prefix-caching"], ["prefix caching is off"]),
        (
            "linear attention",
            ["--no-enable-prefix-caching"],
            ["mamba_cache_mode 'none'", "prefix caching is off"],
        ),
        (
            "interleaved windows",
            ["--kv-transfer-config", '{"kv_connector": "KVStoreConnector", '
             '"kv_connector_module_path": "kvstore_vllm", "kv_role": "kv_both", '
             '"kv_connector_extra_config": {"block_tokens": 64}}'],
            ["kv_load_failure_policy is 'fail'", "block_tokens is 64, and "],
        ),
        (
            "llama",
            ["--kv-transfer-config", '{"kv_connector": "KVStoreConnector", '
             '"kv_connector_module_path": "kvstore_vllm", "kv_role": "kv_producer", '
             '"kv_connector_extra_config": {"blok_tokens": 64}}'],
            ["unknown key 'blok_tokens'"],
        ),
    ],
)  # fmt: skip
def test_refused_engines_are_told_every_reason(
    folders: dict[str, Path], name: str, more: list[str], reasons: list[str]
) -> None:
    report = report_of(folders[name], name, *more)
    assert not report.served
    assert not report.prompts
    assert len(report.refusals) == len(reasons)
    for (reason, hint), expected in zip(report.refusals, reasons, strict=True):
        assert expected in reason
        assert hint


def test_a_block_that_is_too_large_is_refused(folders: dict[str, Path]) -> None:
    config = {**checks.CONNECTOR, "kv_connector_extra_config": {"block_tokens": 1 << 15}}
    report = report_of(folders["llama"], "llama", "--kv-transfer-config", json.dumps(config))
    assert [reason for reason, _ in report.refusals] == [f"layout.block_bytes is {(1 << 15) * 4096}"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["/no/such/folder"], "no model '/no/such/folder'.*HF_HUB_OFFLINE=0"),
        (["someone/some-model"], "no model 'someone/some-model'.*not in the hub's cache"),
        (["{empty}"], "the folder .* has no config.json"),
        (["{llama}", "-tp", "3"], "vLLM refuses .*divisible by tensor parallel size"),
        (["{llama}", "--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'],
         "has the connector ExampleConnector.*KVStoreConnector of kvstore_vllm"),
    ],
)  # fmt: skip
def test_what_vllm_cannot_start_is_an_error(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, *rest = (each.format_map({"empty": tmp_path, "llama": folders["llama"]}) if each[0] == "{" and
                    "kv_connector" not in each else each for each in arguments)  # fmt: skip
    with pytest.raises(MisuseError, match=f"(?s){why}"):
        configuration(model, rest)


def test_a_machine_without_a_device_of_vllm_is_told(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.current_platform, "device_type", "")
    with pytest.raises(MisuseError, match=r"no device on this machine.*on the engine's machine"):
        configuration(str(folders["llama"]), [])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["check", "m", "--dram", "12x"], "error: --dram: '12x' is not a size\nhint: .*64GiB"),
        (["check", "m", "--nvme", "0"], "error: --nvme: '0' is nothing\nhint: a size such as 64GiB"),
        (["check", "--dtype", "m"], "error: --dtype comes before the model\nhint: check MODEL"),
        (["check"], "required: MODEL"),
        ([], "required: check"),
    ],
)
def test_bad_arguments_are_errors_before_vllm_is_imported(arguments: list[str], why: str) -> None:
    code = (
        "import sys\nfrom kvstore_vllm.__main__ import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as ended: code = ended.code\n"
        "print(code, 'vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "2 False\n"
    assert re.search(why, done.stderr)


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore_vllm", "check", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HF_"))}
        | (environment or {}),
    )


TABLES = """\
model   {folder} (Gemma3ForCausalLM, float32)
shards  2 tensor-parallel x 1 pipeline
result  served

group  kind            layers  window  block tokens  block  block a shard  a token
0      sliding window       2      64            32  32KiB          16KiB     1KiB
1      full attention       2       -            32  32KiB          16KiB     1KiB
all                         4                                                 2KiB

vLLM has 65,536 blocks per GiB of a worker's KV memory. A prefix ends at a multiple of 32 tokens.

prompt  stored  in 64GiB DRAM  in 2TiB NVMe
 1,024  1.1MiB         59,223     1,917,396
 2,048  2.1MiB         30,937     1,001,624

settings
  --kv-transfer-config '{settings}'
"""


def test_the_command_prints_aligned_tables(folders: dict[str, Path]) -> None:
    folder = folders["interleaved windows"]
    done = command(folder, *flags("interleaved windows", 2), "--dram", "64GiB", "--nvme", "2TiB")
    settings = json.dumps({**checks.CONNECTOR, "kv_connector_extra_config": {}})
    assert done.stdout == TABLES.format(folder=folder, settings=settings), done.stderr
    assert done.returncode == 0


def test_the_command_prints_json_and_refuses(folders: dict[str, Path]) -> None:
    done = command(folders["latent"], *flags("latent"), "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["served"] is False
    assert [each["kind"] for each in told["groups"]] == ["latent attention"]
    assert "without_prefix_caching" in told["refusals"][0]["hint"]


def test_a_name_in_the_hubs_cache_is_found_without_a_network(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "hub" / "models--someone--some-model"
    shutil.copytree(folders["llama"], cache / "snapshots" / "0123abcd")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abcd")
    done = command("someone/some-model", "--json", environment={"HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "LlamaForCausalLM"
    (cache / "snapshots" / "0123abcd" / "model.safetensors").unlink()
    unweighted = command("someone/some-model", "--json", environment={"HF_HOME": str(tmp_path)})
    assert unweighted.stdout == done.stdout
