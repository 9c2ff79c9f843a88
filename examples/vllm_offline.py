"""vLLM with its prefixes in a store: generates, empties vLLM's own cache, generates again.

    python vllm_offline.py MODEL

MODEL is a folder or a name on the Hugging Face hub. Starts a daemon of its own.
"""

import sys
import time

from vllm import LLM, SamplingParams

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon

PROMPT = "The numbers from 1 to 400 are " + " ".join(map(str, range(1, 401)))


def connector(url: str) -> dict:
    """Returns the one setting that vLLM needs, here with a deadline for slow machines."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "deadline_s": 10.0},
    }


def generate(llm: LLM) -> list[int]:
    """Returns the tokens of the answer, and prints how many tokens of the prompt vLLM did not compute."""
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from a cache")
    return list(output.outputs[0].token_ids)


def main() -> None:
    with LocalDaemon({"dram": {"limit": "1GiB"}}) as daemon, Client(daemon.url) as client:
        llm = LLM(
            sys.argv[1],
            max_model_len=4096,
            kv_cache_memory_bytes=512 << 20,
            enforce_eager=True,  # starts sooner
            kv_transfer_config=connector(daemon.url),
        )
        first = generate(llm)
        # Blocks are stored in the background; vLLM's own cache can be emptied once that has ended.
        while not llm.reset_prefix_cache():
            time.sleep(0.05)
        second = generate(llm)
        counters = client.status()["counters"]  # a counter is absent before its first event
        stored, served = (counters.get(name, 0) for name in ("stored_blocks", "hit_blocks_dram"))
        print(f"daemon: {stored} blocks stored, {served} served")
        print("equal tokens:", first == second)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
