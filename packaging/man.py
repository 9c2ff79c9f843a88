"""Generates manual pages: kvstore(1) from the help of commands, kvstore.toml(5) from the configuration.

    python packaging/man.py FOLDER      writes FOLDER/man1/kvstore.1 and FOLDER/man5/kvstore.toml.5

Runs in an environment where kvstore is installed. This file names no option or key.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvstore import config
from kvstore.cli import app

_ABOUT = metadata("kvstore")


def escaped(text: str) -> str:
    """Returns text escaped for roff: no line is a request, no dash becomes a hyphen."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def head(name: str, section: int, about: str) -> list[str]:
    """Returns the first lines of a page."""
    title = f'.TH "{escaped(name.upper())}" {section} "" "kvstore {_ABOUT["Version"]}" "kvstore"'
    return [title, ".nh", ".SH NAME", f"{escaped(name)} \\- {escaped(about)}"]


def paragraphs(help_text: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring as roff."""
    for paragraph in inspect.cleandoc(help_text).split("\n\n"):
        yield ".PP"
        yield escaped(" ".join(paragraph.split()))


def command_lines(command: Any, path: str) -> Iterator[str]:
    """Yields usage, help, arguments and options of a command and its subcommands."""
    inner: dict[str, Any] = getattr(command, "commands", {})
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    if not inner:
        yield f".SS {escaped(path)}"
        arguments = [p.metavar or shown_name(p) for p in shown if p.param_type_name == "argument"]
        yield f".B {escaped(' '.join([path, *(['[OPTIONS]'] if shown else []), *arguments]))}"
        yield from paragraphs(command.help or "")
        for param in shown:
            yield from param_lines(param)
    for name in sorted(inner):
        yield from command_lines(inner[name], f"{path} {name}")


def shown_name(param: Any) -> str:
    """Returns the placeholder for the value of a parameter."""
    return str(param.name).upper().replace("_", "-")


def param_lines(param: Any) -> Iterator[str]:
    """Yields an option or argument: its names, help, default and environment variable."""
    yield ".TP"
    if param.param_type_name == "argument":
        yield f".I {escaped(param.metavar or shown_name(param))}"
    else:
        value = "" if param.is_flag else f" \\fI{escaped(param.metavar or shown_name(param))}\\fR"
        yield f"\\fB{escaped(', '.join([*param.opts, *param.secondary_opts]))}\\fR{value}"
    default = param.show_default if isinstance(param.show_default, str) else param.default
    notes = [f"default: {default}"] if default and not getattr(param, "is_flag", False) else []
    notes += [f"environment: {param.envvar}"] if param.envvar else []
    notes += ["required"] if param.required else []
    help_text = getattr(param, "help", None) or ""
    yield escaped(" ".join([help_text, *([f"({'; '.join(notes)})"] if notes else [])]).strip()) or "\\&"


def commands_page() -> str:
    """Returns kvstore(1)."""
    command = get_command(app)
    codes = inspect.cleandoc(sys.modules["kvstore.cli"].__doc__ or "").partition("Exit codes: ")[2]
    lines = head("kvstore", 1, _ABOUT["Summary"])
    lines += [".SH SYNOPSIS", ".B kvstore", ".I COMMAND", "[OPTIONS]"]
    lines += [".SH COMMANDS", *command_lines(command, "kvstore")]
    lines += [".SH EXIT STATUS", escaped(" ".join(codes.split()))]
    lines += [".SH SEE ALSO", ".BR kvstore.toml (5)"]
    return "\n".join(lines) + "\n"


def key_text(key: config.Key) -> str:
    """Returns the documentation of a key: its meaning, then type, default and whether it changes live."""
    meaning = f"{key.summary.removesuffix('.')}. {' '.join(key.detail.split())}".rstrip()
    kind = ", ".join(filter(None, (" ".join((key.kind, ", ".join(key.choices))).strip(), key.bounds)))
    default = "required" if key.required else f"default: {key.default or 'none'}"
    change = "changes at run time" if key.live else "changes with a restart"
    return f"{meaning} ({kind}; {default}; {change})".replace("`", "")


def config_page() -> str:
    """Returns kvstore.toml(5)."""
    lines = head("kvstore.toml", 5, "configuration of the KV-cache offload daemon")
    lines.append(".SH KEYS")
    for table in config.tables():
        lines += [f".SS {escaped(table.heading)}", *paragraphs(f"{table.summary}\n\n{table.detail}".strip())]
        for key in table.keys:
            lines += [".TP", f".B {escaped(key.name)}", escaped(key_text(key))]
    example = escaped(config.example().rstrip("\n"))
    lines += [".SH EVERY KEY WITH ITS DEFAULT", ".nf", re.sub(r"^$", ".sp", example, flags=re.M), ".fi"]
    lines += [".SH SEE ALSO", ".BR kvstore (1)"]
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Writes both pages below `folder`."""
    for name, text in {"man1/kvstore.1": commands_page(), "man5/kvstore.toml.5": config_page()}.items():
        page = folder / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
