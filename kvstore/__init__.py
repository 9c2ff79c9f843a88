"""kvstore: a KV-cache offload daemon for LLM inference. This module is the public API for connectors."""

from kvstore import errors
from kvstore.client.aio import AsyncClient, AsyncNamespace
from kvstore.client.barrier import ExceptionBarrier
from kvstore.client.calls.tracing import trace_parent
from kvstore.client.calls.writes import Put
from kvstore.client.checks import split_urls
from kvstore.client.estimates import Estimate, StoredPrefix
from kvstore.client.gpu import DeviceLease, DeviceReservation
from kvstore.client.leases import Lease, PutResult, Reservation
from kvstore.client.paged_memory import PagedLayer, PagedMemory
from kvstore.client.sync import Client, Namespace
from kvstore.cuda.array_interop import wrap as on_device
from kvstore.cuda.device import DeviceBuffer
from kvstore.cuda.device_ids import why_not as why_no_gpu
from kvstore.fp8 import Fp8
from kvstore.options import parse_options
from kvstore.types import Key, Layout, Tier, chain_keys
from kvstore.weights.digest import FilesDigest, files_digest, newest_file, process_started_ns
from kvstore.weights.naming import Weights, WeightsNaming

# Earlier names of these classes. Callers may still import them.
Guard, Room, DeviceRoom = ExceptionBarrier, Reservation, DeviceReservation

__all__ = [
    "AsyncClient",
    "AsyncNamespace",
    "Client",
    "DeviceBuffer",
    "DeviceLease",
    "DeviceReservation",
    "Estimate",
    "ExceptionBarrier",
    "FilesDigest",
    "Fp8",
    "Key",
    "Layout",
    "Lease",
    "Namespace",
    "PagedLayer",
    "PagedMemory",
    "Put",
    "PutResult",
    "Reservation",
    "StoredPrefix",
    "Tier",
    "Weights",
    "WeightsNaming",
    "chain_keys",
    "errors",
    "files_digest",
    "newest_file",
    "on_device",
    "parse_options",
    "process_started_ns",
    "split_urls",
    "trace_parent",
    "why_no_gpu",
]
