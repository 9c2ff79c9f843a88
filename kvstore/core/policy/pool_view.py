"""The context of a policy: one for each pool of a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Blocks
from kvstore.core.policy.queue import Segments
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse


@dataclass(slots=True)
class PolicyContext:
    """Constructor argument of a policy. Pools of a tier share `segments` and `ghosts()`, all share `blocks`.

    The ghost table is allocated by the first call of `ghosts`. Each pool has another `seed`. `recompute_s` is
    the time to recompute one block, by namespace (s; 0: unknown). `reuse` has the histories of all blocks.
    """

    segments: Segments
    blocks: Blocks
    ghosts: Callable[[], Ghosts]
    seed: int
    tenant: int
    recompute_s: npt.NDArray[np.float32]
    reuse: Reuse
