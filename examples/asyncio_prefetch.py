"""Many requests in one event loop: prefetches prefixes from NVMe to DRAM, then reads them without a copy."""

import asyncio

import numpy as np

from kvstore import AsyncClient, Layout, chain_keys
from kvstore.lab.local_daemon import LocalDaemon

layout = Layout(model="llama-3-8b", block_tokens=16, block_bytes=1 << 20)
settings = {"dram": {"limit": "64MiB"}, "nvme": {"limit": "512MiB"}}


async def serve(ns, prompt: list[int]) -> tuple[int, int]:
    """Returns how many blocks of a prompt are ready in DRAM, and the sum of their first bytes."""
    keys = chain_keys(prompt, layout.block_tokens)
    await ns.prefetch(keys)  # returns at once; the daemon loads the blocks
    with await ns.acquire(keys, deadline_s=5.0) as lease:
        return len(lease), sum(block[0] for block in lease.blocks)


async def main() -> None:
    prompts = [[user] * 8 + list(range(120)) for user in range(32)]  # eight blocks each, 256 MiB together
    with LocalDaemon(settings) as daemon:
        async with AsyncClient(daemon.url, deadline_s=10.0) as client:
            ns = client.namespace(layout)
            for user, prompt in enumerate(prompts):
                keys = chain_keys(prompt, layout.block_tokens)
                await ns.put(keys, np.full((len(keys), layout.block_bytes), user, np.uint8))
            results = []
            for some in range(0, len(prompts), 4):  # DRAM holds a quarter of all blocks
                results += await asyncio.gather(*(serve(ns, prompt) for prompt in prompts[some : some + 4]))
            for user, (blocks, total) in enumerate(results):
                assert total == user * blocks
            print(sum(blocks for blocks, _ in results), "blocks served of", 8 * len(prompts))


asyncio.run(main())
