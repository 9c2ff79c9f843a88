"""The file of reuse statistics: what one daemon saved, the next one has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.core.reuse.classes import CLASSES
from kvstore.core.reuse.curves import Counts
from kvstore.core.reuse.history import GhostTable
from kvstore.core.reuse.reuse import ReuseState
from kvstore.daemon.runtime.policy_state import PolicyStateFile


@pytest.mark.parametrize("earlier", [False, True])
def test_curves_come_back(tmp_path: Path, earlier: bool) -> None:
    restored: list[Any] = []
    config = SimpleNamespace(nvme=SimpleNamespace(paths={"a": tmp_path}))
    core: Any = SimpleNamespace(handle=restored.append)
    file = PolicyStateFile(core, lambda: config, str, int, lambda: 1000.0)  # type: ignore[arg-type,return-value]
    used, reached = np.random.default_rng(1).integers(0, 99, (2, *CLASSES)).astype(np.float32)
    together = reached[:, 0] * 7
    ghosts = GhostTable(5, 9, 64, np.array([3], np.uint32), np.array([8], np.uint64))
    file.save(ReuseState({3: Counts(used, reached, together)}, ghosts))
    path = tmp_path / "learned.npz"
    if earlier:
        saved = dict(np.load(path))
        del saved["together"]
        np.savez(path, **saved)
        together = reached[:, 0]
    file.restore()
    counts = restored[0].state.curves[3]
    for column, expected in zip(counts, (used, reached, together), strict=True):
        assert np.array_equal(column, expected)
