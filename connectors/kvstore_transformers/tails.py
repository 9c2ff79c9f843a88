"""Finds the ends of generated rows."""

from __future__ import annotations

from typing import Any


def row_ends(rows: list[list[int]], prompt_columns: int, settings: Any) -> list[int]:
    """Returns the end column of each row: after its EOS, or before the padding that follows a stop.

    `settings`: the GenerationConfig that generated the tokens after the first `prompt_columns`.
    """
    return [_row_end(row, prompt_columns, eos_ids(settings), settings.pad_token_id) for row in rows]


def eos_ids(settings: Any) -> set[int]:
    """Returns the token ids that end a row."""
    ids = settings.eos_token_id
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else {int(each) for each in ids}


def _row_end(row: list[int], start: int, eos: set[int], pad: int | None) -> int:
    for column in range(start, len(row)):
        if row[column] in eos:
            return column + 1
        if row[column] == pad:
            return column
    return len(row)
