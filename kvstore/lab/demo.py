"""The demo: chats with a common system prompt, a daemon with little DRAM and an NVMe tier, a SIGKILL midway.

It shows which tier served the blocks of each turn. It fails if a byte is wrong or a stored block is missing.
"""

from __future__ import annotations

import time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import Client, Layout, chain_keys
from kvstore.config import format_size
from kvstore.errors import UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.replay import Engine, Tally
from kvstore.types import Tier

LAYOUT = Layout(model="demo", revision="1", dtype="bfloat16", block_tokens=16, block_bytes=256 << 10)
DRAM_BYTES, NVME_BYTES = 32 << 20, 256 << 20
CHATS, TURNS, KILLED_BEFORE_TURN = 6, 5, 4
SYSTEM_TOKENS, TURN_TOKENS = 256, 160
DEADLINE_S = 10.0

_PICTURE_CELLS = 24
_STYLES = {"dram": ("█", "green"), "nvme": ("▓", "yellow"), "computed": ("░", "bright_black")}


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


def run(console: Console) -> bool:
    """Runs the demo and prints its result. Returns whether no block was wrong, missing or denied."""
    settings = {"dram": {"limit": DRAM_BYTES}, "nvme": {"limit": NVME_BYTES}}
    dram, nvme, block = map(format_size, (DRAM_BYTES, NVME_BYTES, LAYOUT.block_bytes))
    console.print(
        f"A supervised daemon with [green]{dram} DRAM[/] and [yellow]{nvme} NVMe[/] in a temporary folder. "
        f"{CHATS} chats share a system prompt; a block is {LAYOUT.block_tokens} tokens, {block}."
    )
    start_s = time.perf_counter()
    with (
        LocalDaemon(settings, supervised=True) as daemon,
        Client(daemon.url, deadline_s=DEADLINE_S) as client,
    ):
        turns, forgotten = _play(daemon, client, console)
    console.print(_table(turns))
    return _summary(console, turns, forgotten, time.perf_counter() - start_s)


def _play(daemon: LocalDaemon, client: Client, console: Console) -> tuple[list[Tally], int]:
    """Returns one tally per turn, and the number of stored blocks that were misses."""
    engine, chats = Engine(client, LAYOUT), Chats()
    turns: list[Tally] = []
    stored: set[bytes] = set()
    forgotten = 0
    with console.status("") as status:
        for turn in range(1, TURNS + 1):
            if turn == KILLED_BEFORE_TURN:
                status.update("killing the daemon")
                daemon.kill()
                daemon.start()
                _wait_until_connected(client)
            status.update(f"turn {turn} of {TURNS}")
            total = Tally()
            for keys in chats.turn():
                tally = engine.prompt(keys)
                forgotten += len(stored.intersection(keys)) - tally.served
                stored.update(keys[: len(keys) - tally.denied])
                total.add(tally)
            turns.append(total)
    return turns, forgotten


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


def _table(turns: list[Tally]) -> Table:
    table = Table(title="Where each turn's blocks came from", title_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for name in ("turn", "asked", "DRAM", "NVMe", "computed", "served", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_legend(), no_wrap=True)
    for turn, tally in enumerate(turns, 1):
        if turn == KILLED_BEFORE_TURN:
            table.add_row(*[""] * 7, "SIGKILL, then restart")
        blocks = (turn, tally.asked, tally.hits[Tier.DRAM], tally.hits[Tier.NVME], tally.asked - tally.served)
        served = format_size(tally.served * LAYOUT.block_bytes)
        table.add_row(*map(str, blocks), served, str(tally.wrong), _picture(tally))
    return table


def _legend() -> Text:
    return Text(" ").join(Text(f"{cell} {name}", style) for name, (cell, style) in _STYLES.items())


def _picture(tally: Tally) -> Text:
    """Returns a bar of fixed width with one part for each source of blocks."""
    parts = (tally.hits[Tier.DRAM], tally.hits[Tier.NVME], tally.asked - tally.served)
    text, done, drawn = Text(), 0, 0
    for blocks, (cell, style) in zip(parts, _STYLES.values(), strict=True):
        done += blocks
        upto = round(_PICTURE_CELLS * done / tally.asked) if tally.asked else 0
        text.append(cell * (upto - drawn), style)
        drawn = upto
    return text


def _summary(console: Console, turns: list[Tally], forgotten: int, wall_s: float) -> bool:
    total = Tally()
    for tally in turns:
        total.add(tally)
    after = turns[KILLED_BEFORE_TURN - 1]
    console.print(
        f"{total.served} of {total.asked} blocks served "
        f"({format_size(total.served * LAYOUT.block_bytes)}, every byte compared) in {wall_s:.1f} s: "
        f"{total.hits[Tier.DRAM]} from DRAM, {total.hits[Tier.NVME]} from NVMe, "
        f"{after.served} right after the SIGKILL ({after.hits[Tier.DRAM]} of them from DRAM); "
        f"{total.wrong} wrong, {forgotten} forgotten, {total.denied} denied."
    )
    return not (total.wrong or forgotten or total.denied) and after.hits[Tier.DRAM] > 0
