"""Docstrings as Markdown."""

from __future__ import annotations

import inspect


def prose(text: str) -> str:
    """Returns a docstring as Markdown: paragraphs stay, and no word is taken for markup."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs).replace("<", "&lt;")


def cell(text: str) -> str:
    """Returns a docstring as the cell of a table."""
    return prose(text).replace("\n\n", " ").replace("|", "\\|")
