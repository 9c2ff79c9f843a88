"""The commented example configuration: every key with its default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvstore.config.keys import NAME, Key, Table, tables
from kvstore.socket_paths import ADMIN_SOCKET, DAEMON_SOCKET, SYSTEM_FOLDER

_HEAD = """\
# kvstore configuration. Every key is optional; the values shown are the defaults.
# Sizes: bytes, or text such as "512MiB", "64GiB", "100GB". Durations: seconds, or "250ms", "5s", "2m".
# Lines that begin with "# " show keys and tables without a default.
"""
_COLUMN = 38
_WIDTH = 110


def example(sockets: Path = SYSTEM_FOLDER) -> str:
    """Returns a commented TOML file that loads to the defaults of a user whose sockets are in `sockets`."""
    lines = [_HEAD.rstrip()]
    for table in tables():
        if table.path[1:] in ((), (NAME,)):
            lines.append("")
        lines += _lines(table)
    text = "\n".join(lines) + "\n"
    for name in (DAEMON_SOCKET, ADMIN_SOCKET):
        text = text.replace(
            f'"{SYSTEM_FOLDER / name}"', json.dumps(str(sockets / name), ensure_ascii=False), 1
        )
    return text


def _lines(table: Table) -> Iterator[str]:
    yield _line(table.sample_heading, table.summary, table.added)
    for key in table.keys:
        added = table.added or not key.has_default
        yield _line(f"{key.name} = {key.sample}", key.summary, added, _valid(key))


def _line(code: str, about: str, added: bool, valid: str = "") -> str:
    """Returns a line with a comment. The valid values are left out if they do not fit."""
    code = f"# {code}" if added else code
    about = about.removesuffix(".").replace("`", "")
    summary, semicolon, rest = about.partition(";")
    line = f"{code:<{_COLUMN - 2}}  # {summary}{valid}{semicolon}{rest}"
    return line if len(line) <= _WIDTH else f"{code:<{_COLUMN - 2}}  # {about}"


def _valid(key: Key) -> str:
    """Returns the valid values of a key as the end of a phrase."""
    *most, last = key.choices or ("",)
    return f": {', '.join(most)} or {last}" if key.choices else f", {key.bounds}" if key.bounds else ""
