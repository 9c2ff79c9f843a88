from collections.abc import Sequence
from typing import Any

from kvstore.native.portable_queue import PortableQueue

def instruction_set() -> str: ...
def choose(number: int) -> None:
    """Switches to another instruction set of this machine, for tests: 0 is the best. ValueError if none."""

def copy(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None: ...
def copy_and_sum(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None: ...
def chain_above(parent: Any, row: int, out: Any) -> int: ...
def chain_root(parent: Any, row: int, budget: int) -> tuple[int, int]: ...
def checksum(payload: Any, seed: int) -> int: ...
def ghosts_find(table: Any, fingerprints: Any, out: Any, remove: bool) -> None: ...
def ghosts_put(table: Any, fingerprints: Any, values: Any) -> None: ...
def move_files(pieces: list[tuple[int, int, Any, bool]]) -> list[int]: ...
def why_no_io_uring() -> str: ...

IOQueue: type[PortableQueue]
"""The same queue, without the parameter `move`."""

def index_find(parts: tuple[Any, Any, Any, Any], words: Any, info: int, rows: Any) -> None: ...
def index_add(parts: tuple[Any, Any, Any, Any], rows: Any) -> list[int]: ...
def index_remove(parts: tuple[Any, Any, Any, Any], rows: Any) -> list[int]: ...
def presence(table: Any, keys: list[bytes], leading: bool) -> bytes | None:
    """Returns the flags of each key in a presence table, 0xFF for absent ones. None: the table is not ready.

    With `leading`, of those before the first absent key. Raises ValueError or TypeError for keys that are not
    bytes of one length, and ValueError for memory that is no table.
    """

def presence_set(
    table: Any, words: Any, size: int, flags: Any, there: Any, places: Any
) -> tuple[int, bool]: ...
def places(table: Any, keys: list[bytes]) -> tuple[bytes, bytes] | None:
    """Returns the flags of the keys before the first absent one, and the place of each as a u64.

    A place is the extent and the slot in DRAM where the block was last, as in `SLOT_RECORD`; 0: in none.
    Raises as `presence` does.
    """

def read_slots(
    target: Any,
    extents: Sequence[tuple[int, Any, int, int]],
    places: bytes,
    keys: list[bytes],
    namespace: bytes,
    block_bytes: int,
    slot_bytes: int,
) -> int:
    """Copies blocks from slots that no lease holds, without the GIL.

    `target`: memory for all blocks, one after another, or a list of one buffer for each.
    An extent is its number, its memory, the offset of its payloads and its number of slots. `places`: a u64
    for each block, as the function `places` has them. Returns how many leading blocks are there and match
    their checksums; the bytes behind them are undefined. Raises ValueError or TypeError for what does not fit
    together.
    """

def records_find(
    pages: list[tuple[Any, Any]], rows: Any, stored_at: Any, version: Any
) -> tuple[int, int, list[int], list[int]]: ...
def records_pack(keys: list[bytes], parents: list[bytes], numbers: tuple[Any, ...], rows: Any) -> None: ...
def records_pages(
    numbers: Any, old: list[bytes | None], changes: list[tuple[Any, Any]]
) -> list[bytes | None]: ...
def records_take(pages: list[tuple[Any, Any]], rows: Any, width: int, columns: tuple[Any, ...]) -> None: ...
def sums(sources: Sequence[Any], table: Any) -> None: ...
