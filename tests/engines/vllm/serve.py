"""A vLLM engine as a child process: reads a JSON command a line on stdin, answers with a JSON line.

The engine core runs in this process, so that tests can look into both halves of the connector; between two
commands it is stepped until it has nothing left to do, as vLLM's own loop does in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

# Before anything prints: answers have the real stdout, everything else goes where stderr goes.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.distributed.kv_transfer import (  # noqa: E402
    get_kv_transfer_group,
    has_kv_transfer_group,
    kv_transfer_state,
)
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from kvstore.errors import UnavailableError  # noqa: E402


class Served:
    """The commands."""

    llm: LLM | None = None

    def start(self, **arguments: Any) -> None:
        """Makes the engine, instead of the one there was."""
        if self.llm is not None:
            self.core.shutdown()
            self.llm = None
            self._clean_up()
        try:
            self.llm = LLM(
                **{"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False} | arguments
            )
        except Exception:
            self._clean_up()
            raise
        if has_kv_transfer_group():
            self._keep_counts()

    def _clean_up(self) -> None:
        gc.collect()
        cleanup_dist_env_and_memory()

    @property
    def core(self) -> Any:
        """The engine core."""
        assert self.llm is not None
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        """The connector beside the model."""
        return get_kv_transfer_group()

    def _until_idle(self) -> None:
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salt: str | None = None,
        lora: list[Any] | None = None,
        abort_after: int = 0,
    ) -> list[dict[str, Any]]:
        """All prompts at once, greedily: tokens, top logprobs and how many prompt tokens were cached, each;
        and seconds until all answers were there, and until the engine had nothing left to do.

        `abort_after`: all requests are aborted after so many steps, and there is no answer.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=3, detokenize=False, ignore_eos=True
        )
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        adapter = LoRARequest(*lora) if lora else None
        if abort_after:
            engine = self.llm.llm_engine
            ids = [engine.add_request(f"aborted {i}", each, sampling) for i, each in enumerate(asked)]
            for _ in range(abort_after):
                engine.step()
            engine.abort_request(ids, internal=True)
            self._until_idle()
            return []
        started_s = time.perf_counter()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
        answered_s = time.perf_counter()
        self._until_idle()
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    sorted((token, entry.logprob) for token, entry in step.items())
                    for step in output.outputs[0].logprobs
                ],
                "cached": output.num_cached_tokens,
                "answered_s": answered_s - started_s,
                "idle_s": time.perf_counter() - started_s,
            }
            for output in outputs
        ]

    def reset(self, connector: bool = False) -> bool:
        """Empties the engine's own prefix cache."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def plug(self, connected: bool) -> None:
        """Takes the connector out of the engine, and puts it back: the same process, weights and memory.

        Two engines alike differ by more than what a connector costs.
        """
        plugged = self.core.scheduler.connector is not None
        if connected and not plugged:
            self.core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self._unplugged
        elif plugged and not connected:
            self._unplugged = self.core.scheduler.connector, self.worker
            self.core.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None

    def preemptions(self) -> int:
        """How often a request was preempted so far."""
        [metric] = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return metric.value

    def accepted(self) -> int:
        """How many tokens of drafts were accepted so far."""
        [metric] = [m for m in self.llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
        return metric.value

    def drafts(self, group: int) -> list[bool]:
        """Which layers of a group are a draft's, in the order of a stored block."""
        layers = sorted(self.worker._groups[group].layers)
        target = self.core.vllm_config.model_config.hf_config.get_text_config().num_hidden_layers
        numbers = [int(name.split(".layers.")[1].split(".")[0]) for name in layers]
        return [
            name.startswith("draft_model.") or number >= target
            for name, number in zip(layers, numbers, strict=True)
        ]

    def failures(self) -> dict[str, int]:
        """Failed hooks, of both halves."""
        if not has_kv_transfer_group():
            return {}
        return dict(self.core.scheduler.connector._guard.failures + self.worker._guard.failures)

    def layout(self, group: int = 0) -> dict[str, Any]:
        """What the connector's blocks of a group look like."""
        return self.worker._worker.layouts[group].to_map()

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

    def keys(self, prompt: list[int], group: int = 0) -> list[str]:
        """The keys under which a prompt's blocks of a group are stored, in hex."""
        asked = EngineCoreRequest(
            request_id="keys",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request = Request.from_engine_core_request(asked, self.core.request_block_hasher)
        groups = self.core.scheduler.connector._scheduler._groups
        return [key.hex() for key in groups[group].keys(request.block_hashes)]

    def counts(self) -> dict[str, int]:
        """Blocks by what became of them, since the engine was made."""
        self.worker._worker.counts()
        self.core.scheduler.connector._scheduler.counts()
        return {"saved": 0, **self._counted}

    def connected(self) -> bool:
        """Whether both halves reach the daemon again, after backing off from one that was away."""
        try:
            for connector in (self.core.scheduler.connector, self.worker):
                connector._client.ping()
        except UnavailableError:
            return False
        return True

    def sabotage(self, place: str, times: int = sys.maxsize) -> None:
        """Makes something within the connector raise, the first times that it is called."""
        part, name = self._part(place)
        works, left = getattr(part, name), times

        def fail(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise RuntimeError(f"sabotage of {place}")
            return works(*arguments, **more)

        setattr(part, name, fail)

    def repair(self, place: str) -> None:
        """Undoes `sabotage`."""
        part, name = self._part(place)
        delattr(part, name)

    def _part(self, place: str) -> tuple[Any, str]:
        half, _, name = place.partition(".")
        parts = {
            "scheduler": self.core.scheduler.connector._scheduler,
            "lookup": self.core.scheduler.connector._scheduler._lookup,
            "tails": self.core.scheduler.connector._scheduler._tails,
            "worker": self.worker._worker,
            "pages": self.worker._worker._groups[0].pages,
        }
        return parts[half], name

    def _keep_counts(self) -> None:
        """vLLM's own log of them says less than a test wants to know."""
        self._counted = Counter[str]()
        for half in (self.worker._worker, self.core.scheduler.connector._scheduler):
            half.counts = partial(self._keep, half.counts)

    def _keep(self, take: Callable[[], Counter[str]]) -> Counter[str]:
        latest = take()
        self._counted.update(latest)
        return latest


def main() -> None:
    """Answers commands until stdin ends."""
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
