"""How far a chain is worth loading: the end that leaves the shortest time to load it and compute the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def blocks_worth_loading(load_s: npt.NDArray[np.floating[Any]], recompute_s: float, within_s: float) -> int:
    """Returns how many leading blocks to load; 0 if no number saves time.

    `load_s` has the time (s) until each block and those before it are loaded; it never decreases.
    `recompute_s`: the time to recompute one block (0: unknown, all blocks that load `within_s` count).
    """
    in_time = int(np.count_nonzero(load_s <= max(0.0, within_s)))
    if not in_time or not recompute_s:
        return in_time
    saved_s = np.arange(1, in_time + 1) * recompute_s - load_s[:in_time]
    # Of equal ends the longest one: it leaves more of the engine to other requests.
    n = in_time - int(saved_s[::-1].argmax())
    return n if saved_s[n - 1] >= 0 else 0
