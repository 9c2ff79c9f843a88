from collections.abc import Sequence
from typing import Any

def instruction_set() -> str: ...
def choose(number: int) -> None:
    """Switches to another instruction set of this machine, for tests: 0 is the best. ValueError if none."""

def copy(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None: ...
def copy_and_sum(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None: ...
def checksum(payload: Any, seed: int) -> int: ...
def presence(table: Any, keys: list[bytes], leading: bool) -> bytes | None:
    """Returns the flags of each key in a presence table, 0xFF for absent ones. None: the table is not ready.

    With `leading`, of those before the first absent key. Raises ValueError or TypeError for keys that are not
    bytes of one length, and ValueError for memory that is no table.
    """

def sums(sources: Sequence[Any], table: Any) -> None: ...
