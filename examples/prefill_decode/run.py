"""Prefill and decode in two vLLM processes, which share KV through a daemon.

    python run.py MODEL

The prefill process computes the prompt and one token; its connector stores the prompt's blocks, and answers
how many tokens they have. The decode process waits for these blocks, loads them, computes the rest of the
prompt, and generates the answer. README.md lists what this does not do. MODEL is a folder or a name on the
Hugging Face hub. Starts a daemon of its own.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

from kvstore.lab.local_daemon import LocalDaemon

PROMPTS = [f"Chapter {n}. " + " ".join(map(str, range(n, n + 250))) for n in (1000, 2000)]
MAX_MODEL_LEN = 2048
"""The same in both processes: it is part of the identity of KV."""
KV_CACHE_BYTES = 256 << 20
ANSWER_TOKENS = 16


def engine(role: str, model: str, url: str, pipe: Connection) -> None:
    """Answers requests of (prompt, max_tokens, transfer parameters).

    An answer is (prompt tokens, tokens from a cache, tokens of the answer, transfer parameters).
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - slow, and only the engines need it

    llm = LLM(
        model,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enforce_eager=True,  # starts sooner
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url, "deadline_s": 10.0},
        },
    )
    pipe.send("ready")
    while request := pipe.recv():
        prompt, max_tokens, params = request
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        [output] = llm.generate(prompt, sampling, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        pipe.send((len(output.prompt_token_ids), output.num_cached_tokens, tokens, output.kv_transfer_params))
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with LocalDaemon({"dram": {"limit": "512MiB"}}) as daemon:
        pipes, processes = {}, []
        # A producer stores and never loads. A consumer loads and never stores.
        for role in ("kv_producer", "kv_consumer"):
            pipes[role], theirs = spawn.Pipe()
            process = spawn.Process(target=engine, args=(role, sys.argv[1], daemon.url, theirs))
            process.start()
            theirs.close()  # so that recv fails if the process dies
            processes.append(process)
        for pipe in pipes.values():
            pipe.recv()
        prefill, decode = pipes["kv_producer"], pipes["kv_consumer"]
        for prompt in PROMPTS:
            prefill.send((prompt, 1, {"do_remote_decode": True}))
            size, _, [first], params = prefill.recv()
            # With it, vLLM would report the hits of the prefill process instead.
            params.pop("remote_prefill_cached_tokens")
            decode.send((prompt, ANSWER_TOKENS, params))
            _, loaded, tokens, _ = decode.recv()
            print(f"prefill: {size} tokens; decode: {loaded} loaded, {size - loaded} computed", end="; ")
            print(f"{len(tokens)} generated, same first token: {tokens[0] == first}")
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
