"""The numbers and the mixer of the hashes of keys, as the C extension has them too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
MIX = 0x9E3779B97F4A7C15


def splitmix(seed: int, n: int) -> list[int]:
    """Returns n mixed 64-bit numbers from one seed."""
    out = []
    for i in range(1, n + 1):
        z = (seed + i * MIX) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        out.append(z ^ (z >> 31))
    return out


def mixed(sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns numbers whose bits depend on all bits of the sums."""
    h = sums ^ (sums >> np.uint64(32))
    h *= np.uint64(MIX)
    h ^= h >> np.uint64(29)
    return h
