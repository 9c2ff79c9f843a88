"""What the demo prints, in 80 columns: a line per turn, a line per promise, the commands to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from kvstore.config import format_size
from kvstore.lab.replay import Tally
from kvstore.types import Tier

WIDTH = 80
_PICTURE_CELLS = 24
_HEAD = " turn  asked  DRAM  NVMe  computed   served  wrong  "
_NAMES = {"dram": "DRAM", "nvme": "NVMe"}
_STYLES = {"dram": ("█", "green"), "nvme": ("▓", "yellow"), "computed": ("░", "bright_black")}


@dataclass(slots=True)
class Findings:
    """What a run has measured. Counts are blocks unless the name says otherwise.

    `forgotten`: stored blocks that were misses. `used_bytes`: the most bytes seen in each tier. `dead_found`
    and `dead_s`: the answer to a call while the daemon was dead, and its time. `other_asked` and
    `other_found`: requests of the other tenant for the same blocks.
    """

    limits_bytes: dict[str, int]
    block_bytes: int
    killed_before_turn: int
    turns: list[Tally] = field(default_factory=list)
    forgotten: int = 0
    used_bytes: dict[str, int] = field(default_factory=dict)
    dead_found: int = 0
    dead_s: float = 0.0
    other_asked: int = 0
    other_found: int = 0

    @property
    def total(self) -> Tally:
        """The sum of all turns."""
        total = Tally()
        for turn in self.turns:
            total.add(turn)
        return total

    @property
    def after_kill(self) -> Tally:
        """The first turn after the SIGKILL."""
        return self.turns[self.killed_before_turn - 1]

    def promises(self) -> list[tuple[bool, str, str]]:
        """Returns for each promise whether it was kept, its name, and the figures."""
        total, after = self.total, self.after_kill
        hits = f"{after.hits[Tier.DRAM]} DRAM and {after.hits[Tier.NVME]} NVMe hits"
        lost = f"{self.forgotten} lost" + (f", {total.denied} denied" if total.denied else "")
        used = ", ".join(
            f"{_NAMES[tier]} {format_size(most)} of {format_size(self.limits_bytes[tier])}"
            for tier, most in self.used_bytes.items()
        )
        held = all(most <= self.limits_bytes[tier] for tier, most in self.used_bytes.items())
        remembered = not (self.forgotten or total.denied) and after.hits[Tier.DRAM] > 0
        apart = self.other_asked > 0 and not self.other_found
        asked = f"the same {self.other_asked} blocks for another tenant"
        return [
            (
                not total.wrong,
                "never wrong",
                f"{total.wrong} of {total.served} blocks wrong, every byte compared",
            ),
            (held, "never over the limit", f"{used} at most"),
            (remembered, "never forgetting", f"after SIGKILL {hits}, {lost}"),
            (not self.dead_found, "never slower", f"the dead daemon: a miss in {1e3 * self.dead_s:.0f} ms"),
            (apart, "never mixing tenants", f"{asked}: {self.other_found} found"),
        ]


def print_head(console: Console) -> None:
    """Prints the heads of the columns of turns."""
    legend = Text(" ").join(Text(f"{cell} {name}", style) for name, (cell, style) in _STYLES.items())
    console.print(Text(_HEAD, "bold").append_text(legend))
    console.print(f" {'─' * (len(_HEAD) + _PICTURE_CELLS - 1)}")


def print_turn(console: Console, number: int, tally: Tally, block_bytes: int) -> None:
    """Prints the line of a turn."""
    served = format_size(tally.served * block_bytes)
    blocks = f" {number:4}  {tally.asked:5}  {tally.hits[Tier.DRAM]:4}  {tally.hits[Tier.NVME]:4}"
    rest = f"  {tally.asked - tally.served:8}  {served:>7}  {tally.wrong:5}  "
    console.print(Text(blocks + rest).append_text(_picture(tally)))


def print_kill(console: Console) -> None:
    """Prints the line between two turns for the death of the daemon."""
    console.print(Text(" " * len(_HEAD)).append("SIGKILL, then restart", "red"))


def print_promises(console: Console, found: Findings) -> bool:
    """Prints a line per promise. Returns whether all were kept."""
    promises = found.promises()
    for kept, name, figures in promises:
        mark = Text(" ok    ", "green") if kept else Text(" FAIL  ", "bold red")
        console.print(mark.append(f"{name:<22}", "bold").append(figures, "default"))
    return all(kept for kept, *_ in promises)


def print_next(console: Console, commands: Sequence[tuple[str, str]]) -> None:
    """Prints commands with their purpose: beside them, or below where the lines would be too long."""
    width = max(len(command) for command, _ in commands)
    beside = 4 + width + max(len(purpose) for _, purpose in commands) <= WIDTH
    console.print(Text("Next:", "bold"))
    for command, purpose in commands:
        space = " " * (width - len(command) + 2) if beside else "\n      "
        line = Text("  ").append(command, "cyan").append(space + purpose, "default")
        console.print(line, soft_wrap=True)


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
