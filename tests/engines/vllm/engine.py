"""Engines to test with, as child processes, and what to ask them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines import environments
from tests.spawner import spawn

BLOCK_TOKENS = 32
VOCABULARY = 512
PATIENCE = {"deadline_s": 10.0, "lookup_deadline_s": 0.5}
"""Tests run beside each other, with more processes than cores."""

_LOAD_S = 2.0
"""The least time of a load, for the same reason: a tiny model computes its prompt in less than a pause."""

_ANSWER_S = 300.0

# One thread: two engines and a daemon share two cores here, and OpenMP's threads spin while they wait.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # vLLM cannot load what it compiled ahead of time on a CPU: each start would compile it again.
    "VLLM_USE_AOT_COMPILE": "0",
}


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that depends on its seed from the first token on."""
    dice = random.Random(seed)
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]


def full_blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens of a prompt that can come from a cache: whole blocks, and one token at least is computed."""
    return (tokens - 1) // block_tokens * block_tokens


def connector(daemon: LocalDaemon | str, **extra: Any) -> dict[str, Any]:
    """The flag that makes an engine use the connector, with longer deadlines than the defaults.

    An option that is None has its default.
    """
    options = {name: value for name, value in (PATIENCE | extra).items() if value is not None}
    url = daemon if isinstance(daemon, str) else daemon.url
    return {
        # The connector refuses synchronous loads beside it.
        **({"async_scheduling": False} if options.get("load") == "sync" else {}),
        "kv_transfer_config": {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url, **options},
        },
    }


class Engine:
    """A vLLM engine in a process of its own, by another interpreter than this one if `python` names it: then
    for a bench, and without what makes starts quick.

    Methods are those of `serve.Served`; its errors are raised. `hasty`: a load is given up as early as the
    product does it, not after `_LOAD_S`. `variables`: environment variables of the process.
    """

    mode = ""
    """How the connector loads, where a fixture chose it."""

    start_s = named_s = 0.0
    """What its start took without that of its process, and the time until its weights had a name."""

    def __init__(
        self,
        model: Path,
        python: Path | None = None,
        threads: int = 1,
        hasty: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        environment = os.environ if python is None else environments.environment()
        commands, to_engine = os.pipe()
        from_engine, answers = os.pipe()
        self._pipes = (os.fdopen(to_engine, "w"), os.fdopen(from_engine))
        self._process = spawn(
            [str(python or sys.executable), "-m", "tests.engines.vllm.serve"],
            stdin=commands,
            stdout=answers,
            stderr=sys.__stderr__.fileno() if sys.__stderr__ else None,
            env={
                **environment,
                **ENVIRONMENT,
                "OMP_NUM_THREADS": str(threads),
                "KVSTORE_VLLM_IN_TESTS": str(int(python is None)),
                **variables,
            },
        )
        os.close(commands)
        os.close(answers)
        self._model = model
        try:
            if not hasty:
                self("change", **{"kvstore_vllm.budget:_PATIENCE_LEAST_S": _LOAD_S})
            self.restart(**arguments)
        except BaseException:
            self.close()
            raise

    def restart(self, **arguments: Any) -> None:
        """A new engine in the same process."""
        self._arguments = arguments
        settings = {
            "model": str(self._model),
            "dtype": "float32",
            "max_model_len": 2048,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": 64 << 20,
        }
        self.start_s, self.named_s = self("start", **settings | arguments)

    @contextlib.contextmanager
    def instead(self, **arguments: Any) -> Iterator[None]:
        """For a while the engine has these arguments beside, or instead of, those it has."""
        before = self._arguments
        self.restart(**before | arguments)
        try:
            yield
        finally:
            self.restart(**before)

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Runs a command in the engine's process."""
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        """Starts a command; `receive` waits for its end."""
        self._pipes[0].write(json.dumps({"do": do, **arguments}) + "\n")
        self._pipes[0].flush()

    def receive(self) -> Any:
        """The answer to the oldest command."""
        answers = self._pipes[1]
        assert select.select([answers], [], [], _ANSWER_S)[0], f"no answer in {_ANSWER_S} s"
        line = answers.readline()
        assert line, f"the engine is gone: exit code {self._process.wait(10)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def generate(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        """See `Served.generate`."""
        answers: list[dict[str, Any]] = self("generate", prompts=prompts, **more)
        return answers

    def fresh(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        """Generates with an empty prefix cache of its own: what is cached comes from the store."""
        ends = time.monotonic() + 30
        while not self("reset"):
            assert time.monotonic() < ends, "engine blocks are never let go"
        return self.generate(prompts, **more)

    def hit(self, asked: list[int], tokens: int, **more: Any) -> list[dict[str, Any]]:
        """Generates with this number of tokens from the store, or with fewer if five tries miss: a busy
        machine may be too slow to load them in time.
        """
        for _ in range(5):
            answer = self.fresh([asked], **more)
            if cached(answer) == [tokens]:
                break
        return answer

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipes[1].close()

    def kill(self) -> None:
        """Ends the process as a crash would."""
        self._process.kill()
        self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def said(answers: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Tokens and logprobs, without where the prompt's KV came from."""
    return [(answer["tokens"], answer["logprobs"]) for answer in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    """How many tokens of each prompt were not computed, by vLLM's own count."""
    return [answer["cached"] for answer in answers]


def farthest(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> float:
    """The largest difference between two runs' logprobs of the same tokens; infinite if tokens differ."""
    if [tokens for tokens, _ in one] != [tokens for tokens, _ in other]:
        return float("inf")
    apart = [0.0]
    for (_, steps), (_, others) in zip(one, other, strict=True):
        for step, twin in zip(steps, others, strict=True):
            known = dict(map(tuple, twin))
            apart += [abs(logprob - known[token]) for token, logprob in step if token in known]
    return max(apart)
