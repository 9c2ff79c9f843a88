"""Reads the arguments and variables of llama-server: what is served, and what the namespace must contain.

An option that is in none of the tables is refused: it may change KV in a way that its text does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, MisuseError

_HARMLESS = """
-t --threads N LLAMA_ARG_THREADS
-tb --threads-batch N
-C --cpu-mask N
-Cr --cpu-range N
--cpu-strict N
--prio N
--poll N
-Cb --cpu-mask-batch N
-Crb --cpu-range-batch N
--cpu-strict-batch N
--prio-batch N
--poll-batch N
--numa N LLAMA_ARG_NUMA
-n --predict --n-predict N LLAMA_ARG_N_PREDICT
-b --batch-size N LLAMA_ARG_BATCH
-ub --ubatch-size N LLAMA_ARG_UBATCH
-np --parallel N LLAMA_ARG_N_PARALLEL
-cb --cont-batching -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING
-kvu --kv-unified
-lm --load-mode N LLAMA_ARG_LOAD_MODE
--mlock LLAMA_ARG_MLOCK
--mmap --no-mmap LLAMA_ARG_MMAP
--check-tensors
--perf --no-perf LLAMA_ARG_PERF
--warmup --no-warmup
--keep N
--cache-prompt --no-cache-prompt LLAMA_ARG_CACHE_PROMPT
--no-context-shift
-e --escape --no-escape
-r --reverse-prompt N
-sp --special
--spm-infill
--samplers N
--sampler-seq --sampling-seq N
-s --seed N
--ignore-eos
--temp --temperature N LLAMA_ARG_TEMPERATURE
--top-k N LLAMA_ARG_TOP_K
--top-p N LLAMA_ARG_TOP_P
--min-p N LLAMA_ARG_MIN_P
--top-nsigma --top-n-sigma N
--xtc-probability N
--xtc-threshold N
--typical --typical-p N
--repeat-last-n N
--repeat-penalty N LLAMA_ARG_REPEAT_PENALTY
--presence-penalty N LLAMA_ARG_PRESENCE_PENALTY
--frequency-penalty N LLAMA_ARG_FREQUENCY_PENALTY
--dry-multiplier N
--dry-base N
--dry-allowed-length N
--dry-penalty-last-n N
--dry-sequence-breaker N
--dynatemp-range N
--dynatemp-exp N
--mirostat N
--mirostat-lr N
--mirostat-ent N
-l --logit-bias N
--grammar N
--grammar-file N
-j --json-schema N
-jf --json-schema-file N
-a --alias N LLAMA_ARG_ALIAS
--tags N LLAMA_ARG_TAGS
--api-key N LLAMA_API_KEY
--api-key-file N LLAMA_ARG_API_KEY_FILE
--path N LLAMA_ARG_STATIC_PATH
--ui --webui --no-ui --no-webui LLAMA_ARG_UI LLAMA_ARG_NO_WEBUI LLAMA_ARG_WEBUI
-to --timeout N LLAMA_ARG_TIMEOUT
--sse-ping-interval N LLAMA_ARG_SSE_PING_INTERVAL
--threads-http N LLAMA_ARG_THREADS_HTTP
--metrics LLAMA_ARG_ENDPOINT_METRICS
--props LLAMA_ARG_ENDPOINT_PROPS
--slots --no-slots LLAMA_ARG_ENDPOINT_SLOTS LLAMA_ARG_NO_ENDPOINT_SLOTS
--jinja --no-jinja LLAMA_ARG_JINJA
--chat-template N LLAMA_ARG_CHAT_TEMPLATE
--chat-template-file N LLAMA_ARG_CHAT_TEMPLATE_FILE
--chat-template-kwargs N LLAMA_ARG_CHAT_TEMPLATE_KWARGS
--skip-chat-parsing --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING
--prefill-assistant --no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT
--reasoning-format N LLAMA_ARG_THINK
-rea --reasoning N LLAMA_ARG_REASONING
--reasoning-effort N LLAMA_ARG_REASONING_EFFORT
--reasoning-budget N LLAMA_ARG_THINK_BUDGET
--reasoning-budget-message N LLAMA_ARG_THINK_BUDGET_MESSAGE
-sps --slot-prompt-similarity N
--offline LLAMA_ARG_OFFLINE
--log-disable
--log-file N LLAMA_ARG_LOG_FILE
--log-colors N LLAMA_ARG_LOG_COLORS
--log-jsonl --no-log-jsonl LLAMA_ARG_LOG_JSONL
--log-prefix --no-log-prefix LLAMA_ARG_LOG_PREFIX
--log-timestamps --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS
-v --verbose --log-verbose
-lv --verbosity --log-verbosity N LLAMA_ARG_LOG_VERBOSITY
"""
"""Options on which no KV depends: names, an N if a value follows, variables with the same meaning."""

_COUNTED = """
-c --ctx-size N LLAMA_ARG_CTX_SIZE
-fa --flash-attn N LLAMA_ARG_FLASH_ATTN
-ctk --cache-type-k N LLAMA_ARG_CACHE_TYPE_K
-ctv --cache-type-v N LLAMA_ARG_CACHE_TYPE_V
--rope-scaling N LLAMA_ARG_ROPE_SCALING_TYPE
--rope-scale N LLAMA_ARG_ROPE_SCALE
--rope-freq-base N LLAMA_ARG_ROPE_FREQ_BASE
--rope-freq-scale N LLAMA_ARG_ROPE_FREQ_SCALE
--yarn-orig-ctx N LLAMA_ARG_YARN_ORIG_CTX
--yarn-ext-factor N LLAMA_ARG_YARN_EXT_FACTOR
--yarn-attn-factor N LLAMA_ARG_YARN_ATTN_FACTOR
--yarn-beta-slow N LLAMA_ARG_YARN_BETA_SLOW
--yarn-beta-fast N LLAMA_ARG_YARN_BETA_FAST
-kvo --kv-offload -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD
--repack -nr --no-repack LLAMA_ARG_REPACK
--no-host LLAMA_ARG_NO_HOST
--op-offload --no-op-offload
-dev --device N LLAMA_ARG_DEVICE
-ot --override-tensor N LLAMA_ARG_OVERRIDE_TENSOR
-cmoe --cpu-moe LLAMA_ARG_CPU_MOE
-ncmoe --n-cpu-moe N LLAMA_ARG_N_CPU_MOE
-ngl --gpu-layers --n-gpu-layers N LLAMA_ARG_N_GPU_LAYERS
-sm --split-mode N LLAMA_ARG_SPLIT_MODE
-ts --tensor-split N LLAMA_ARG_TENSOR_SPLIT
-mg --main-gpu N LLAMA_ARG_MAIN_GPU
-fit --fit N LLAMA_ARG_FIT
-fitt --fit-target N LLAMA_ARG_FIT_TARGET
-fitc --fit-ctx N LLAMA_ARG_FIT_CTX
"""
"""Options that the namespace contains."""

_OWNED = "the proxy sets it"
_MODEL = ("-m", "--model")
_REFUSED = {
    ("--host", "--port", "--reuse-port"): ("the proxy listens instead of llama-server", "use --listen"),
    ("--slot-save-path",): (_OWNED, "use --slot-folder"),
    ("-cram", "--cache-ram", "--cache-idle-slots", "--no-cache-idle-slots"): (
        f"{_OWNED}: the store takes the place of llama-server's own prompt cache",
        "leave it out",
    ),
    ("-no-kvu", "--no-kv-unified"): ("a slot file has the KV of one unified buffer only", "leave it out"),
    ("--context-shift", "--cache-reuse"): (
        "moved KV is not the KV of its prefix, and would be stored as such",
        "leave it out",
    ),
    ("--lora", "--lora-scaled", "--lora-init-without-apply"): (
        "an adapter changes KV, and requests may scale it",
        "merge it into the model's file",
    ),
    ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"): (
        "a control vector changes KV",
        "leave it out",
    ),
    ("--override-kv",): ("the model's file no longer names its KV", "leave it out"),
    ("-mm", "--mmproj", "-mmu", "--mmproj-url"): (
        "blocks are found by token ids, and images have none",
        "leave it out",
    ),
    ("-md", "--model-draft", "--spec-draft-model", "--spec-type", "--mtp", "--spec-default"): (
        "speculative decoding is not tested",
        "leave it out",
    ),
    ("--swa-full",): ("models with sliding windows are not served", "leave it out"),
    ("--embedding", "--embeddings", "--rerank", "--reranking", "--pooling"): (
        "only completions are served",
        "run such a model without the proxy",
    ),
    ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo", "--models-dir"): (
        "the model must be a local file, whose content names its blocks",
        "download it, and use -m",
    ),
    ("--api-prefix", "--ssl-key-file", "--ssl-cert-file"): (
        "the proxy speaks plain HTTP with llama-server, without a prefix",
        "let another proxy in front do it",
    ),
    ("--sleep-idle-seconds",): ("a sleeping llama-server has no slots", "leave it out"),
}
"""Options that are refused by name: the reason and a hint."""

_REASONS = {name: said for names, said in _REFUSED.items() for name in names}
_IGNORED = ("LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_MODEL")
"""Variables that the proxy's own arguments override."""

_SET = ("--kv-unified", "--cache-ram", "0", "--no-context-shift", "--cache-reuse", "0", "--no-mmproj")
"""Arguments that the proxy adds, also against variables."""


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    takes_value: bool
    counts: bool


def _options() -> Iterator[tuple[str, _Option]]:
    for table, counts in ((_HARMLESS, False), (_COUNTED, True)):
        for line in table.strip().splitlines():
            words = line.split()
            takes_value = "N" in words
            for word in words:
                if word != "N":
                    # The two forms of a flag differ in meaning, the names of an option with a value don't.
                    name = next(w for w in words if w.startswith("--")) if takes_value else word
                    yield word, _Option(name, takes_value, counts)


_OPTIONS = dict(_options())


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What llama-server is started with: `command` without what the proxy adds, and the file of the model.

    `counted`: options and variables on which KV may depend, sorted. `keys`: API keys that llama-server takes.
    """

    program: str
    arguments: tuple[str, ...]
    model: Path
    counted: tuple[str, ...]
    keys: tuple[str, ...]

    def command(self, port: int, folder: Path) -> list[str]:
        """Returns the command line for a port on loopback, and a folder of slot files."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--slot-save-path", f"{folder}/"]
        return [self.program, *self.arguments, *_SET, *where]


def read_options(command: Sequence[str], variables: Mapping[str, str]) -> ServerOptions:
    """Returns the options of a command line of llama-server.

    Raises MisuseError, which names the option or variable, for one that is not served, and ConfigError for a
    file of API keys that cannot be read.
    """
    if not command:
        raise MisuseError("there is no command of llama-server", "put it behind --, with -m FILE")
    program, *arguments = command
    given = list(_given(arguments))
    _check_variables(variables)
    model = next((value for name, value in reversed(given) if name in _MODEL), None)
    model = variables.get("LLAMA_ARG_MODEL") if model is None else model
    if not model:
        raise MisuseError("llama-server is started without a model", "use -m FILE")
    counted = [f"{name} {value}".rstrip() for name, value in given if name not in _MODEL and _counts(name)]
    return ServerOptions(
        program,
        tuple(arguments),
        Path(model),
        (*sorted(counted), *_counted_variables(variables)),
        tuple(_keys(given, variables)),
    )


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the options by their main names, with their values. Raises MisuseError."""
    words = iter(arguments)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name in _REASONS:
            raise MisuseError(f"{word}: {_REASONS[name][0]}", _REASONS[name][1])
        option = _Option(_MODEL[1], True, False) if name in _MODEL else _OPTIONS.get(name)
        if option is None:
            raise MisuseError(
                f"{word} is not known to leave KV as it is",
                "leave it out; docs/llama-cpp.md lists the options that are served",
            )
        if not option.takes_value:
            yield option.name, ""
        elif (value := next(words, None)) is None:
            raise MisuseError(f"{word} has no value", "see llama-server --help")
        else:
            yield option.name, value


def _counts(name: str) -> bool:
    return _OPTIONS[name].counts


def _check_variables(variables: Mapping[str, str]) -> None:
    for name in sorted(variables):
        if name.startswith("LLAMA_ARG_") and name not in _OPTIONS and name not in _IGNORED:
            raise MisuseError(
                f"the variable {name} is set, which is not known to leave KV as it is", "unset it"
            )


def _counted_variables(variables: Mapping[str, str]) -> list[str]:
    """Returns the variables on which KV may depend, also those that ggml alone knows."""
    ours = (name for name in sorted(variables) if name.startswith(("LLAMA_", "GGML_")))
    left_out = {name for name, option in _OPTIONS.items() if not option.counts} | set(_IGNORED)
    return [f"{name}={variables[name]}" for name in ours if name not in left_out]


def _keys(given: Sequence[tuple[str, str]], variables: Mapping[str, str]) -> Iterator[str]:
    values = [(name, value) for name, value in given if name in ("--api-key", "--api-key-file")]
    for variable, name in (("LLAMA_API_KEY", "--api-key"), ("LLAMA_ARG_API_KEY_FILE", "--api-key-file")):
        if variables.get(variable):
            values.append((name, variables[variable]))
    for name, value in values:
        if name == "--api-key":
            yield from filter(None, value.split(","))
            continue
        try:
            lines = Path(value).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the API keys in {value}: {error}", "check --api-key-file"
            ) from error
        yield from (line for line in lines if line and not line.startswith("#"))
