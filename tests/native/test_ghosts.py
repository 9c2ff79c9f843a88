"""Tables of ghosts: C and numpy do the same, in small tables that are full, and refuse what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.native import portable_ghosts

try:
    from kvstore.native import _native
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

WAYS = 8
VALUES = 1 << 41


@pytest.mark.parametrize("seed", range(40))
def test_both_find_and_put_the_same(seed: int) -> None:
    dice = np.random.default_rng(seed)
    buckets = int(dice.choice([1, 2, 7, 64, 1000]))
    ours = np.zeros(buckets * WAYS, np.uint64)
    theirs = ours.copy()
    names = dice.integers(0, 1 << 64, int(dice.choice([5, 60, 9000])), np.uint64)
    # Tags of 0, and the bounds of a bucket's number.
    names[:4] = [0, (1 << 64) - 1, 1 << 23, 1 << 32]
    for step in range(30):
        # Names may occur twice in a batch.
        some = dice.choice(names, int(dice.integers(0, 200)))
        if step % 3:
            values = dice.integers(0, VALUES, len(some), np.uint64)
            _native.ghosts_put(ours, some, values)
            portable_ghosts.ghosts_put(theirs, some, values)
        else:
            remove = bool(dice.integers(2))
            found, wanted = np.zeros((2, len(some)), np.int64)
            _native.ghosts_find(ours, some, found, remove)
            portable_ghosts.ghosts_find(theirs, some, wanted, remove)
            assert found.tolist() == wanted.tolist()
        assert ours.tolist() == theirs.tolist()


def test_what_was_put_last_is_found_and_what_was_taken_is_not() -> None:
    for module in (_native, portable_ghosts):
        table, out = np.zeros(64, np.uint64), np.zeros(3, np.int64)
        names = np.array([3, 3 << 40, 3], np.uint64)
        module.ghosts_put(table, names, np.array([5, VALUES - 1, 9], np.uint64))
        module.ghosts_find(table, names, out, False)
        assert out.tolist() == [9, VALUES - 1, 9]
        module.ghosts_find(table, names, out, True)
        assert out.tolist() == [9, VALUES - 1, -1]
        assert not table.any()


def test_buffers_that_do_not_fit_are_refused() -> None:
    table, names = np.zeros(16, np.uint64), np.zeros(3, np.uint64)
    with pytest.raises(ValueError, match="a table of ghosts of 0 bytes"):
        _native.ghosts_put(table[:0], names, names)
    with pytest.raises(ValueError, match="a table of ghosts of 96 bytes"):
        _native.ghosts_find(table[:12], names, np.zeros(3, np.int64), False)
    with pytest.raises(ValueError, match="16 bytes for the values of 3 ghosts"):
        _native.ghosts_find(table, names, np.zeros(2, np.int64), False)
    with pytest.raises(ValueError, match="16 bytes of values for 3 ghosts"):
        _native.ghosts_put(table, names, names[:2])
    table.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _native.ghosts_put(table, names, names)
