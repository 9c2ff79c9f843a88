"""The command that checks a model: its arguments and tables, without an engine."""

from __future__ import annotations

import argparse
import os

import pytest

from kvstore.errors import MisuseError
from kvstore.model_check import CheckCommand, PromptReport, prompt_lengths, prompts_table, size_text
from kvstore.tier_sizes import how_often

GIB = 1 << 30


def command(served: bool = True) -> CheckCommand:
    def check(options: argparse.Namespace, rest: list[str], dram: int, nvme: int) -> tuple[bool, str]:
        if options.model == "wrong":
            raise MisuseError("no such model", "give another")
        print("a log of the engine")
        return served, f"{options.model} {options.json} {rest} {dram} {nvme} {os.environ['OF_THE_ENGINE']}"

    return CheckCommand("some_package", "Engine", "the pools", "--shards 2", {"OF_THE_ENGINE": "1"}, check)


def test_the_command_runs_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_ENGINE", "given")
    assert command().run(["check", "m", "--dram", "2GiB", "--shards", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"m False ['--shards', '2'] {2 * GIB} {GIB} given\n"
    assert shown.err == "a log of the engine\n"
    assert command(served=False).run(["check", "m", "--json"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "m", "--nvme", "0"], "error: --nvme: '0' is nothing\nhint: a size such as 64GiB"),
        (["check", "m", "--dram", "much"], "error: --dram: "),
        (["check", "--dram", "1GiB", "m"], "--dram comes before the model\nhint: check MODEL [options] [arg"),
        (["check", "wrong"], "error: no such model\nhint: give another"),
    ],
)
def test_wrong_usage_has_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command().run(arguments) == 2
    assert message in capsys.readouterr().err


def test_lengths_end_at_what_the_model_takes() -> None:
    assert prompt_lengths(500) == [500]
    assert prompt_lengths(1024) == [1024]
    assert prompt_lengths(40_000) == [1024, 8192, 32_768, 40_000]
    assert prompt_lengths(1 << 20)[-1] == 128 << 10


def test_a_prompt_is_counted_in_each_tier() -> None:
    sizes = {1 << 20: 16, 1 << 16: 16}
    made = PromptReport.of(1024, [16, 16], sizes, GIB, 4 * GIB)
    assert made.stored_bytes == 17 << 20
    assert (made.dram, made.nvme) == (how_often(sizes, GIB, True), how_often(sizes, 4 * GIB, False))
    assert made.nvme > made.dram > 0
    text = prompts_table([made, PromptReport.of(10, [0], {1 << 20: 0}, GIB, GIB)], GIB, 4 * GIB)
    head, row, none = text.splitlines()
    assert head.split() == ["prompt", "stored", "in", "1GiB", "DRAM", "in", "4GiB", "NVMe"]
    assert row.split() == ["1,024", "17MiB", f"{made.dram:,}", f"{made.nvme:,}"]
    assert none.split() == ["10", "-", "-", "-"]
    assert size_text(0) == "-"
