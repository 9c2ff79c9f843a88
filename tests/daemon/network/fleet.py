"""A group of daemons, some of another version, under load: engines compare what they read with an oracle."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Client
from kvstore.daemon.network.epochs import CHECK_EVERY_S
from kvstore.daemon.network.executor import HEALTH_CHECK_EVERY_S
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemon.network.group import network
from tests.daemons import WITH_NVME, eventually, log_of, names, new_layout, payload, room_for

BOUND_S = CHECK_EVERY_S + 1.5
"""The documented bound of deletions on other nodes, and time for calls on a busy machine."""

BACK_S = 2 * HEALTH_CHECK_EVERY_S + BOUND_S
"""The same for a node that had no network, from its end on: until the next health check, and its duration."""

PROMPTS, BLOCKS = 12, 8
_REPOSITORY = Path(__file__).parents[3]
_CHANGED_IN = "kvstore/daemon/network/epoch_objects.py"

WIRE_BEFORE = "import kvstore.wire.messages as m; m.VERSION -= 1"
"""Runs first in a daemon of the other version: this code with the wire version before its own."""


def has_code_before() -> bool:
    """Returns whether there is a git with the last code that did not tell other nodes of deleted keys."""
    return bool(_code_before())


def code_before(folder: Path) -> str:
    """Unpacks that code. Returns what runs first in a daemon of that version."""
    archive = _git("archive", _code_before(), "kvstore")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    path = str(folder)
    first = f"import sys; sys.path.insert(0, {path!r}); import kvstore"
    return f"{first}; assert kvstore.__file__.startswith({path!r})"


def _code_before() -> str:
    """Returns a commit, empty if there is none: a clone may lack the history."""
    added = _git("log", "--diff-filter=A", "--format=%H", "--", _CHANGED_IN).decode().split()
    return _git("rev-parse", "--verify", "--quiet", f"{added[0]}^").decode().strip() if added else ""


def _git(*args: str) -> bytes:
    """Returns what git prints; nothing if it fails or is not installed."""
    if shutil.which("git") is None:
        return b""
    return subprocess.run(["git", "-C", str(_REPOSITORY), *args], capture_output=True, check=False).stdout


class Daemon(LocalDaemon):
    """A daemon of this version, or of another one: that in which `first` runs first."""

    first = ""

    def _command(self) -> list[str]:
        if not self.first:
            return super()._command()
        run = (
            "from pathlib import Path; from kvstore.daemon.main import run; sys.exit(run(Path(sys.argv[1])))"
        )
        code = f"import sys; {self.first}; {run}"
        return [sys.executable, "-P", "-c", code, str(self.folder / "kvstore.toml")]


class Fleet:
    """Daemons, an engine of each, and an oracle.

    The bytes of a block are those of its key and the number of its deletions. So an engine knows what is
    wrong (bytes of another key or of none), and what is stale: bytes from before a deletion that was
    acknowledged longer ago than the bound. `seen` counts both, and hits and misses. `lag_s` is the longest
    time after an acknowledgement at which an engine read deleted bytes, of a node that was up.
    """

    def __init__(self, daemons: Sequence[Daemon], clients: Sequence[Client]) -> None:
        self.daemons = daemons
        self.clients = clients
        self.seen: Counter[str] = Counter()
        self.lag_s = self.slowest_s = 0.0
        self.problems: list[str] = []
        self._layout = new_layout()
        self.prompts = [names(BLOCKS, f"prompt {i}") for i in range(PROMPTS)]
        self._deletions = {key: 0 for keys in self.prompts for key in keys}
        self._deleted_at: dict[tuple[bytes, int], float] = {}
        self._payloads: dict[bytes, tuple[bytes, int]] = {}
        self._excused_until = [0.0] * len(daemons)
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._engines = [threading.Thread(target=self._engine, args=(i,)) for i in range(len(daemons))]

    def start(self) -> None:
        for engine in self._engines:
            engine.start()

    def end(self) -> None:
        """Ends the engines. Fails if one has read wrong or stale bytes, or if a daemon has logged a bug."""
        self._stop.set()
        for engine in self._engines:
            engine.join()

    def check(self) -> None:
        assert self.problems == []
        assert (self.seen["wrong"], self.seen["stale"]) == (0, 0)
        assert "Traceback" not in "".join(map(log_of, self.daemons))

    # -- the engines

    def _engine(self, who: int) -> None:
        dice, out = random.Random(who), room_for(BLOCKS)
        ns = self.clients[who].namespace(self._layout)
        while not self._stop.is_set():
            keys = dice.choice(self.prompts)
            began = time.monotonic()
            try:
                n = ns.get(keys, out)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                for key, block in zip(keys[:n], out, strict=False):
                    self._look(who, key, block, began)
                self.seen["hits" if n == len(keys) else "misses"] += 1
                self.seen[f"hits {who}"] += n == len(keys)
                if n < len(keys):
                    with self._writing:
                        blocks = b"".join(self._bytes(key, self._deletions[key]) for key in keys)
                        ns.put(keys, np.frombuffer(blocks, np.uint8).reshape(len(keys), -1))
            except Exception as error:  # engines never see one
                self.problems.append(f"engine {who}: {error!r}")
                return
            time.sleep(0.005)

    def _look(self, who: int, key: bytes, block: Any, began: float) -> None:
        raw, now = block.tobytes(), self._deletions[key]
        n = next((n for n in range(now, -1, -1) if self._bytes(key, n) == raw), None)
        if n is None:
            self.seen["wrong"] += 1
        elif (deleted_at := self._deleted_at.get((key, n))) is not None and began > self._excused_until[who]:
            self.lag_s = max(self.lag_s, began - deleted_at)
            self.seen["stale"] += began > max(deleted_at + BOUND_S, self._excused_until[who])

    def _bytes(self, key: bytes, n: int) -> bytes:
        return payload(key, salt=n)

    # -- what happens to them

    def goes_on(self, *nodes: int, within_s: float = 30.0) -> None:
        """Waits until the engines of these nodes have more hits."""
        before = self.seen.copy()
        eventually(lambda: all(self.seen[f"hits {i}"] > before[f"hits {i}"] + 10 for i in nodes), within_s)

    def delete(self, who: int, keys: Sequence[bytes] | None = None) -> None:
        """Deletes keys, or the whole namespace, on one node. Afterwards, no engine stores earlier bytes."""
        with self._writing, Client(self.daemons[who].url, deadline_s=20, strict=True) as client:
            client.namespace(self._layout).invalidate(keys)
            now = time.monotonic()
            for key in self._deletions if keys is None else keys:
                self._deleted_at[key, self._deletions[key]] = now
                self._deletions[key] += 1

    def replace(self, who: int, first: str) -> None:
        """Stops a node in order and starts it in another version."""
        self._excused_until[who] = float("inf")
        self.daemons[who].stop()
        self.daemons[who].first = first
        self.daemons[who].start()
        self._comes_back(who, BOUND_S)

    def lose(self, who: int) -> None:
        """Kills a node."""
        self._excused_until[who] = float("inf")
        self.daemons[who].kill()

    def restart(self, who: int) -> None:
        self.daemons[who].start()
        self._comes_back(who, BOUND_S)

    @contextmanager
    def without_network(self, who: int) -> Iterator[None]:
        """A time in which a node may not know of deletions."""
        self._excused_until[who] = float("inf")
        try:
            yield
        finally:
            self._comes_back(who, BACK_S)

    def _comes_back(self, who: int, within_s: float) -> None:
        self._excused_until[who] = time.monotonic() + within_s

    def uses_network(self, who: int) -> bool:
        return bool(network(self.clients[who])["usable"])


@contextmanager
def fleet(networks: Sequence[dict[str, Any]], first: str = "") -> Iterator[Fleet]:
    """A daemon of the version of `first` for each network tier, under load until the end of the block."""
    with ExitStack() as stack:
        daemons, clients = [], []
        for settings in networks:
            daemon = Daemon({**WITH_NVME, "network": {"timeout": "1s", **settings}})
            daemon.first = first
            daemons.append(stack.enter_context(daemon))
            clients.append(stack.enter_context(Client(daemon.url, deadline_s=2)))
            eventually(lambda client=clients[-1]: network(client)["usable"])
        made = Fleet(daemons, clients)
        made.start()
        try:
            yield made
        finally:
            made.end()
        made.check()
