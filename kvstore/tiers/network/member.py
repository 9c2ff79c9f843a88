"""A daemon among those that share a folder."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass

from kvstore.tiers.network.tree import CONTROL, Tree


@dataclass
class Account:
    folder: str
    counted: bool

    def settle(self, nbytes: int) -> None:
        pass


class Member:
    def __init__(self, tree: Tree, limit_bytes: int) -> None:
        host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:64]
        self.id = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._account = Account(f"{CONTROL}/{self.id}", bool(limit_bytes))

    def ready(self, ends: float) -> None:
        pass

    def take(self, nbytes: int) -> Account | None:
        return self._account

    def close(self) -> None:
        pass
