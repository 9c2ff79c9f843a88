"""The demo: chats with a common system prompt, a daemon with little DRAM and an NVMe tier, a SIGKILL midway.

It shows which tier served the blocks of each turn, and what was measured for each promise: bytes compared,
bytes against limits, blocks lost, a call to the dead daemon, and requests of another tenant for the same
blocks. It fails if a promise was not kept.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console
from rich.status import Status

from kvstore import Client, Layout, chain_keys
from kvstore.config import format_size
from kvstore.errors import UnavailableError
from kvstore.lab.demo.local_admin import LocalAdmin
from kvstore.lab.demo.report import Findings, print_head, print_kill, print_next, print_promises, print_turn
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.replay import Engine, Tally

LAYOUT = Layout(model="demo", revision="1", dtype="bfloat16", block_tokens=16, block_bytes=256 << 10)
LIMITS_BYTES = {"dram": 32 << 20, "nvme": 256 << 20}
CHATS, TURNS, KILLED_BEFORE_TURN = 6, 5, 4
SYSTEM_TOKENS, TURN_TOKENS = 256, 160
DEADLINE_S = 10.0
DEAD_DEADLINE_S = 0.05
TENANTS = ("chat", "other")

_STAY_POLL_S = 0.5


class Chats:
    """Chats that start with one system prompt and grow turn by turn. Every run is the same."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(7)
        system = self._tokens(SYSTEM_TOKENS)
        self._prompts = [system for _ in range(CHATS)]

    def turn(self) -> list[list[bytes]]:
        """Adds one turn to every chat. Returns the keys of each prompt, in the order of the requests."""
        self._prompts = [np.concatenate([prompt, self._tokens(TURN_TOKENS)]) for prompt in self._prompts]
        order = self._rng.permutation(CHATS)
        return [chain_keys(self._prompts[i], LAYOUT.block_tokens) for i in order]

    def _tokens(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._rng.integers(0, 128_256, n)


def run(console: Console, program: str = "kvstore", stay: bool = False) -> bool:
    """Runs the demo and prints its result. Returns whether every promise was kept.

    `program` is how the caller starts `kvstore`, for the commands that are printed at the end. `stay`: the
    daemon and a dashboard run until KeyboardInterrupt.
    """
    start_s = time.perf_counter()
    tokens = {name: secrets.token_urlsafe(32) for name in TENANTS}
    admin = LocalAdmin() if stay else None
    _introduce(console)
    with ExitStack() as stack:
        with console.status("starting a daemon") as status:
            daemon = stack.enter_context(LocalDaemon(_settings(tokens, admin), supervised=True))
            if admin is not None:
                status.update("starting the dashboard")
                stack.callback(admin.stop)
                admin.start(daemon.folder)
            found = _Play(daemon, tokens, console, status).run()
        console.print()
        kept = print_promises(console, found)
        console.print(f"\n{time.perf_counter() - start_s:.0f} s in total.")
        if admin is not None:
            _stay(console, program, daemon, admin)
    if admin is None:
        print_next(console, _next(program))
    return kept


def _introduce(console: Console) -> None:
    dram, nvme, block = map(format_size, (*LIMITS_BYTES.values(), LAYOUT.block_bytes))
    console.print(f"A daemon with [green]{dram} DRAM[/] and [yellow]{nvme} NVMe[/] in a temporary folder.")
    console.print(f"{CHATS} chats share a system prompt. A block is {LAYOUT.block_tokens} tokens, {block}.\n")


def _settings(tokens: dict[str, str], admin: LocalAdmin | None) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {tier: {"limit": nbytes} for tier, nbytes in LIMITS_BYTES.items()}
    settings["tenants"] = {
        name: {"tokens": [{"hash": f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"}]}
        for name, token in tokens.items()
    }
    return settings if admin is None else settings | {"admin": admin.section}


def _next(program: str) -> list[tuple[str, str]]:
    """Returns three commands to try after the demo, with their purpose."""
    return [
        (f"{program} demo --stay", "the same, then the dashboard in a browser"),
        (f"{program} serve", "a daemon of your own, until Ctrl-C"),
        (f"{program} top", "in another terminal: its tiers, hits and calls"),
    ]


def _stay(console: Console, program: str, daemon: LocalDaemon, admin: LocalAdmin) -> None:
    """Prints how to reach the daemon and the dashboard, and waits for Ctrl-C."""
    console.print("The daemon and its dashboard run until Ctrl-C:")
    console.print(f"  dashboard  {admin.url}", highlight=False)
    console.print(f"  token      {admin.token}", highlight=False)
    top = f"{program} top --socket {daemon.socket}"
    console.print(f"  terminal   {top}", highlight=False, soft_wrap=True)
    try:
        while True:
            admin.check()
            time.sleep(_STAY_POLL_S)
    except KeyboardInterrupt:
        console.print("\nStopping both.")


class _Play:
    """One run of all turns against a daemon, with the kill and the other tenant."""

    def __init__(self, daemon: LocalDaemon, tokens: dict[str, str], console: Console, status: Status) -> None:
        self._daemon, self._tokens, self._console, self._status = daemon, tokens, console, status
        self._found = Findings(LIMITS_BYTES, LAYOUT.block_bytes, KILLED_BEFORE_TURN)
        self._stored: set[bytes] = set()

    def run(self) -> Findings:
        """Prints one line per turn. Returns the findings."""
        url, (chat, other) = self._daemon.url, TENANTS
        prompts: list[list[bytes]] = []
        chats = Chats()
        print_head(self._console)
        with (
            Client(url, token=self._tokens[chat], deadline_s=DEADLINE_S) as client,
            Client(url, token="", deadline_s=DEADLINE_S) as operator,
        ):
            engine = Engine(client, LAYOUT)
            for turn in range(1, TURNS + 1):
                if turn == KILLED_BEFORE_TURN:
                    self._kill(client, operator, prompts)
                self._status.update(f"turn {turn} of {TURNS}")
                prompts = chats.turn()
                self._turn(engine, operator, prompts)
                print_turn(self._console, turn, self._found.turns[-1], LAYOUT.block_bytes)
        with Client(url, token=self._tokens[other], deadline_s=DEADLINE_S, strict=True) as stranger:
            namespace = stranger.namespace(LAYOUT)
            self._found.other_asked = len(set().union(*prompts))
            self._found.other_found = sum(namespace.lookup(keys) for keys in prompts)
        return self._found

    def _turn(self, engine: Engine, operator: Client, prompts: list[list[bytes]]) -> None:
        """Sends the prompts of one turn."""
        total = Tally()
        for keys in prompts:
            tally = engine.prompt(keys)
            self._found.forgotten += len(self._stored.intersection(keys)) - tally.served
            self._stored.update(keys[: len(keys) - tally.denied])
            total.add(tally)
            for tier in operator.status()["tiers"]:
                most = max(self._found.used_bytes.get(tier["name"], 0), tier["used_bytes"])
                self._found.used_bytes[tier["name"]] = most
        self._found.turns.append(total)

    def _kill(self, client: Client, operator: Client, prompts: list[list[bytes]]) -> None:
        """Kills the daemon, calls it while it is dead, and waits until its successor answers."""
        self._status.update("killing the daemon")
        print_kill(self._console)
        namespace = client.namespace(LAYOUT)
        self._daemon.kill()
        start_s = time.perf_counter()
        self._found.dead_found = namespace.lookup(prompts[0], deadline_s=DEAD_DEADLINE_S)
        self._found.dead_s = time.perf_counter() - start_s
        self._daemon.start()
        for each in (client, operator):
            _wait_until_connected(each)


def _wait_until_connected(client: Client) -> None:
    """Waits for the client to reconnect. A miss while the client backs off would not be the daemon's."""
    give_up_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            client.status()
            return
        except UnavailableError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)
