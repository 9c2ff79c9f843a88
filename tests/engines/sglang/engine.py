"""SGLang's engine in a process of its own, with real scheduler, radix tree and HiCache, on a CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore.lab.local_daemon import LocalDaemon

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ.update(ENVIRONMENT)  # before SGLang is imported, here or in another process

VOCABULARY = 512
PAGE_TOKENS = 16
START_S = 60.0
ANSWER_S = 60.0
FLUSH_S = 20.0
ROUNDING = 1e-4
"""The largest difference of log-probabilities that other sizes of matrices cause."""
BASE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "max_running_requests": 4,
    "page_size": PAGE_TOKENS,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "log_level": "info",
    "random_seed": 0,
    "sleep_on_idle": True,
}
TEST_FOLDER = "KVSTORE_TEST_FOLDER"
"""The environment variable with the folder of a `backend.Watched`."""


def hicache(
    daemon: LocalDaemon | str,
    layout: str = "page_first_direct",
    backend: str = "kvstore_sglang:HiCacheKVStore",
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Options of an engine with the store. `options`: keys of the extra config; None leaves one out."""
    module, name = backend.split(":")
    extra = {
        "backend_name": "kvstore",
        "module_path": module,
        "class_name": name,
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 1,
        "url": daemon if isinstance(daemon, str) else daemon.url,
        "deadline_s": 5.0,
        **options,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(
            {name: value for name, value in extra.items() if value is not None}
        ),
        **(engine or {}),
    }


def prompt(seed: int, tokens: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(3, VOCABULARY) for _ in range(tokens)]


def full_pages(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Tokens of a prompt that a store can have: SGLang computes at least the last one."""
    return (tokens - 1) // page_tokens * page_tokens


class Answer:
    """An answer: tokens, their log-probabilities, and where the prompt's cached tokens came from."""

    def __init__(self, raw: dict[str, Any]) -> None:
        meta = raw["meta_info"]
        self.tokens = list(raw["output_ids"])
        self.logprobs = [each[0] for each in meta["output_token_logprobs"]]
        self.cached = meta["cached_tokens"]
        self.stored = (meta.get("cached_tokens_details") or {}).get("storage", 0)

    def says(self, other: Answer) -> bool:
        """Whether it is the same answer. What is computed behind a cached prefix may be rounded otherwise."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and max(abs(a - b) for a, b in pairs) < ROUNDING


def same(answers: list[Answer], expected: list[Answer]) -> bool:
    """Whether all answers are the same, see `Answer.says`."""
    return all(one.says(other) for one, other in zip(answers, expected, strict=True))


class Ended(RuntimeError):
    """The engine's process has ended; the message is the end of its log."""


class Engine:
    """An engine during the `with` block. `log` is what it has printed."""

    def __init__(self, model: Path, environment: dict[str, str] | None = None, **options: Any) -> None:
        self.model = model
        self._options = {**BASE, "model_path": str(model), **options}
        self._log = Path(tempfile.gettempdir()) / f"kvstore-sglang-{uuid.uuid4().hex}.log"
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Engine:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engines.sglang.imports"])
        self._connection, theirs = context.Pipe()
        arguments = theirs, str(self._log), self._options, self._environment
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()
        try:
            self._receive(START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 12, **sampling: Any) -> list[Answer]:
        """Generates greedily."""
        self.send_prompts(prompts, max_new_tokens, **sampling)
        return self.answers()

    def send_prompts(self, prompts: list[list[int]], max_new_tokens: int = 12, **more: Any) -> None:
        """Sends prompts, for `answers` later."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        what = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **more}
        self._connection.send(("generate", what))

    def answers(self) -> list[Answer]:
        return [Answer(raw) for raw in self._receive(ANSWER_S)]

    def fresh(self, prompts: list[list[int]], **options: Any) -> list[Answer]:
        """Generates with nothing in the engine's own caches, one prompt after the other."""
        answers = list[Answer]()
        for each in prompts:
            self.flush()
            answers += self.generate([each], **options)
        return answers

    def store(self, prompts: list[list[int]], **options: Any) -> list[Answer]:
        """Generates, and waits until all is stored."""
        answers = self.generate(prompts, **options)
        self.flush()
        return answers

    def flush(self) -> None:
        """Empties the engine's caches, on device and host. SGLang refuses while it stores or loads."""
        ends_s = time.monotonic() + FLUSH_S
        while not self("flush_cache"):
            assert time.monotonic() < ends_s, "the cache is not flushed"
            time.sleep(0.01)

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Calls a method of SGLang's Engine; returns whether it has succeeded."""
        self._connection.send((method, arguments))
        return self._receive(ANSWER_S)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _receive(self, within_s: float) -> Any:
        ends_s = time.monotonic() + within_s
        while not self._connection.poll(0.05):
            if not self._process.is_alive():
                raise Ended(self.log[-6000:])
            if time.monotonic() > ends_s:
                raise TimeoutError(f"no answer in {within_s} s: {self.log[-3000:]}")
        try:
            good, value = self._connection.recv()
        except EOFError:
            raise Ended(self.log[-6000:]) from None
        if not good:
            raise RuntimeError(value)
        return value

    def _end(self) -> None:
        pid = self._process.pid
        assert pid
        self._connection.close()
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join(10)
        self._log.unlink(missing_ok=True)


def _serve(connection: Connection, log: str, options: dict[str, Any], environment: dict[str, str]) -> None:
    """Runs an engine and what is asked of it, in a fork that leads a process group."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    # SGLang's processes are forks, too.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    import sglang  # noqa: PLC0415 - it is imported already
    import torch  # noqa: PLC0415

    # With more of them, which thread gets which rows depends on how many rows there are, and so do bits.
    torch.set_num_threads(1)
    # A fork's first parallel operation replaces PyTorch's pool. SGLang's threads that load weights race.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    engine = sglang.Engine(**options)
    connection.send((True, None))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            if method == "generate":
                connection.send((True, _generated(engine, **arguments)))
            else:
                result = getattr(engine, method)(**arguments)
                # Whoever asks has not imported SGLang.
                connection.send((True, result[0] if isinstance(result, tuple) else result.success))
        except Exception:
            connection.send((False, traceback.format_exc()))
    engine.shutdown()


def _generated(engine: Any, **arguments: Any) -> Any:
    """Returns answers as Engine.generate does, which has no arguments for salts."""
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415 - it is imported already

    answers = engine.tokenizer_manager.generate_request(GenerateReqInput(**arguments), None)
    return engine.loop.run_until_complete(anext(answers))
