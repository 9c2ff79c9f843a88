"""Reads and writes bench/RESULTS.md: one section per bench, with a comment of at most two lines and a table.

The tables are generated. All other text is written by hand and kept.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.catalog import BENCHES
from bench.harness import rounded

HEADER = ("name", "value", "unit", "reference", "ratio", "target", "met", "runs", "also")
ORIGIN = ("command", "date", "commit", "machine")
OTHERWISE = "Measured otherwise"
MACHINES = "Machines"
NOT_MEASURED = "not measured: needs "
_FAILED = "failed: "
_COMMENT_LINES = 2
_REASON_CHARS = 120
_PLAIN = {*HEADER, *ORIGIN, "discarded", "noisy", "bench"}

Row = dict[str, str]
Line = Mapping[str, Any]
"""A JSON object of `python -m bench NAME --json`: a row with its origin, or a bench without a figure."""


@dataclass(slots=True)
class Section:
    """A heading, the text below it, and its table (empty: none)."""

    name: str
    before: list[str]
    rows: list[Row]
    columns: tuple[str, ...]
    after: list[str]

    def lines(self) -> Iterator[str]:
        """Returns the lines of the file."""
        if self.name:
            yield f"## {self.name}"
        yield from self.before
        if self.columns:
            yield _line(self.columns)
            yield "|---" * len(self.columns) + "|"
            yield from (_line(row.get(column, "") for column in self.columns) for row in self.rows)
        yield from self.after


def parse(text: str) -> list[Section]:
    """Returns the sections in order. The first one is the text before the first heading."""
    return [_section(part) for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)]


def render(sections: Iterable[Section]) -> str:
    """Returns the text of sections: the inverse of `parse`."""
    return "\n".join(line for section in sections for line in section.lines()).rstrip("\n") + "\n"


def _section(text: str) -> Section:
    lines = text.rstrip("\n").split("\n")
    name = lines.pop(0).removeprefix("## ") if text.startswith("## ") else ""
    starts = next((i for i, line in enumerate(lines) if line.startswith("|")), len(lines))
    ends = next((i for i in range(starts, len(lines)) if not lines[i].startswith("|")), len(lines))
    table = [_cells(line) for line in lines[starts:ends]]
    columns = tuple(table[0]) if table and name else ()
    if not columns:
        return Section(name, [*lines, ""], [], (), [])
    rows = [dict(zip(columns, cells, strict=False)) for cells in table[2:]]
    return Section(name, lines[:starts], rows, columns, [*lines[ends:], ""])


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# -- changes by a run


def merge(text: str, run: Iterable[Line]) -> str:
    """Returns the file with new tables for the benches of a run. Keeps rows that it could not measure."""
    sections = {section.name: section for section in parse(text)}
    by_bench: dict[str, list[Line]] = {}
    for line in run:
        by_bench.setdefault(line["bench"], []).append(line)
    machines = sections.setdefault(MACHINES, Section(MACHINES, [""], [], ("machine",), [""]))
    for name, lines in by_bench.items():
        section = sections.setdefault(name, Section(name, [""], [], (), [""]))
        section.columns = (*HEADER, *ORIGIN)
        section.rows = list(_rows(name, lines, {row["name"]: row for row in section.rows}, machines))
    used = {
        row.get("machine") for section in sections.values() if section is not machines for row in section.rows
    }
    machines.rows = [row for row in machines.rows if row["machine"] in used]
    return render(sections.values())


def _rows(name: str, lines: list[Line], old: Mapping[str, Row], machines: Section) -> Iterator[Row]:
    measured = {line["name"]: line for line in lines if "name" in line}
    ended = next((line for line in lines if "failed" in line or "unable" in line), None)
    entry = BENCHES[name]
    for row in entry.rows:
        if row in measured:
            yield _figures(measured[row]) | _origin(measured[row], machines)
        elif ended is not None and "failed" in ended:
            reason = " ".join(str(ended["failed"]).split())[:_REASON_CHARS]
            yield {"name": row, "value": _FAILED + reason} | _origin(ended, machines)
        elif ended is not None and row in old:
            yield old[row]
        else:
            lack = entry.optional.get(row) or entry.needs or str((ended or {}).get("unable", "more"))
            yield {"name": row, "value": NOT_MEASURED + lack, "command": f"`{name}`"}


def _figures(line: Line) -> Row:
    marks = {True: "yes", False: "no", None: ""}
    row = {column: _text(line.get(column)) for column in HEADER}
    row["met"] = (marks[line.get("met")] + (" (noisy)" if line.get("noisy") else "")).strip()
    extra = {key: value for key, value in line.items() if key not in _PLAIN and not isinstance(value, dict)}
    row["also"] = ", ".join(f"{key} {_text(value)}" for key, value in extra.items())
    return row


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: ""}[value]
    return f"{rounded(value):g}" if isinstance(value, float) else str(value)


def _origin(line: Line, machines: Section) -> Row:
    described = {key: str(value) for key, value in line["machine"].items()}
    number = next((row["machine"] for row in machines.rows if described.items() <= row.items()), "")
    if not number:
        number = str(1 + max((int(row["machine"]) for row in machines.rows), default=0))
        machines.columns = tuple(dict.fromkeys((*machines.columns, *described)))
        machines.rows.append({"machine": number, **described})
    return {
        "command": f"`{line['command']}`",
        "date": str(line["date"]),
        "commit": str(line["commit"]),
        "machine": number,
    }


# -- checks


def problems(text: str, folder: Path) -> Iterator[str]:
    """Yields each mismatch between the file and the benches in `folder`, as a sentence."""
    sections = {section.name: section for section in parse(text)}
    machines = {row["machine"] for row in sections.get(MACHINES, Section("", [], [], (), [])).rows}
    for name, entry in BENCHES.items():
        module, _, function = entry.run.partition(":")
        if function not in _functions(folder / f"{module}.py"):
            yield f"{name}: there is no {function} in bench/{module}.py"
        if name not in sections:
            yield f"{name} has no section in RESULTS.md: python -m bench report {name}"
            continue
        section = sections[name]
        shown = [row.get("name", "") for row in section.rows]
        yield from (
            f"{row} has no row: python -m bench report {name}" for row in entry.rows if row not in shown
        )
        yield from (f"{row} is no row of {name}: take it out" for row in shown if row not in entry.rows)
        if sum(map(bool, section.before)) + sum(map(bool, section.after)) > _COMMENT_LINES:
            yield f"{name}: a comment has at most {_COMMENT_LINES} lines"
        yield from (why for row in section.rows if (why := _lacks(row, machines)))
    for name in sections.keys() - BENCHES.keys() - {"", MACHINES, OTHERWISE}:
        yield f"{name}: there is no such bench, so take its section out"
    known = {entry.run for entry in BENCHES.values()}
    for path in sorted(folder.glob("*.py")):
        if "run" in _functions(path) and f"{path.stem}:run" not in known:
            yield f"bench/{path.name} is a bench, but bench/catalog.py does not name it"
    for row in sections[OTHERWISE].rows if OTHERWISE in sections else ():
        if not all(row.get(column) for column in ("what", "figure", "command", "date", "commit")):
            yield f"{OTHERWISE}: {row.get('what')}: figure, command, date and commit belong to it"


def _lacks(row: Row, machines: set[str]) -> str:
    """Returns a description of the missing origin of a row; empty: complete."""
    needed = ["command"] if row.get("value", "").startswith(NOT_MEASURED) else ORIGIN
    for column in needed:
        if not row.get(column):
            return f"{row.get('name')}: no {column}"
    if row.get("machine") and row["machine"] not in machines:
        return f"{row.get('name')}: there is no machine {row['machine']}"
    return ""


def _functions(path: Path) -> set[str]:
    """Returns the names of the functions of a module that take a bench."""
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == ["bench"]
    }
