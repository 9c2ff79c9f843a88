"""A daemon's part in a shared folder, as a program: `python -m tests.tiers.network.sharing ROLE URL LIMIT`.

It prints a line for each write that went well, or how one ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Outcome
from kvstore.tiers.network.filesystem import capacity_manager, membership
from tests.tiers.network.contract import block

BEAT_S, LEASE_S = 0.05, 2.0
BLOCK_BYTES = 50_000


def hurry(patch: pytest.MonkeyPatch) -> None:
    """All that daemons do in seconds, in parts of one."""
    patch.setattr(membership, "BEAT_S", BEAT_S)
    patch.setattr(membership, "LEASE_S", LEASE_S)
    patch.setattr(membership, "IDLE_S", 1.0)
    patch.setattr(capacity_manager, "LEASE_S", LEASE_S)


def _fall(by: int) -> None:
    """This process stops, or dies, where it would rename a block into place."""
    rename = os.rename

    def renaming(source: str, target: str, **folders: int) -> None:
        if source.isdecimal():
            print("here", flush=True)
            os.kill(os.getpid(), by)
            time.sleep(0.1)
        rename(source, target, **folders)

    os.rename = renaming


def main(role: str, url: str, limit_bytes: int) -> None:
    hurry(pytest.MonkeyPatch())
    backend = open_backend(BackendSettings(url, limit_bytes))
    number = 0
    while role == "writes":
        put = block(f"{os.getpid()} {number}".encode(), BLOCK_BYTES)
        number += 1
        if backend.write([put], time.monotonic() + 5) == [Outcome.OK]:
            print("ok", flush=True)
        else:
            time.sleep(0.01)
    while role == "watches":
        time.sleep(1)
    _fall({"stops": signal.SIGSTOP, "dies": signal.SIGKILL}[role])
    [outcome] = backend.write([block(b"late", BLOCK_BYTES)], time.monotonic() + 20)
    print(outcome.name, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
