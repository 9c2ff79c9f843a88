"""Help: panels, examples, options, widths; errors that name what is possible; output in pipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from typer.main import get_command

from kvstore.cli import PANELS, app
from tests.cli.terminal import on_terminal
from tests.daemons import cli
from tests.docs.test_docs import known

ESCAPE, BOX = "\x1b", re.compile("[\u2500-\u257f]")
ADDED_BY_TYPER = {"install_completion", "show_completion", "help"}


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields groups and commands below the root, with their paths."""
    for name, command in (group or get_command(app)).commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


EVERY = [pytest.param(path, command, id=" ".join(path)) for path, command in commands()]
LEAVES = [each for each in EVERY if not hasattr(each.values[1], "commands")]


def test_every_command_stands_in_a_panel() -> None:
    group: Any = get_command(app)
    assert {name: command.rich_help_panel for name, command in group.commands.items()} == {
        name: panel for panel, entries in PANELS.items() for name in entries
    }
    assert list(PANELS) == ["Run", "Look", "Change", "Investigate", "Plan"]
    assert list(group.commands) == [name for entries in PANELS.values() for name in entries]


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_has_one_line_per_command(columns: int) -> None:
    lines = on_terminal("--help", columns=columns).text.splitlines()
    for panel, entries in PANELS.items():
        start = next(i for i, line in enumerate(lines) if line.startswith(f"╭─ {panel} ─"))
        block = lines[start + 1 : start + 1 + len(entries)]
        assert [line.split()[1] for line in block] == list(entries)
        assert lines[start + 1 + len(entries)].startswith("╰─")
    assert max(map(len, lines)) <= columns


def test_without_a_command_the_help_is_printed() -> None:
    bare, asked = cli(), cli("--help")
    assert (bare.returncode, asked.returncode) == (2, 0)
    assert bare.stdout == asked.stdout
    for name in ("tenant", "lab"):
        assert cli(name).stdout == cli(name, "--help").stdout


def test_the_version_is_the_packages() -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvstore {version('kvstore')}\n", "")


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_the_first_paragraph_fits_one_line_of_the_list(path: tuple[str, ...], command: Any) -> None:
    first = command.help.split("\n\n")[0]
    assert "\n" not in first
    assert first.endswith(".")
    assert len(first) <= (66 if len(path) == 1 else 80), first


@pytest.mark.parametrize(("path", "command"), LEAVES)
def test_every_example_is_a_line_that_can_be_pasted(path: tuple[str, ...], command: Any) -> None:
    example = command.help.split("\n\nExample: ")[1]
    assert "..." not in example
    words = shlex.split(example.partition(" > ")[0])
    assert words[0] == "kvstore"
    assert known(words[1:]) == ""
    for columns in (80, 100):
        lines = [line.strip() for line in on_terminal(*path, "--help", columns=columns).text.splitlines()]
        assert lines[lines.index("Example:") + 1] == example
    piped = [line.strip() for line in cli(*path, "--help").stdout.splitlines()]
    assert piped[piped.index("Example:") + 1] == example


@pytest.mark.parametrize(("path", "command"), LEAVES)
def test_every_option_is_described(path: tuple[str, ...], command: Any) -> None:
    for param in command.params:
        if param.name in ADDED_BY_TYPER:
            continue
        text = getattr(param, "help", None)
        assert text, f"{path} {param.name} has no help"
        assert text.endswith("."), text
        # The default is shown by typer, or stated in words: brackets would be taken for markup.
        assert "[" not in text, text
        assert not isinstance(param.show_default, str), text


def test_help_in_a_pipe_has_neither_colours_nor_boxes() -> None:
    for args in (("--help",), ("tenant", "--help"), ("serve", "--help")):
        text = cli(*args).stdout
        assert ESCAPE not in text
        assert not BOX.search(text)
    text = cli("--help").stdout
    for panel, entries in PANELS.items():
        section = text.split(f"\n{panel}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(entries)


def test_no_color_turns_off_colours_and_boxes_on_a_terminal() -> None:
    assert ESCAPE in on_terminal("--help").raw
    plain = on_terminal("--help", NO_COLOR="1")
    assert ESCAPE not in plain.raw
    assert not BOX.search(plain.raw)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("wrong",), "there is no command `kvstore wrong` (there are serve, supervise, admin,"),
        (("statu",), "there is no command `kvstore statu` (did you mean status?)"),
        (("token",), "there is no command `kvstore token` (did you mean tenant token?)"),
        (("tenant", "lst"), "there is no command `kvstore tenant lst` (did you mean list?)"),
        (("pin", "xyz"), "there is no command `kvstore pin xyz` (there are add, remove)"),
        (("--colour",), "`kvstore` has no option --colour (there are --version,"),
        (("--versoin",), "`kvstore` has no option --versoin (did you mean --version?)"),
        (("status", "--jsn"), "`kvstore status` has no option --jsn (did you mean --json?)"),
        (("doctor", "--zzz"), "`kvstore doctor` has no option --zzz (there are --config, --json, --help)"),
        (("quota", "show"), "missing argument 'TENANT' (`kvstore quota show --help`"),
        (("top", "--count", "x"), "invalid value for '--count': "),
        (("device", "set", "nvme", "off"), "invalid value for "),
    ],
)
def test_errors_of_usage_name_what_is_possible(args: tuple[str, ...], says: str) -> None:
    done = cli(*args)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {says}")
