"""Two engine processes share a system prompt: the second one computes only its own question."""

import multiprocessing

import numpy as np

from kvstore import Client, Layout, chain_keys
from kvstore.lab.local_daemon import LocalDaemon

layout = Layout(model="llama-3-8b", block_tokens=16, block_bytes=1 << 20)
SYSTEM_PROMPT = list(range(256))


def engine(name: str, url: str, question: list[int]) -> None:
    """Serves one prompt: loads its stored prefix, computes the other blocks, and stores these."""
    keys = chain_keys(SYSTEM_PROMPT + question, layout.block_tokens)
    with Client(url) as client:
        ns = client.namespace(layout)
        kv = np.empty((len(keys), layout.block_bytes), np.uint8)
        loaded = ns.get(keys, kv)
        for i in range(loaded, len(keys)):
            kv[i] = i  # stands for the prefill of 16 tokens
        ns.put(keys[loaded:], kv[loaded:], parent=keys[loaded - 1] if loaded else None)
        print(f"{name}: {loaded} blocks loaded, {len(keys) - loaded} computed", flush=True)


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with LocalDaemon({"dram": {"limit": "128MiB"}}) as daemon:
        for name, question in (("first engine", [1] * 32), ("second engine", [2] * 32)):
            process = spawn.Process(target=engine, args=(name, daemon.url, question))
            process.start()
            process.join()
