"""The engine's memory as bytes: every layout, on the host and through a device's way, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore import Client, Layout, PagedLayer
from kvstore.cuda.device import Gpu, uuids
from kvstore.errors import ConfigError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_vllm.pages import SKIPPED, DevicePages, DirectPages, _rows, check_covered, pages_of
from tests.cuda.faking import fake_cuda
from tests.daemons import eventually, names

BLOCKS, HEADS, TOKENS, WIDTH = 8, 2, 32, 64
SHAPE = (BLOCKS, HEADS, TOKENS, WIDTH)


def caches(order: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two layers of random KV, as views (block, head, token, width) of memory in another order of axes."""
    axes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH, "L": 2}
    raw = torch.randint(0, 256, [axes[a] for a in order] + [dtype.itemsize], dtype=torch.uint8, device=device)
    memory = raw.view(dtype).squeeze(-1).permute([order.index(a) for a in "LBHNC"])
    return {f"layer.{i}": memory[i] for i in range(2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("way", [DirectPages, DevicePages])
def test_blocks_are_loaded_into_other_pages(
    client: Client, way: type, order: str, dtype: torch.dtype
) -> None:
    """A device's way is tried on host memory: there is no device here."""
    kv = caches(order, dtype)
    before = {name: cache.clone() for name, cache in kv.items()}
    pages: Any = pages_of(kv, BLOCKS)
    assert isinstance(pages, DirectPages)
    assert pages.block_bytes == 2 * HEADS * TOKENS * WIDTH * dtype.itemsize
    if way is DevicePages:
        pages = DevicePages([_rows(name, cache, BLOCKS) for name, cache in kv.items()])
    keys = names(2, f"{way.__name__} {order} {dtype}")
    ns = client.namespace(Layout(model="pages", block_bytes=2 * pages.block_bytes))
    with ns.reserve(keys) as room:
        pages.save(room, 0, [[1, 5], [0, 7]])
        assert room.commit().stored == 2
    for cache in kv.values():
        cache.zero_()
    with ns.acquire(keys) as lease:
        assert pages.load(lease, 0, [[3, SKIPPED]]) == 1
        assert pages.load(lease, 1, [[SKIPPED, 4]]) == 1
    for name, cache in kv.items():
        raw, was = cache.view(torch.uint8), before[name].view(torch.uint8)
        assert torch.equal(raw[3], was[1])
        assert torch.equal(raw[4], was[7])
        assert not raw[[0, 1, 2, 5, 6, 7]].any()


@pytest.mark.parametrize("pool", [True, False])
def test_a_gpus_pages_are_filled_by_kernels(pool: bool) -> None:
    """On a fake of cupy, for control flow: of a pool of the daemon's there, or of DRAM."""
    settings = {"dram": {"limit": "16MiB"}, "hbm": {"limit": "16MiB" if pool else 0}, "scrub": {"rate": 0}}
    rows, row_bytes = 8, 1000
    with fake_cuda(), LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=20) as client:
        eventually(lambda: all(tier["capacity_bytes"] for tier in client.status()["tiers"]))
        gpu = Gpu.open(uuids()[0])
        memory = [gpu.allocate(rows * 2 * row_bytes) for _ in range(3)]
        # The rows of two layers in one piece of memory, and one by itself.
        layers = [PagedLayer(memory[i], 0, 2 * row_bytes, row_bytes) for i in range(2)]
        layers.append(PagedLayer(memory[0], row_bytes, 2 * row_bytes, row_bytes))
        pages, stream = DirectPages(layers, rows), gpu.thread_stream()
        before = torch.randint(0, 256, (3, rows, row_bytes), dtype=torch.uint8)

        def move(out: bool) -> torch.Tensor:
            held = torch.empty_like(before) if out else before
            for i, layer in enumerate(layers):
                for row in range(rows):
                    host = memoryview(held[i, row].numpy())
                    start = layer.start + row * layer.step
                    there = layer.buffer.part(start, start + row_bytes)
                    stream.copy(*((host, there) if out else (there, host)))
            stream.wait()
            return held

        move(out=False)
        keys = names(4, f"gpu pages {pool}")
        ns = client.namespace(Layout(model="gpu pages", block_bytes=2 * pages.block_bytes))
        with ns.reserve(keys, device=pages.device) as room:
            pages.save(room, 0, [[0, 1]])
            pages.save(room, 1, [[2, 3], [4, 5], [6, 7]])
            assert room.commit().stored == 4
        for piece in memory:
            stream.zero(piece)
        stream.wait()
        with ns.acquire(keys, device=pages.device) as lease:
            assert lease.in_hbm is pool
            assert pages.load(lease, 1, [[7, SKIPPED], [SKIPPED, 0], [1, 2]]) == 3
        after = move(out=True)
        for row, was in ((7, 2), (0, 5), (1, 6), (2, 7)):
            assert torch.equal(after[:, row], before[:, was])
        assert not after[:, [3, 4, 5, 6]].any()


def test_kernel_blocks_smaller_than_the_engines_are_joined() -> None:
    kv = {"layer": torch.zeros(SHAPE)}
    pages = pages_of(kv, BLOCKS // 2)
    assert pages.block_bytes == 2 * HEADS * TOKENS * WIDTH * 4


def test_layers_that_share_their_memory_are_one() -> None:
    cache = torch.zeros(SHAPE)
    assert pages_of({"a": cache, "b": cache}, BLOCKS).block_bytes == cache[0].nbytes


def test_a_layer_without_a_group_must_read_the_cache_of_one_with_a_group() -> None:
    cache = torch.zeros(SHAPE)
    check_covered({"a": cache, "b": cache}, [["a"]])
    for caches, alone in (({"a": cache, "b": cache.clone()}, "b"), ({"b": cache}, "a")):
        with pytest.raises(ConfigError, match=f"layer {alone} has a KV cache without a group, or a group"):
            check_covered(caches, [["a"]])


def test_padding_behind_a_state_is_not_stored() -> None:
    """vLLM pads the states of recurrent layers to the size of an attention page."""
    memory = torch.zeros(BLOCKS, 1, 1, 100)
    assert pages_of({"layer": memory[..., :90]}, BLOCKS).block_bytes == 90 * 4


@pytest.mark.parametrize(
    ("kv", "why"),
    [
        ({}, "no KV cache"),
        ({"layer": [torch.zeros(SHAPE)]}, "layer layer keeps its state in several tensors"),
        (
            {"layer": torch.zeros(*SHAPE[:3], 2 * WIDTH)[..., :WIDTH]},
            "layer layer: an engine block is not one run",
        ),
        ({"layer": torch.zeros(SHAPE)}, "layer layer has 8 kernel blocks for 3 blocks"),
    ],
)
def test_memory_that_cannot_be_read_as_blocks_is_refused(kv: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        pages_of(kv, 3)
