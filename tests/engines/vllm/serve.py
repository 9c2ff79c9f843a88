"""A vLLM engine as a child process: reads a JSON command a line on stdin, answers with a JSON line.

The engine core runs in this process, so that tests can look into both halves of the connector; between two
commands it is stepped until it has nothing left to do, as vLLM's own loop does in a process of its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

# Before anything prints: answers have the real stdout, everything else goes where stderr goes.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from tests.engines.vllm import quick  # noqa: E402

# Tests start engines by the hundred. Benches measure vLLM as it is.
IN_TESTS = os.environ.get("KVSTORE_VLLM_IN_TESTS") == "1"
if IN_TESTS:
    quick.leave_functions_uncompiled()

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, kv_transfer_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector,
)
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.worker import cpu_worker  # noqa: E402, F401

from kvstore.errors import UnavailableError  # noqa: E402
from kvstore.weights import naming  # noqa: E402
from kvstore_vllm.connector import KVStoreConnector  # noqa: E402
from kvstore_vllm.metrics import Figures  # noqa: E402
from tests.engines.vllm.overlap import overlap_steps  # noqa: E402

# Workers import this module too.
overlap_steps()
# vLLM's processes spin while they wait for each other. If they are more than the cores, the daemon and other
# tests get no core for seconds.
shm_broadcast.sched_yield = partial(time.sleep, 0.0005)
# So do its shards in each layer, but not where they talk by sockets.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: not self.unique_name.startswith("tp")
if IN_TESTS:
    quick.collect_between_engines_only()
# Each start walks all modules to replace Triton's kernels by those for CPUs.
CpuPlatform.register_triton_kernel_overrides = staticmethod(  # type: ignore[method-assign]
    cache(CpuPlatform.register_triton_kernel_overrides)
)


class Served:
    """The commands."""

    llm: LLM | None = None

    def __init__(self) -> None:
        self._held = threading.Event()
        self._held.set()

    def start(self, **arguments: Any) -> tuple[float, float]:
        """Makes the engine, instead of the one there was. The seconds until it takes requests, and until its
        weights have a name: on a busy machine, tests could not use the store at once otherwise.
        """
        if self.llm is not None:
            self.core.shutdown()
            self.llm = None
            self._clean_up()
        began_s = time.perf_counter()
        try:
            self.llm = LLM(
                **{"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False} | arguments
            )
        except Exception:
            self._clean_up()
            raise
        start_s = time.perf_counter() - began_s
        self._sabotaged: dict[str, int] = {}
        self._time_steps()
        if self._held.is_set():
            self.idle()
        self._keep_counts()
        return start_s, time.perf_counter() - began_s

    def _clean_up(self) -> None:
        # A start that has failed leaves its connector to the next engine.
        kv_transfer_state.ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        quick.collect()

    @property
    def core(self) -> Any:
        """The engine core."""
        assert self.llm is not None
        return self.llm.llm_engine.engine_core.engine_core

    def _of_ours(self, connector: Any) -> Any:
        """This project's connector: that one, or one within a MultiConnector; None: there is none."""
        return self._of_kind(KVStoreConnector, connector)

    def _of_kind(self, kind: type, connector: Any) -> Any:
        each = [connector, *getattr(connector, "sub_connectors", ())]
        return next((one for one in each if isinstance(one, kind)), None)

    @property
    def scheduling(self) -> Any:
        """The connector beside the scheduler."""
        return self._of_ours(self.core.scheduler.connector)

    @property
    def worker(self) -> Any:
        """The connector beside the model; None: the workers are other processes."""
        return self._of_ours(get_kv_transfer_group() if has_kv_transfer_group() else None)

    @property
    def connectors(self) -> list[Any]:
        """This project's connectors in this process: none, the scheduler's, or also the worker's."""
        return [each for each in (self.scheduling, self.worker) if each is not None]

    @property
    def halves(self) -> list[Any]:
        """What those connectors hand their calls to."""
        return [half for each in self.connectors if (half := each._worker or each._scheduler) is not None]

    @property
    def offloading(self) -> Any:
        """The manager of vLLM's own CPU tier and of the tiers below it."""
        return self._of_kind(OffloadingConnector, self.core.scheduler.connector).scheduler.manager

    @property
    def tier(self) -> Any:
        """The tier below vLLM's CPU tier."""
        [tier] = self.offloading.secondary_tiers
        return tier

    def empty_cpu_tier(self) -> None:
        """Empties vLLM's CPU tier alone, as evictions would: what is loaded comes from the tier below it."""
        self.idle()
        self.offloading.primary_tier.reset_cache()

    def tier_counts(self) -> dict[str, int]:
        """vLLM's own counts of the tier: looked up and found rows, failed loads and stores."""
        names = {
            TieringOffloadingMetrics.CHUNK_QUERIES: "asked",
            TieringOffloadingMetrics.CHUNK_HITS: "found",
            TieringOffloadingMetrics.PROMOTION_JOB_FAILURES: "failed loads",
            TieringOffloadingMetrics.CASCADE_JOB_FAILURES: "failed stores",
        }
        return {
            names[metric.name]: int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name in names and metric.labels.get("tier") == "1:KVStoreTier"
        }

    def tier_failures(self) -> dict[str, int]:
        """Failed calls of the tier, and of its threads."""
        return dict(self.tier._guard.failures)

    def tier_layout(self, group: int = 0) -> dict[str, Any]:
        """What the tier's rows of a group look like."""
        return self.tier._layouts[group].to_map()

    def idle(self) -> None:
        """Steps the engine until it has nothing left to do."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.llm.llm_engine.step()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salt: str | None = None,
        lora: list[Any] | None = None,
        abort_after: int = 0,
        params: list[Any] | None = None,
        idle: bool = True,
        embed: bool = False,
    ) -> list[dict[str, Any]]:
        """All prompts at once, greedily: tokens, top logprobs and how many prompt tokens were cached, each;
        and seconds until all answers were there, and until the engine had nothing left to do.

        `abort_after`: all requests are aborted after so many steps, and there is no answer. `params`: the
        `kv_transfer_params` of each prompt. `idle`: answers when the engine has nothing left to do. `embed`:
        prompts are given as embeddings.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=3, detokenize=False, ignore_eos=True
        )
        samplings = [sampling.clone() for _ in prompts]
        for each, some in zip(samplings, params or (), strict=params is not None):
            each.extra_args = {"kv_transfer_params": some}
        asked = [
            {"prompt_embeds": self._embedded(p)}
            if embed
            else {"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})}
            for p in prompts
        ]
        adapter = LoRARequest(*lora) if lora else None
        if abort_after:
            engine = self.llm.llm_engine
            ids = [engine.add_request(f"aborted {i}", each, sampling) for i, each in enumerate(asked)]
            for _ in range(abort_after):
                engine.step()
            engine.abort_request(ids, internal=True)
            self.idle()
            return []
        started_s = time.perf_counter()
        outputs = self.llm.generate(asked, samplings, use_tqdm=False, lora_request=adapter)
        answered_s = time.perf_counter()
        if idle:
            self.idle()
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    sorted((token, entry.logprob) for token, entry in step.items())
                    for step in output.outputs[0].logprobs
                ],
                "cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
                "answered_s": answered_s - started_s,
                "idle_s": time.perf_counter() - started_s,
            }
            for output in outputs
        ]

    def session(self, name: str, chunks: list[list[int]], stops: list[int], most: int) -> list[list[int]]:
        """The answers of a request that gets its prompt in chunks, each after the answer to the last one.

        `stops`: the token that ends an answer, if it is not at its end by then: it has `most` tokens.
        """
        core, said = self.llm.llm_engine.engine_core, []
        for number, chunk in enumerate([*chunks, [0]]):
            last = number == len(chunks)
            stop = stops[number : number + 1]
            sampling = SamplingParams(
                max_tokens=most, temperature=0, detokenize=False, ignore_eos=True, stop_token_ids=stop
            )
            core.add_request(self._engine_request(name, chunk, sampling, resumable=not last))
            tokens, ended = [], last
            while not ended:
                for output in core.get_output().outputs:
                    tokens += output.new_token_ids
                    ended |= output.finish_reason is not None
            said.append(tokens)
        self.idle()
        return said[:-1]

    def hinted(self, prompt: list[int], actions: list[list[Any]]) -> None:
        """Computes a prompt that an orchestrator has given KV hints: type, version and payload of each."""
        sampling = SamplingParams(max_tokens=1, detokenize=False)
        hints = KvHintsEnvelope("1.0", "message", [KvHintAction("action", *each) for each in actions])
        self.llm.llm_engine.add_request("hinted", {"prompt_token_ids": prompt}, sampling, kv_hints=hints)
        self.idle()

    def reset(self, connector: bool = False) -> bool:
        """Empties the engine's own prefix cache. If saves hold pages, a step frees those that have ended."""
        done = self.llm.reset_prefix_cache(reset_connector=connector)
        if not done:
            self.llm.llm_engine.step()
        return done

    def plug(self, connected: bool) -> None:
        """Takes the connector out of the engine, and puts it back: the same process, weights and memory.

        Two engines alike differ by more than what a connector costs.
        """
        plugged = self.core.scheduler.connector is not None
        if connected and not plugged:
            self.core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self._unplugged
        elif plugged and not connected:
            self._unplugged = self.core.scheduler.connector, get_kv_transfer_group()
            self.core.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None

    def preemptions(self) -> int:
        """How often a request was preempted so far."""
        [metric] = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return metric.value

    def accepted(self) -> list[int]:
        """How many tokens of drafts were accepted so far, and how many were drafted."""
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return [values[f"vllm:spec_decode_num_{which}_tokens"] for which in ("accepted", "draft")]

    def drafts(self, group: int) -> list[bool]:
        """Which layers of a group are a draft's, in the order of a stored block."""
        layers = sorted(self.scheduling._scheduler._groups[group].layers)
        target = self.core.vllm_config.model_config.hf_config.get_text_config().num_hidden_layers
        numbers = [int(name.split(".layers.")[1].split(".")[0]) for name in layers]
        return [
            name.startswith("draft_model.") or number >= target
            for name, number in zip(layers, numbers, strict=True)
        ]

    def overlaps(self) -> bool:
        """Whether a step is scheduled before the output of the last one is there."""
        return self.core.batch_queue is not None

    def hold_digest(self) -> None:
        """Files of weights are not read before `let_digest_go_on`: large ones would take as long."""
        digest = naming.files_digest

        def late(*arguments: Any) -> Any:
            self._held.wait()
            return digest(*arguments)

        self._held.clear()
        naming.files_digest = late

    def let_digest_go_on(self) -> None:
        """Ends `hold_digest`."""
        self._held.set()

    def off(self) -> str:
        """Why the worker serves nothing."""
        return self.worker._off

    def missed(self) -> dict[str, int]:
        """Missed tokens of this process, by reason."""
        return {
            metric.labels["reason"]: int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:kvstore_missed_tokens" and metric.value
        }

    def failures(self) -> dict[str, int]:
        """Failed hooks of the connector's halves that are in this process."""
        return dict(sum((each._guard.failures for each in self.connectors), Counter[str]()))

    def layout(self, group: int = 0) -> dict[str, Any]:
        """What the connector's blocks of a group look like."""
        return self.worker._worker.layouts[group].to_map()

    def layouts(self, group: int = 0) -> list[dict[str, Any]]:
        """What each worker's blocks of a group look like; workers with the same blocks count once."""
        shards = [shard[group] for shard in self.scheduling._scheduler._lookup._layouts]
        return [layout.to_map() for layout in dict.fromkeys(shards)]

    def page_digests(self) -> list[list[str]]:
        """For each worker, see `PageDigests`, which must be the engine's `worker_extension_cls`."""
        return self.llm.collective_rpc("page_digests")

    def num_blocks(self) -> int:
        """The number of KV blocks of the engine."""
        return self.core.scheduler.kv_cache_config.num_blocks

    def groups(self) -> int:
        """The number of groups of layers."""
        return len(self.core.scheduler.kv_cache_config.kv_cache_groups)

    def kv_cache_config(self) -> dict[str, Any]:
        """How the engine lays out its KV: layers and kind of each group, alignment, bytes of a block."""
        config = self.core.scheduler.kv_cache_config
        return {
            "groups": [[list(each.layer_names), repr(each.kv_cache_spec)] for each in config.kv_cache_groups],
            "alignment_tokens": config.cache_hit_alignment_tokens,
            "page_bytes": config.kv_cache_tensors[0].size // config.num_blocks,
            "blocks": config.num_blocks,
        }

    def hashes(self, prompt: list[int]) -> list[str]:
        """The block hashes of a prompt, in hex: the keys of the tier's rows."""
        return [each.hex() for each in self._request(prompt).block_hashes]

    def keys(self, prompt: list[int], group: int = 0, **how: Any) -> list[str]:
        """The keys under which a prompt's blocks of a group are stored, in hex; `how`: see `_request`."""
        request, half = self._request(prompt, **how), self.scheduling._scheduler
        return [key.hex() for key in half._groups[group].keys(request.block_hashes, half._salt(request))]

    def _request(self, prompt: list[int], lora: list[Any] | None = None, embed: bool = False) -> Request:
        asked = self._engine_request("keys", None if embed else prompt, SamplingParams())
        if embed:
            asked.prompt_embeds = self._embedded(prompt)
        asked.lora_request = LoRARequest(*lora) if lora else None
        return Request.from_engine_core_request(asked, self.core.request_block_hasher)

    def _engine_request(
        self, name: str, prompt: list[int] | None, sampling: SamplingParams, resumable: bool = False
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )

    def _embedded(self, prompt: list[int]) -> torch.Tensor:
        """What a user may give instead of the tokens: random values, the same ones for the same token."""
        model = self.core.vllm_config.model_config
        table = torch.randn(
            model.get_vocab_size(), model.get_hidden_size(), generator=torch.Generator().manual_seed(0)
        )
        return table[prompt].to(model.dtype)

    def shorten(self, prompt: list[int], tokens: int) -> None:
        """Leaves this number of leading tokens of a prompt in the engine's own prefix cache."""
        manager = self.core.scheduler.kv_cache_manager
        blocks, _ = manager.get_computed_blocks(self._request(prompt))[:2]
        [block_ids] = blocks.get_block_ids()
        manager.evict_blocks(set(block_ids[tokens // self.core.vllm_config.cache_config.block_size :]))

    def counts(self) -> dict[str, int]:
        """Blocks by what became of them, and what else the connector counts, since the engine was made."""
        for half in self.halves:
            half.counts()
        return {"saved": 0, **self._counted}

    def times(self, metric: str) -> list[float]:
        """What a histogram of the connector has observed since the engine was made, in seconds."""
        self.counts()
        return self._times[metric]

    def connected(self) -> bool:
        """Whether both halves, or the tier, reach the daemon again, after backing off from one away."""
        try:
            for part in [each._daemons for each in self.connectors] or [self.tier._client]:
                part.ping()
        except UnavailableError:
            return False
        return True

    def change(self, **values: Any) -> None:
        """Changes globals of modules, for all later engines of this process: `module:name` and value."""
        for place, value in values.items():
            module, name = place.split(":")
            assert hasattr(importlib.import_module(module), name), place
            setattr(importlib.import_module(module), name, value)

    def deadline(self, deadline_s: float) -> None:
        """Changes the deadline of transfers."""
        for connector in self.connectors:
            for client in connector._daemons._clients:
                client.deadline_s = deadline_s

    def sabotage(self, place: str, times: int = sys.maxsize, signals: list[int] | None = None) -> None:
        """Makes something within the connector raise, the first times that it is called.

        `signals`: a process and a signal. The process gets that instead, and nothing raises.
        """
        part, name = self._part(place)
        works, left = getattr(part, name), times
        self._sabotaged[place] = 0

        def fail(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                self._sabotaged[place] += 1
                if signals is None:
                    raise RuntimeError(f"sabotage of {place}")
                os.kill(*signals)
            return works(*arguments, **more)

        setattr(part, name, fail)

    def repair(self, place: str) -> int:
        """Undoes `sabotage`; how often it took place."""
        part, name = self._part(place)
        delattr(part, name)
        return self._sabotaged.pop(place)

    def longest_step_s(self) -> float:
        """The longest step since the last call, in seconds."""
        longest, self._longest_step_s = self._longest_step_s, 0.0
        return longest

    def places(self) -> list[str]:
        """Where `sabotage` can make the connector raise: every method of its parts."""
        return [
            f"{part}.{name}"
            for part in _PARTS
            if not part.startswith("tier")
            for name, what in vars(type(self._part(f"{part}.")[0])).items()
            if inspect.isfunction(what) and not name.startswith("__")
        ]

    def _part(self, place: str) -> tuple[Any, str]:
        part, _, name = place.partition(".")
        return _PARTS[part](self), name

    def _time_steps(self) -> None:
        engine = self.llm.llm_engine
        step, self._longest_step_s = engine.step, 0.0

        def timed() -> Any:
            began_s = time.perf_counter()
            try:
                return step()
            finally:
                self._longest_step_s = max(self._longest_step_s, time.perf_counter() - began_s)

        engine.step = timed

    def _keep_counts(self) -> None:
        """vLLM's own log of them says less than a test wants to know."""
        self._counted = Counter[str]()
        self._times = defaultdict[str, list[float]](list)
        for half in self.halves:
            half.counts = self._counting(half.counts)

    def _counting(self, take: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def counts() -> dict[str, Any]:
            latest = take()
            self._counted.update(Figures(latest).reduce())
            for name, seconds in latest.items():
                if isinstance(seconds, list):
                    self._times[name] += seconds
            return latest

        return counts


_PARTS: dict[str, Callable[[Served], Any]] = {
    "scheduler": lambda served: served.scheduling._scheduler,
    "lookup": lambda served: served.scheduling._scheduler._lookup,
    "scopes": lambda served: served.scheduling._scheduler._scopes,
    "tails": lambda served: served.scheduling._scheduler._tails,
    "references": lambda served: served.scheduling._scheduler._references,
    "handoffs": lambda served: served.scheduling._scheduler._handoffs,
    "adapters": lambda served: served.scheduling._scheduler._adapters,
    "rate": lambda served: served.scheduling._scheduler._rate,
    "options": lambda served: served.scheduling._scheduler._options,
    "scheduler's figures": lambda served: served.scheduling._scheduler._recorder,
    "worker": lambda served: served.worker._worker,
    "worker's tenants": lambda served: served.worker._worker._tenants,
    "worker's figures": lambda served: served.worker._worker._recorder,
    "pages": lambda served: served.worker._worker._groups[0].pages,
    "tier": lambda served: served.tier,
    "tier lookups": lambda served: served.tier._lookups,
}


def main() -> None:
    """Answers commands until stdin ends."""
    if IN_TESTS:
        quick.fork_workers()
    served = Served()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(served, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
