"""The command with which a connector checks a model before its engine starts: arguments, prompts, tables.

Not a part of `import kvstore`, which engines load: it needs the packages of the configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

from kvstore.errors import KVStoreError, MisuseError, printable
from kvstore.tier_sizes import format_size, how_often, parse_size

_PROMPTS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)
"""Lengths of prompts to report, in tokens, as far as the model takes them. The longest one is added."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What is stored of a prompt that shares nothing with others, and how many such prompts fit in a tier.

    `blocks`: the stored blocks by group of layers, of each shard.
    """

    tokens: int
    blocks: list[int]
    stored_bytes: int
    dram: int
    nvme: int

    @classmethod
    def of(
        cls, tokens: int, blocks: list[int], sizes: Mapping[int, int], dram_bytes: int, nvme_bytes: int
    ) -> PromptReport:
        """Returns the report of a prompt. `sizes`: its blocks of all shards, by their bytes."""
        stored_bytes = sum(block_bytes * count for block_bytes, count in sizes.items())
        dram, nvme = (
            how_often(sizes, limit, memory) if stored_bytes else 0
            for limit, memory in ((dram_bytes, True), (nvme_bytes, False))
        )
        return cls(tokens, blocks, stored_bytes, dram, nvme)


def prompt_lengths(longest: int) -> list[int]:
    """Returns the lengths of prompts to report, in tokens, of a model that takes `longest`."""
    return sorted({tokens for tokens in _PROMPTS if tokens <= longest} | {min(longest, _PROMPTS[-1])})


def prompts_table(prompts: Sequence[PromptReport], dram_bytes: int, nvme_bytes: int) -> str:
    """Returns what is stored of prompts, and how many fit in tiers of these bytes, as a table."""
    tiers = [("DRAM", dram_bytes), ("NVMe", nvme_bytes)]
    head = ["prompt", "stored", *(f"in {size_text(limit)} {name}" for name, limit in tiers)]
    rows = [
        [
            f"{each.tokens:,}",
            size_text(each.stored_bytes),
            *(f"{count:,}" if each.stored_bytes else "-" for count in (each.dram, each.nvme)),
        ]
        for each in prompts
    ]
    return table([head, *rows], "rrrr")


def refusals_text(refusals: Sequence[tuple[str, str]]) -> str:
    """Returns reasons why an engine is not served, and their hints, as lines."""
    return "\n".join(f"refused  {reason}\n  hint   {hint}" for reason, hint in refusals)


def size_text(nbytes: int) -> str:
    """Returns a size with its unit; `-` for nothing."""
    return format_size(nbytes) if nbytes else "-"


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Returns rows as aligned columns. `align`: `l` or `r` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CheckCommand:
    """The command `python -m PACKAGE check MODEL [options] [arguments of the engine]`.

    `prints`: what it prints first. `example`: an argument of the engine. `environment`: variables that the
    engine reads when it is imported, unless the caller has set them. `check`: gets the options `model`,
    `json`, the arguments of the engine, and the bytes of both tiers; returns whether the engine is served,
    and what to print. It may raise KVStoreError.
    """

    package: str
    engine: str
    prints: str
    example: str
    environment: Mapping[str, str]
    check: Callable[[argparse.Namespace, list[str], int, int], tuple[bool, str]]

    def run(self, arguments: list[str]) -> int:
        """Runs the command. Returns its exit code: 0 served, 1 refused, 2 wrong usage or no such model."""
        try:
            self._check_order(arguments)
            options, rest = self._parser().parse_known_args(arguments)
            sizes = _tier("--dram", options.dram), _tier("--nvme", options.nvme)
            for name, value in self.environment.items():
                os.environ.setdefault(name, value)
            with redirect_stdout(sys.stderr):
                served, text = self.check(options, rest, *sizes)
        except KVStoreError as error:
            print(f"error: {printable(error.message)}\nhint: {printable(error.hint)}", file=sys.stderr)
            return 2
        print(text)
        return 0 if served else 1

    def _check_order(self, arguments: list[str]) -> None:
        """Raises MisuseError if the model is not first: a value of the engine's would be taken for it."""
        first = arguments[1] if len(arguments) > 1 else ""
        if first.startswith("-") and first not in ("-h", "--help"):
            raise MisuseError(
                f"{first} comes before the model", f"check MODEL [options] [arguments of {self.engine}]"
            )

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.package}",
            description=f"Commands of the {self.engine} connector.",
            allow_abbrev=False,
        )
        commands = parser.add_subparsers(required=True, metavar="check")
        check = commands.add_parser(
            "check",
            allow_abbrev=False,
            help="check what the connector does with a model",
            description=f"Prints {self.prints}, the sizes of its blocks, how many prompts fit in the "
            "tiers, and what is not served. Loads no weights and starts no engine.",
            epilog=f"Every other argument is one of {self.engine}'s engine, such as {self.example}. "
            f"Exit codes: 0 served, 1 refused, 2 wrong usage, or {self.engine} cannot build the model.",
        )
        check.add_argument(
            "model", metavar="MODEL", help="a folder, or a name in the hub's cache of this machine"
        )
        check.add_argument(
            "--dram", metavar="SIZE", default="1GiB", help="of the DRAM tier (default: %(default)s)"
        )
        check.add_argument(
            "--nvme", metavar="SIZE", default="1GiB", help="of the NVMe tier (default: %(default)s)"
        )
        check.add_argument("--json", action="store_true", help="print one JSON object")
        return parser


def _tier(option: str, text: str) -> int:
    """Returns the bytes of a tier. Raises MisuseError."""
    try:
        if size := parse_size(text):
            return size
    except MisuseError as error:
        raise MisuseError(f"{option}: {error.message}", error.hint) from error
    raise MisuseError(f"{option}: {text!r} is nothing", "a size such as 64GiB")
