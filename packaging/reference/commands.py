"""Every command of `kvstore`, with its arguments and options, from typer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from kvstore.cli import app
from reference.text import cell, prose


def page() -> Iterator[str]:
    """Yields the page: a heading for each command, a table of its options."""
    yield "# All commands\n\nGenerated from `--help`. [Command line](../cli.md) has an overview."
    for path, command in _commands(get_command(app), "kvstore"):
        yield f"\n## {path}\n\n{_help(command.help or '')}\n"
        params = _shown(command)
        if params:
            yield "| option | default | meaning |\n|---|---|---|"
        for param in params:
            default = param.show_default if isinstance(param.show_default, str) else param.default
            default = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
            env = f" Environment: `{param.envvar}`." if param.envvar else ""
            yield f"| `{_names(param)}` | {default} | {cell(getattr(param, 'help', '') or '')}{env} |"


def missing() -> Iterator[str]:
    """Yields the commands, arguments and options without help."""
    for path, command in _commands(get_command(app), "kvstore"):
        if not command.help:
            yield f"{path} has no help: add a docstring to its function in kvstore/cli"
        for param in _shown(command):
            if not getattr(param, "help", ""):
                yield f"{path} {_names(param)} has no help: add `help=` to its parameter in kvstore/cli"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner: dict[str, Any] = getattr(command, "commands", {})
    for name in sorted(inner):
        yield from _commands(inner[name], f"{path} {name}")
    if not inner:
        yield path, command


def _help(text: str) -> str:
    """Returns the help of a command, with its example as code."""
    about, example, command = prose(text).replace("&lt;", "<").partition("Example: ")
    return f"{about.rstrip()}\n\n```\n{command}\n```" if example and "\n" not in command else prose(text)


def _shown(command: Any) -> list[Any]:
    return [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or str(param.name).upper())
    return ", ".join([*param.opts, *param.secondary_opts])
