"""Commands and groups of commands: their help, and how errors end a command."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvstore.cli.shared.output import decorated
from kvstore.errors import KVStoreError, MisuseError, for_terminal

EXAMPLE = "\n\nExample: "
"""What stands before the example in the help of a command: a paragraph of its own."""

_UsageError: Any = typer.BadParameter.__base__
"""The base class of typer's errors. typer does not export it."""

_HELP_WIDTH = 100


class Command(TyperCommand):
    """A command with an example. Its help has no colours and boxes in a pipe or with NO_COLOR."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        _choose_markup(self)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands. Errors are printed with their hint and exit with 2; bugs keep their trace."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        _choose_markup(self)
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands by panel, as text without boxes."""
        width = max(map(len, self.commands), default=0)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            first = (command.help or "").partition("\n\n")[0]
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name.ljust(width), first))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command of the first word. Raises MisuseError that names the possible words."""
        word = args[0]
        if word not in self.commands and not word.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(word, self.commands) or _elsewhere(self.commands, word)
            raise MisuseError(f"there is no command `{ctx.command_path} {word}`", _hint(near, self.commands))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the options of the group itself."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as e:
            raise _ended_by(e) from None

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except KVStoreError as e:
            raise _ended(e) from None
        except _UsageError as e:
            raise _ended_by(e) from None


def paragraphs(docstring: str) -> str:
    """Returns a docstring with one line per paragraph, which terminals of every width wrap well."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n"))


def _choose_markup(command: Any) -> None:
    """Sets how the help is printed: as panels, or as text. The example gets a line of its own in both."""
    boxes = decorated()
    command.rich_markup_mode = "rich" if boxes else None
    command.context_settings = {**command.context_settings, "max_content_width": _HELP_WIDTH}
    # \b keeps the lines of a paragraph where typer would join them.
    keep = "" if boxes else "\b\n"
    command.help = (command.help or "").replace(EXAMPLE, f"\n\n{keep}Example:\n  ")


def _ended(error: KVStoreError) -> Exception:
    """Prints an error. Returns the exception that ends the process with 2."""
    typer.echo(for_terminal(error), err=True)
    return typer.Exit(2)


def _ended_by(error: Any) -> Exception:
    """Prints an error of typer, or the help of a group. Returns the exception that ends with 2."""
    if type(error).__name__ != "NoArgsIsHelpError":
        return _ended(_misuse(error))
    # Panels are printed when the error is made; then its message is empty.
    if error.format_message():
        typer.echo(error.format_message())
    return typer.Exit(2)


def _misuse(error: Any) -> KVStoreError:
    """Returns an error of typer in our words."""
    path = error.ctx.command_path if error.ctx else "kvstore"
    wrong = getattr(error, "option_name", "")
    if error.ctx is None or not wrong or not hasattr(error, "possibilities"):
        text = error.format_message().rstrip(".")
        return MisuseError(text[:1].lower() + text[1:], f"`{path} --help` describes the options")
    names = [name for param in error.ctx.command.params for name in param.opts if name.startswith("--")]
    hint = _hint(get_close_matches(wrong, names), [*names, "--help"])
    return MisuseError(f"`{path}` has no option {wrong}", hint)


def _hint(near: Iterable[str], possible: Iterable[str]) -> str:
    """Returns what may have been meant, otherwise what is possible."""
    near = list(near)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(possible)}"


def _elsewhere(commands: Mapping[str, Any], word: str) -> list[str]:
    """Returns the commands of this name in the groups below."""
    groups = {name: getattr(command, "commands", {}) for name, command in commands.items()}
    return [f"{name} {word}" for name, inner in groups.items() if word in inner]
