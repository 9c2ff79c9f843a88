"""`python -m kvstore_sglang check` tells before the start what an engine with the connector then does."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.sglang.conftest import SETTINGS
from tests.engines.sglang.engine import BASE, Engine, hicache, prompt
from tests.engines.sglang.shapes import SHAPES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvstore_sglang.__main__ import main
    from kvstore_sglang.check import Report, check, configure

GIB = 1 << 30
NAMES = ("llama, grouped queries", "laguna, windows", "deepseek v2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: SHAPES[name].save(tmp_path_factory.mktemp("shape")) for name in NAMES}


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    """The command turns logs off for its process, which this one is."""
    yield
    logging.disable(logging.NOTSET)


def report_of(folder: Path, *arguments: str) -> Report:
    return check(configure(str(folder), ["--dtype", "float32", *arguments]), GIB, 4 * GIB)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_prompt_is_stored_in_the_blocks_that_the_check_tells(
    folders: dict[str, Path], name: str, page_tokens: int
) -> None:
    report = report_of(folders[name], "--page-size", str(page_tokens))
    assert report.served, report.refusals
    asked = report.prompts[0]
    assert asked.tokens == 1024
    engine: dict[str, Any] = {"page_size": page_tokens}
    with LocalDaemon(SETTINGS) as own, Engine(folders[name], **hicache(own, engine=engine)) as made:
        made.generate([prompt(900, 1024)], max_new_tokens=1)
        with Client(own.url, deadline_s=10.0) as client:
            assert eventually(lambda: client.status()["blocks"] >= sum(asked.blocks))
            made.flush()
            assert client.status()["blocks"] == sum(asked.blocks)
            stored = [each["block_bytes"] for each in client.control("namespaces")["namespaces"]]
    assert sorted(stored) == sorted(pool.page_bytes for pool in report.pools)
    assert BASE["dtype"] == report.dtype


def test_shards_have_their_heads_and_layers(folders: dict[str, Path]) -> None:
    llama, latent = folders["llama, grouped queries"], folders["deepseek v2"]
    [whole] = report_of(llama).pools
    [halves] = report_of(llama, "--tp-size", "2").pools
    assert (halves.shard_bytes, halves.page_bytes) == ([whole.page_bytes // 2], whole.page_bytes)
    [quarters] = report_of(llama, "--tp-size", "2", "--pp-size", "2").pools
    assert (quarters.shard_bytes, quarters.page_bytes) == ([whole.page_bytes // 4] * 2, whole.page_bytes)
    # More ranks than heads: each has a copy.
    assert report_of(llama, "--tp-size", "4").pools[0].page_bytes == 2 * whole.page_bytes
    # Latents are stored once.
    [alone], shared = report_of(latent).pools, report_of(latent, "--tp-size", "2")
    assert (shared.shards, shared.pools[0].page_bytes) == (1, alone.page_bytes)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"], "--enable-lora is True"),
        (["--quantization", "fp8"], "the weights are quantized (fp8)"),
        (["--hicache-mem-layout", "page_head"], "--hicache-mem-layout is page_head"),
        (["--page-size", "524288"], "a page is too large for a block"),
        (
            ["--hicache-storage-backend-extra-config", '{"interface_v1": 1, "nothing": 1}'],
            "unknown key 'nothing'",
        ),
        (["--hicache-storage-backend-extra-config", "{}"], "interface_v1 is not set"),
    ],
)
def test_refused_engines_are_told_by_name(
    folders: dict[str, Path], arguments: list[str], reason: str
) -> None:
    report = report_of(folders["llama, grouped queries"], *arguments)
    assert not report.served
    assert any(reason in told for told, _ in report.refusals), report.refusals
    assert report.prompts == []


def test_models_that_are_not_served_have_no_sizes(tmp_path: Path) -> None:
    config = json.loads((SHAPES["llama, grouped queries"].save(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["StableLmForCausalLM"]}))
    report = report_of(tmp_path)
    assert "no test covers the model StableLmForCausalLM" in report.refusals[0][0]
    assert (report.pools, report.prompts) == ([], [])


def test_wrong_usage_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"has no config\.json"):
        report_of(tmp_path)
    with pytest.raises(MisuseError, match="SGLang refuses this model or its arguments"):
        report_of(tmp_path / "nowhere")
    with pytest.raises(MisuseError, match="--hicache-storage-backend is file"):
        report_of(folders["llama, grouped queries"], "--hicache-storage-backend", "file")


def test_the_command_prints_tables_or_json(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dtype = str(folders["laguna, windows"]), ("--dtype", "float32")
    assert main(["check", folder, "--dram", "8GiB", *dtype]) == 0
    text = capsys.readouterr().out
    assert "pool             layers  window  page tokens   page" in text
    assert "sliding windows       2      48           64  64KiB" in text
    assert "--hicache-storage-backend dynamic" in text
    assert main(["check", folder, "--json", *dtype]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["served"], [pool["token_bytes"] for pool in report["pools"]]) == (True, [1024, 1024])
    assert main(["check", folder, "--quantization", "fp8"]) == 1
    assert "refused  the weights are quantized (fp8)\n  hint   " in capsys.readouterr().out
    for arguments, message in (
        ([folder, "--dram", "0"], "--dram: '0' is nothing"),
        (["--dram", "1GiB", folder], "--dram comes before the model"),
        (["/nowhere"], "SGLang refuses this model"),
    ):
        assert main(["check", *arguments]) == 2
        assert f"error: {message}" in capsys.readouterr().err
