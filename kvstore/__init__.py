"""kvstore: a KV-cache offload daemon for LLM inference. What a connector may import is here."""

from kvstore import errors
from kvstore.client.aio import AsyncClient, AsyncNamespace
from kvstore.client.barrier import Guard
from kvstore.client.gpu import DeviceLease, DeviceRoom
from kvstore.client.leases import Lease, PutResult, Room
from kvstore.client.sync import Client, Namespace
from kvstore.cuda.array_interop import wrap as on_device
from kvstore.cuda.buffer import DeviceBuffer
from kvstore.cuda.device_ids import why_not as why_no_gpu
from kvstore.fp8 import Fp8
from kvstore.types import Key, Layout, Tier, chain_keys

__all__ = [
    "AsyncClient",
    "AsyncNamespace",
    "Client",
    "DeviceBuffer",
    "DeviceLease",
    "DeviceRoom",
    "Fp8",
    "Guard",
    "Key",
    "Layout",
    "Lease",
    "Namespace",
    "PutResult",
    "Room",
    "Tier",
    "chain_keys",
    "errors",
    "on_device",
    "why_no_gpu",
]
