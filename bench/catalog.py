"""The catalogue of benches and of their rows. bench/RESULTS.md and the tests use the same names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.harness import Bench, NotDone, Result


@dataclass(frozen=True, slots=True)
class Entry:
    """A bench: the function that runs it, and its rows.

    `optional`: rows that need an extra package or program. `needs`: a rare requirement of the whole bench.
    """

    run: str
    always: tuple[str, ...]
    optional: dict[str, str] = field(default_factory=dict)
    needs: str = ""

    @property
    def rows(self) -> tuple[str, ...]:
        """All rows, in the order of RESULTS.md."""
        return (*self.always, *self.optional)


def _named(name: str, *rows: str) -> tuple[str, ...]:
    return tuple(f"{name}/{row}" for row in rows)


def _disks(name: str) -> tuple[tuple[str, ...], dict[str, str]]:
    fio = dict.fromkeys(_named(name, "fio", "fio-huge-pages"), "fio (apt install fio)")
    return (f"{name}/same-memory",), fio


_MAY_BE_NONE = "qos/stalled-device", "hostile/", "blend/agreement/"
"""Prefixes of rows whose figure may be 0 or negative: overrun time, served calls, memory, agreement."""

_HOSTILE = (
    *("long-frames", "many-values", "waits", "unread", "leases", "namespaces"),
    *("unfinished", "connections", "all"),
)
_GPU = "a GPU"
_VLLM = "an environment with vLLM (several GB)"
_SGLANG = "an environment with SGLang (3 GB)"
_LLAMA_SERVER = "an environment with llama-server (500 MB, some minutes)"
_REDIS = "redis-py (pip install 'redis[hiredis]')"
_LMCACHE = "an environment with LMCache (2 GB)"
_TRANSFORMERS = "an environment with transformers (1.4 GB)"
_PEERS = "redis-py, and an environment with Mooncake (100 MB)"

BENCHES = {
    "memcpy-get": Entry(
        "memcpy_get:run",
        _named("memcpy-get/1-client", "unverified", "verified", "verification")
        + _named("memcpy-get/2-clients", "unverified", "verified", "verification")
        + _named("memcpy-get/64-KiB", "unverified", "verified"),
    ),
    "memcpy-put": Entry("memcpy_put:run", ("memcpy-put", "memcpy-put/64-KiB")),
    "zero-copy": Entry(
        "zero_copy:run", _named("zero-copy", "acquire", "acquire-and-views", "acquire-release-loop")
    ),
    "tracing": Entry("tracing:run", _named("tracing", "off", "1%")),
    "lookup": Entry("lookup:run", _named("lookup", "1", "64", "1024", "8192", "8192-with-gaps")),
    "nvme-read": Entry("nvme:read", *_disks("nvme-read")),
    "nvme-read-acquire": Entry("nvme:read_acquire", *_disks("nvme-read-acquire")),
    "nvme-write": Entry("nvme:write", *_disks("nvme-write")),
    "nvme-write-put": Entry("nvme:write_put", *_disks("nvme-write-put")),
    "core": Entry("core:run", ("core",)),
    "core-ram": Entry("core_ram:run", _named("core-ram", "restored", "put")),
    "core-step": Entry("core_step:run", _named("core-step", "filling-by-256", "1", "32", "256", "2048")),
    "refill": Entry("refill:run", _named("refill", "core", "step", "ping")),
    "scale": Entry(
        "scale:run",
        tuple(
            f"scale/{row}{end}"
            for row in ("4KiB/0.1M", "4KiB/0.5M", "64KiB/0.05M")
            for end in ("", "/lookup-p99")
        ),
    ),
    "capacity": Entry(
        "capacity:run",
        _named(
            "capacity",
            "1-engine",
            "8-engines",
            "8-engines-of-8-shards",
            "8-engines-of-8-shards/2-daemons",
            "8-engines-of-8-shards/128-tokens",
            "8-engines-of-8-shards/128-tokens/2-daemons",
        ),
    ),
    "evict": Entry("evict:run", _named("evict", "lru", "arc", "s3fifo", "lfuda", "gdsf", "sieve", "hazard")),
    "tenants": Entry("tenants:run", _named("tenants", "fair", "admission")),
    "start": Entry("start:run", ("start/1M-records",)),
    "seal": Entry(
        "seal:run", ("seal-cipher/memcpy", "open-cipher/memcpy", "seal-write/plain", "seal-read/plain")
    ),
    "qos": Entry(
        "qos:run",
        (
            *_named("qos/zero-copy-p99", "against-alone", "against-beside-burners"),
            *_named("qos/nvme-p99-beside-reads", "against-alone", "against-beside-burners"),
            "qos/nvme-throughput/beside-reads",
            *_named("qos/nvme-p99-beside-writes", "against-alone", "against-beside-burners"),
            "qos/nvme-throughput/beside-writes",
            "qos/stalled-device/after-the-deadline-p99.9",
        ),
    ),
    "hostile": Entry(
        "hostile:run",
        (
            *(row for load in _HOSTILE for row in _named(f"hostile/{load}", "p99", "served", "memory")),
            "hostile/control/p99",
            *_named("hostile/admin", "p99", "served"),
        ),
    ),
    "admin": Entry("admin:run", _named("admin", "process", "thread")),
    "network": Entry(
        "network:run",
        _named("network", "reuse-valkey", "reuse-valkey/1-MiB", "handoff")
        + _named("network", "killed", "hung", "garbage", "slow", "full")
        + _named("network", "reuse-folder", "reuse-folder/1-MiB", "reuse-s3", "reuse-s3/1-MiB"),
    ),
    "valkey": Entry(
        "valkey:run",
        _named("valkey", "put/tcp", "get/tcp"),
        dict.fromkeys(_named("valkey", "put/redis-py", "get/redis-py"), _REDIS),
    ),
    "peers": Entry(
        "peers:run",
        _named("peers/get", "64-KiB", "1-MiB", "2-MiB", "16-MiB")
        + _named("peers/put", "64-KiB", "1-MiB", "2-MiB", "16-MiB")
        + ("peers/exists/32-keys",),
        needs=_PEERS,
    ),
    "lmcache": Entry(
        "lmcache:run",
        _named("lmcache/256-KiB", "store", "load", "lookup")
        + _named("lmcache/4-MiB", "store", "load", "lookup"),
        needs=_LMCACHE,
    ),
    "blend": Entry(
        "blend:run",
        _named("blend/ttft", "0", "0.05", "0.15", "0.3", "0.5", "1", "prefix-only")
        + _named("blend/agreement", "0", "0.05", "0.15", "0.3", "0.5", "1", "without-documents"),
        needs=_TRANSFORMERS,
    ),
    "objectstore": Entry("objectstore:run", _named("objectstore", "get", "put")),
    "weights": Entry("weights:run", _named("weights", "from-disk", "in-memory", "remembered")),
    "gpu": Entry(
        "gpu:run",
        _named("gpu", "dram-to-device", "hbm-hit", "hbm-hit-verified", "hbm-get")
        + _named("gpu/checksum", "256-blocks", "2048-blocks")
        + ("gpu/pages",),
        {"gpu/nvme-to-hbm": "kvikio"},
        _GPU,
    ),
    "vllm-start": Entry("vllm_start:run", _named("vllm-start", "from-disk", "in-memory"), needs=_VLLM),
    "vllm-miss": Entry(
        "vllm_miss:run",
        _named("vllm-miss", "gqa", "mha", "windows", "latent", "recurrent", "answers"),
        needs=_VLLM,
    ),
    "vllm-ttft": Entry(
        "vllm_ttft:run",
        _named("vllm-ttft", "256", "512", "1024", "2048", "1024/half", "2048/half"),
        needs=_VLLM,
    ),
    "vllm-worth-device": Entry(
        "vllm_worth:device",
        _named("vllm-worth-device", "slow/512", "slow/1024", "slow/2048", "fast/2048"),
        needs=_VLLM,
    ),
    "vllm-worth-network": Entry(
        "vllm_worth:network", _named("vllm-worth-network", "slow/512", "slow/1024", "slow/2048"), needs=_VLLM
    ),
    "vllm-roles": Entry("vllm_roles:run", _named("vllm-roles", "256", "512", "1024", "2048"), needs=_VLLM),
    "sglang-miss": Entry("sglang_miss:run", _named("sglang-miss", "gqa", "mha", "answers"), needs=_SGLANG),
    "sglang-ttft": Entry(
        "sglang_ttft:run", _named("sglang-ttft", "256", "512", "1024", "2048"), needs=_SGLANG
    ),
    "llama-proxy": Entry("llama_proxy:run", _named("llama-proxy", "added", "ttft-4096"), needs=_LLAMA_SERVER),
}

EVERYWHERE = tuple(name for name, entry in BENCHES.items() if not entry.needs)
"""Names of the benches that run on any machine."""

_ENGINES = (_VLLM, _SGLANG, _PEERS, _LMCACHE, _LLAMA_SERVER, _TRANSFORMERS)
ENGINES = tuple(name for name, entry in BENCHES.items() if entry.needs in _ENGINES)
"""Names of those that need an engine's environment."""


def measure(name: str, bench: Bench) -> Iterator[Result]:
    """Runs a bench and yields its rows. Raises NotDone if a row is missing or not in the catalogue."""
    entry = BENCHES[name]
    module, _, function = entry.run.partition(":")
    left = list(entry.rows)
    for result in getattr(importlib.import_module(f"bench.{module}"), function)(bench):
        if result.name not in left:
            raise NotDone(f"{result.name} is no row of {name}, or was there before")
        if not (result.value > 0 or result.name.startswith(_MAY_BE_NONE)) or not result.runs:
            raise NotDone(f"{result.name}: {result.value} {result.unit} from {result.runs} runs")
        left.remove(result.name)
        yield result
    if missing := [row for row in left if row not in entry.optional]:
        raise NotDone(f"no figure for {', '.join(missing)}")
