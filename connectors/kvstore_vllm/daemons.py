"""The daemons of an engine. Shards of its KV are spread over them, so that none has to serve all shards."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import Client, Layout, split_urls
from kvstore_vllm.identity import shard_number


class Daemons:
    """Clients of the daemons of an engine, for one tenant. They connect when they are first used.

    Shard n has daemon n modulo their number, so the blocks of one layout are all in one daemon.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    @classmethod
    def at(cls, urls: str, deadline_s: float) -> Daemons:
        """Returns the daemons at URLs separated by commas; empty: the default daemon. Raises MisuseError."""
        return cls([Client(url, deadline_s=deadline_s, strict=True) for url in split_urls(urls)])

    @property
    def deadline_s(self) -> float:
        """The deadline of calls without one of their own."""
        return self._clients[0].deadline_s

    def of(self, layout: Layout) -> Client:
        """Returns the client of the daemon that has the blocks of a layout."""
        if len(self._clients) == 1:
            return self._clients[0]
        return self._clients[shard_number(layout.shard) % len(self._clients)]

    def for_token(self, token: str, deadline_s: float) -> Daemons:
        """Returns the same daemons for the tenant of a token."""
        urls = [f"unix://{client.path}" for client in self._clients]
        return Daemons([Client(url, token, deadline_s, strict=True) for url in urls])

    def ping(self) -> None:
        """Asks each daemon for an answer. Raises the first one's error."""
        for client in self._clients:
            client.ping()

    def close(self) -> None:
        """Closes all connections."""
        for client in self._clients:
            client.close()
