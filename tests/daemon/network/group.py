"""Several daemons on one network tier, and what they tell about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.network import objects
from kvstore.tiers.network.base import Name
from tests.daemons import SMALL, eventually

PATIENT = {"timeout": "5s"}
"""A busy machine may take longer for a file than the timeouts of the tests that have their own."""


@contextmanager
def nodes(
    url: str, n: int = 2, settings: Any = SMALL, supervised: bool = False, **more: Any
) -> Iterator[list[Client]]:
    """So many daemons on one network tier, and a client of each."""
    with ExitStack() as stack:
        clients = []
        for _ in range(n):
            settings = {**settings, "network": {"url": url, **PATIENT, **more}}
            daemon = stack.enter_context(LocalDaemon(settings, supervised=supervised))
            client = stack.enter_context(Client(daemon.url, deadline_s=20, strict=True))
            client.daemon = daemon  # type: ignore[attr-defined]
            eventually(lambda client=client: network(client)["usable"])
            clients.append(client)
        yield clients


def network(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = client.status()["network"]
    return state


def counted(client: Client, what: str) -> int:
    n: int = network(client)["counters"].get(what, 0)
    return n


def there(client: Client, n: int) -> None:
    """Waits until a node has sent so many blocks."""
    eventually(lambda: counted(client, "written_ok_blocks") >= n)


def object_of(folder: Path, layout: Layout, key: bytes) -> Path:
    return folder / objects.path(Name(layout.fingerprint(), key))
