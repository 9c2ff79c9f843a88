"""kvstore: a KV-cache offload daemon for LLM inference. What a connector may import is here."""

from kvstore import errors
from kvstore.client.aio import AsyncClient, AsyncNamespace
from kvstore.client.guard import Guard
from kvstore.client.holds import Lease, PutResult, Room
from kvstore.client.sync import Client, Namespace
from kvstore.types import Key, Layout, Tier, chain_keys

__all__ = [
    "AsyncClient",
    "AsyncNamespace",
    "Client",
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
]
