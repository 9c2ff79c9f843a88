"""Finds the fenced blocks of documents, and the comments that say why one is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass

SHELL = ("", "sh", "bash", "shell", "console")
"""Languages of blocks with commands. A block without a language may also have output or a drawing."""

NOT_CODE = ("text", "ini", "diff", "mermaid", "http", "promql")
"""Languages of blocks that nothing runs or parses."""

CHECKED = (*SHELL, "python", "toml", "json", "yaml")
"""Languages of blocks that tests run or parse."""

HOW = (
    "Languages that are run: none, sh, python. Parsed: toml (as a configuration), json, yaml. Neither: "
    f"{', '.join(NOT_CODE)}. If a block cannot be run by tests, put this line before its fence, with the "
    "reason: <!-- not run: needs a GPU -->"
)
"""What the author of a failing block is told."""

_FENCE = re.compile(
    r"(?:^[ ]*<!-- not run: *(?P<reason>[^\n]*?) *-->\n\s*)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `reason`: why it is not run, empty if it is; `line`: the number of its first fence."""

    language: str
    text: str
    reason: str
    line: int


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a document. Blocks within a list lose their indentation."""
    found = []
    for match in _FENCE.finditer(text):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)]
        at = text.count("\n", 0, match.start("indent")) + 1
        found.append(Block(match["language"], "".join(lines), match["reason"] or "", at))
    return found


def uncovered(text: str) -> list[str]:
    """Returns a line for each block that is neither checked nor excused, and each comment without a block."""
    found = blocks(text)
    lines = [
        f"line {block.line}: nothing checks blocks of the language {block.language!r}. {HOW}"
        for block in found
        if block.language not in (*CHECKED, *NOT_CODE) and not block.reason
    ]
    comments = re.findall(r"<!--\s*not run\b.*?-->", re.sub(r"`[^`\n]*`", "", text))
    if len(comments) != sum(bool(block.reason) for block in found):
        lines.append(f"a comment 'not run' has no reason, or is not in the line before a fence. {HOW}")
    return lines
