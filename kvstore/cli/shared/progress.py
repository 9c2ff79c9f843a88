"""Progress bars on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bar(*columns: ProgressColumn, hidden: bool) -> Progress:
    """Returns a bar with these columns between the bar and the remaining time. It disappears at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden,
    )
