"""A model of which each rank has a part is refused: ranks' blocks would share their names."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers.distributed import DistributedConfig

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import llama


def refusal(model: Any) -> str:
    with pytest.raises(MisuseError) as refused:
        PrefixCache(model, Client("unix:///nowhere"), revision="one")
    assert refused.value.hint
    return refused.value.message


def rank(number: int, port: int, answers: Any) -> None:
    """One of two processes, each with half of a model's heads."""
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        model = llama()
        config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=2))
        model = model.maybe_distribute_model(model, config, mesh)
        answers.put((refusal(model), model.tp_size))
    finally:
        dist.destroy_process_group()


def test_tensor_parallelism() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.Queue()
    ranks = [spawning.Process(target=rank, args=(i, port, answers)) for i in range(2)]
    for process in ranks:
        process.start()
    try:
        told = [answers.get(timeout=60) for _ in ranks]
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    assert {size for _, size in told} == {2}
    assert all(
        "LlamaForCausalLM is sharded over ranks by tensor parallelism" in message for message, _ in told
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_distributed_weights(alone: Any) -> None:
    model = llama()
    weight = model.model.layers[1].mlp.up_proj
    weight.weight = nn.Parameter(distribute_tensor(weight.weight.data, alone, [Replicate()]))
    assert "weight model.layers.1.mlp.up_proj.weight is a DTensor" in refusal(model)


def test_fsdp(alone: Any) -> None:
    model = llama()
    fully_shard(model, mesh=alone)
    assert "is sharded over ranks by FSDP" in refusal(model)
