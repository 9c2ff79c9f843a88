"""What a policy works with: one shelf for each pool of a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Blocks
from kvstore.core.policy.ghosts import Ghosts
from kvstore.core.policy.queue import Segments
from kvstore.core.policy.reuse import Reuse


@dataclass(slots=True)
class PolicyContext:
    """`segments` and `ghosts()`, made when first asked for, are the tier's, `blocks` the node's.

    No two have the same `seed`. `recompute_s` is what computing one block anew takes, in seconds, by
    namespace; 0: nobody said. `reuse` is what is known of every block's past.
    """

    segments: Segments
    blocks: Blocks
    ghosts: Callable[[], Ghosts]
    seed: int
    tenant: int
    recompute_s: npt.NDArray[np.float32]
    reuse: Reuse
