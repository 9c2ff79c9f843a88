"""Stores blocks, reads them back, and sees a miss. Starts a daemon of its own."""

import numpy as np

from kvstore import Client, Layout, chain_keys
from kvstore.lab.local_daemon import LocalDaemon

layout = Layout(model="llama-3-8b", revision="main", dtype="bfloat16", block_tokens=16, block_bytes=2 << 20)

with LocalDaemon({"dram": {"limit": "256MiB"}}) as daemon, Client(daemon.url) as client:
    ns = client.namespace(layout)
    prompt = list(range(100))
    keys = chain_keys(prompt, layout.block_tokens)  # six full blocks; the last four tokens are no block
    kv = np.random.default_rng(0).integers(0, 256, (len(keys), layout.block_bytes), np.uint8)
    print("put:", ns.put(keys, kv))

    out = np.empty_like(kv)
    found = ns.get(keys, out)  # copied and verified
    print("get:", found, "of", len(keys), "blocks, equal:", np.array_equal(out, kv))

    # Another prompt with the same first 48 tokens shares three blocks.
    other = chain_keys(prompt[:48] + [7] * 52, layout.block_tokens)
    print("shared prefix:", ns.lookup(other), "blocks")
    print("another prompt:", ns.lookup(chain_keys([1, 2, 3] * 20, layout.block_tokens)), "blocks")
