"""The pages about engines: their Python blocks run, and their tables of options have every option."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore import Namespace, PutResult
from kvstore.core.actions import NO_ROOM, WORTH_LESS

ROOT = Path(__file__).parents[2]
CONNECTORS = ROOT / "connectors"


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```python\n(.*?)```", page("python"), re.DOTALL)
RUN = [block for block in BLOCKS if "LocalDaemon" in block]


@pytest.mark.parametrize("block", RUN, ids=[f"block {i}" for i in range(len(RUN))])
def test_a_block_of_the_client_page_runs_and_prints_what_it_says(block: str) -> None:
    """A comment behind a `print` is what the line prints. `test_pages` compares all of the first block."""
    ran = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for told in re.findall(r"print\(.*\)  # (.*)", block):
        assert told.partition(":")[0] in ran.stdout.splitlines(), ran.stdout


def test_only_blocks_that_need_a_gpu_do_not_run() -> None:
    assert len(RUN) == 4
    assert all("cuda" in block for block in BLOCKS if block not in RUN)


def test_the_table_of_calls_has_every_call_of_a_namespace() -> None:
    section = page("python").partition("## Calls")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)\(", section))
    calls = {name for name, _ in inspect.getmembers(Namespace, inspect.isfunction) if name[0] != "_"}
    assert calls <= named
    assert {"status", "ping", "explain", "control", "delete_tenant"} <= named


def test_results_and_errors_of_the_client_are_named() -> None:
    text = page("python")
    assert all(f"`{name}`" in text for name in PutResult.__slots__)
    assert f"`{NO_ROOM}`" in text
    assert f"`{WORTH_LESS}`" in text
    for name in ("MisuseError", "UnavailableError", "DeniedError", "ConfigError"):
        assert issubclass(getattr(kvstore.errors, name), kvstore.errors.KVStoreError)
        assert f"`{name}`" in text


def test_the_vllm_page_has_every_option_with_its_default() -> None:
    """The connector cannot be imported without vLLM: its source is read."""
    source = (CONNECTORS / "kvstore_vllm/settings.py").read_text(encoding="utf-8")
    body = source.partition("class ConnectorSettings:")[2].partition("@classmethod")[0]
    options = dict(re.findall(r"^    ([a-z_]+): (?:str|float|int) = (.*)$", body, re.MULTILINE))
    table = page("vllm").partition("| `kv_connector_extra_config` | default |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(options)
    for name, default in options.items():
        assert default in ('""', "0") or rows[name] == f"`{default}`", name


def test_the_sglang_page_has_every_option_with_its_default_and_every_layout() -> None:
    source = (CONNECTORS / "kvstore_sglang/settings.py").read_text(encoding="utf-8")
    body = source.partition("class BackendSettings:")[2].partition("@classmethod")[0]
    options = dict(re.findall(r"^    ([a-z_]+): (?:str|float) = (.*)$", body, re.MULTILINE))
    assert {"url", "token", "deadline_s", "weights_revision", "model"} == set(options)
    table = page("sglang").partition("The connector's own keys")[2].partition("\n\nAn unknown")[0]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(options)
    assert rows["deadline_s"] == f"`{options['deadline_s']}`"
    pages = (CONNECTORS / "kvstore_sglang/pages.py").read_text(encoding="utf-8")
    layouts = pages.partition("SERVED_LAYOUTS = (")[2].partition(")")[0]
    for layout in re.findall(r'"(\w+)"', layouts):
        assert f"`{layout}`" in page("sglang") or f"layout {layout}`" in page("sglang"), layout


def test_every_model_that_sglang_serves_is_tested_and_on_the_page() -> None:
    source = (CONNECTORS / "kvstore_sglang/settings.py").read_text(encoding="utf-8")
    listed = source.partition("SERVED_ARCHITECTURES = (")[2].partition(")")[0]
    served = set(re.findall(r'"(\w+)ForCausalLM"', listed))
    shapes = (ROOT / "tests/engines/sglang/shapes.py").read_text(encoding="utf-8")
    assert served == set(re.findall(r'Shape\(\s*"(\w+)"', shapes))
    for family in sorted(served):
        assert NAMES.get(family, family) in page("sglang"), family


def test_the_tensorrt_llm_page_has_every_option_with_its_default_and_every_model() -> None:
    source = (CONNECTORS / "kvstore_trtllm/options.py").read_text(encoding="utf-8")
    body = source.partition("class ConnectorOptions:")[2].partition("@classmethod")[0]
    options = dict(re.findall(r"^    ([a-z_]+): (?:str|int|float) = (.*)$", body, re.MULTILINE))
    text = page("tensorrt-llm")
    table = text.partition("| key | default |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(options)
    for name in ("deadline_s", "staging_mib", "recompute_tokens_per_s"):
        assert rows[name] == f"`{options[name]}`"
    settings = (CONNECTORS / "kvstore_trtllm/settings.py").read_text(encoding="utf-8")
    served = settings.partition("SERVED_ARCHITECTURES = (")[2].partition(")")[0]
    families = re.findall(r'"(\w+)ForCausalLM"', served)
    assert len(families) == 6
    for family in families:
        assert NAMES.get(family, family) in text, family
    for option in re.findall(r'"kv_cache_config\.(\w+)"', settings):
        assert option in text or option in ("dtype", "disk_cache_size"), option


def test_the_vllm_page_has_every_metric_and_every_name_in_the_log() -> None:
    source = (CONNECTORS / "kvstore_vllm/metrics.py").read_text(encoding="utf-8")
    section = page("vllm").partition("## Counters")[2].partition("\n## ")[0]
    metrics = set(re.findall(r'Metric\(\s*"([a-z_]+)"', source))
    assert set(re.findall(r"^\| `vllm:kvstore_([a-z_]+)` \|", section, re.MULTILINE)) == metrics
    logged = set(
        re.findall(r': "([a-z ]+)",$', source.partition("_LOGGED = {")[2].partition("}\n")[0], re.MULTILINE)
    )
    table = section.partition("### In the log")[2].partition("\n\n|")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert {name for cell in cells for name in re.findall("`([a-z ]+)`", cell)} == logged


REFUSALS = {
    "vllm": [
        "an encoder, and attention to its output",
        "a pooler, which may need every token of a prompt computed",
        "nothing is loaded or stored: ",
        "the engine's prefix caching is off",
        "was changed in place after its first use",
    ],
    "sglang": [
        "has sliding windows",
        "the weights are quantized",
        "no test covers the model",
        "takes more than text",
        "does not generate text",
        "was changed after the engine started",
        "nothing is loaded or stored from now on",
        "--hicache-mem-layout is page_head",
        "--attn-cp-size is 2",
    ],
    "lmcache": ["nothing names the weights"],
    "llama-cpp": [
        "is a recurrent or hybrid model",
        "is not tested",
        "in several files",
        "was changed after the process started",
        "puts more than text into the context",
        "swa_full is False",
        "logits_all is set",
        "a LoRA is set",
        "writes states of versions",
        "gives other logits",
        "make a KVStoreCache for each Llama",
        "has sliding windows",
        "moved KV is not the KV of its prefix",
        "speculative decoding is not tested",
        "the model must be a local file",
        "is not known to leave KV as it is",
        "llama-server ended with exit code",
        "does not run llama.cpp in its own process",
        "no room for its slot file",
    ],
    "trtllm": [
        "has sliding windows",
        "has layers without full attention",
        "has quantized weights",
        "no test covers the model",
        "the KV pool has the type",
        "the KV pool has the shape",
        "a rank cannot open the memory of rank 0",
        "has another interface",
        "was changed after the engine started",
        "the daemon took the whole deadline",
        "loads are slower: the memory for them cannot be page-locked",
        "was promised blocks",
    ],
    "blend": [
        "has 0 rotary embeddings",
        "do not turn with their position",
        "has dynamic position embeddings",
        "has sliding windows",
        "has states",
        "has latent attention",
        "share keys",
        "recomputed tokens need a mask of their own",
        "layer 0 of the cache is a LossyLayer",
    ],
    "transformers": [
        "takes no past_key_values",
        "takes no position_ids",
        "DynamicSlidingWindowLayer",
        "does not continue from its states",
        "has no attention",
        "keeps its state outside the cache",
        "has a cache class of its own",
        "past is not the cache of the latest restore",
        "past_key_values is offloaded",
        "is an encoder-decoder",
        "takes more than text",
        "is sharded over ranks",
        "depend on the tokens that follow",
        "position embeddings",
        "is in training mode",
        "attention_mask is not zeros followed by ones",
    ],
}
"""What the pages quote: each is in the source of the connector, or in what tests expect of a real model."""


PAGES = {"trtllm": "tensorrt-llm"}
"""Pages with another name than the connector."""

PACKAGES = {"blend": "transformers"}
"""Connectors with several pages."""


@pytest.mark.parametrize("name", REFUSALS)
def test_quoted_messages_are_those_of_the_connector(name: str) -> None:
    package = PACKAGES.get(name, name.replace("-", ""))
    folders = (CONNECTORS / f"kvstore_{package}", ROOT / f"tests/engines/{package}")
    source = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    text = page(PAGES.get(name, name))
    for words in REFUSALS[name]:
        assert words in text, words
        assert words in source, words


NAMES = {
    "DeepseekV2": "DeepSeek", "DeepseekV3": "DeepSeek",
    "DeepseekV32": "DeepSeek-V3.2", "DeepseekV4": "DeepSeek-V4",
    "Glm4Moe": "GLM-4.5", "GraniteMoeHybrid": "Granite 4",
    "GptOss": "gpt-oss", "GPTNeoX": "GPT-NeoX", "GPTNeo": "GPT-Neo", "GPT2": "GPT-2",
    "Qwen3Moe": "Qwen3-MoE", "Qwen3Next": "Qwen3-Next", "Phi3": "Phi-3", "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3", "Olmo2": "OLMo 2", "Gemma3n": "Gemma 3n", "Gemma4": "Gemma 4",
    "Llama4": "Llama 4", "Lfm2": "LFM2", "Lfm2Moe": "LFM2-MoE",
    "Starcoder2": "StarCoder2", "Rwkv": "RWKV", "Mpt": "MPT", "Bart": "BART",
    "Qwen3_5": "Qwen3.5", "Qwen3_5Moe": "Qwen3.5-MoE", "OlmoHybrid": "OLMo Hybrid",
    "KimiLinear": "Kimi Linear",
    "BailingHybrid": "Bailing Hybrid", "Lfm3": "LFM3", "NemotronH": "Nemotron-H", "FalconH1": "Falcon-H1",
    "Inkling2": "Inkling 2", "Mamba2": "Mamba-2",
    "BertLMHeadModel": "encoders with a language head", "Bert": "BERT",
}  # fmt: skip
"""Names of model families on the pages, by their name in transformers, where these differ."""


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_every_family_that_is_tested_is_on_the_page(name: str) -> None:
    source = (ROOT / f"tests/engines/{name}/shapes.py").read_text(encoding="utf-8")
    families = set(re.findall(r'Shape\(\s*"(\w+?)(?:Text)?"', source))
    families |= {
        re.sub(r"(For\w+|LMHeadModel)$", "", each) for each in re.findall(r'of\("(?!Bert)(\w+)"', source)
    }
    families |= set(re.findall(r'"(BertLMHeadModel)"', source))
    assert len(families) > 10
    for family in sorted(families):
        assert NAMES.get(family, family) in page(name), family
