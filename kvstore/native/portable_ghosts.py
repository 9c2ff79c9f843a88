"""The twin of `ghosts.c`: values by fingerprint in a table of ghosts, by numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_WAYS = 8
_VALUE_BITS = 41
_VALUE = np.uint64((1 << _VALUE_BITS) - 1)


def ghosts_find(table: Words, fingerprints: Words, out: npt.NDArray[np.int64], remove: bool) -> None:
    """Writes the value of each fingerprint, -1 if there is none. `remove`: each is found once."""
    cells = table.reshape(-1, _WAYS)
    at, tags = _split(table, fingerprints)
    bucket = cells.take(at, axis=0)
    way = ((bucket ^ tags[:, None]) <= _VALUE).argmax(axis=1)
    values = bucket[np.arange(len(at)), way] ^ tags
    out[:] = np.where(values <= _VALUE, values.view(np.int64), -1)
    if remove:
        found = np.flatnonzero(values <= _VALUE)[::-1]
        at, way = at[found], way[found]
        # The first one of several writes last.
        cells[at, way] = found
        out[found[cells[at, way] != found]] = -1
        cells[at, way] = 0


def ghosts_put(table: Words, fingerprints: Words, values: Words) -> None:
    """Sets the value of each fingerprint, in this order. A full bucket drops its first lowest value."""
    cells = table.reshape(-1, _WAYS)
    at, tags = _split(table, fingerprints)
    words = tags | values & _VALUE
    while len(at):
        ordered = np.sort(at)
        some = np.ones(len(at), np.bool_)
        if (ordered[1:] == ordered[:-1]).any():
            # The first one of each bucket: the next one finds the bucket as this one leaves it.
            some[:] = False
            some[np.unique(at, return_index=True)[1]] = True
        places, ours = at[some], tags[some]
        bucket = cells.take(places, axis=0)
        same = (bucket ^ ours[:, None]) <= _VALUE
        way = np.where(same.any(axis=1), same.argmax(axis=1), (bucket & _VALUE).argmin(axis=1))
        cells[places, way] = words[some]
        at, tags, words = at[~some], tags[~some], words[~some]


def _split(table: Words, fingerprints: Words) -> tuple[npt.NDArray[np.int64], Words]:
    """Returns buckets, and tags in the bits above a value. A tag is never 0."""
    buckets = np.uint64(table.size // _WAYS)
    at = (fingerprints >> np.uint64(32)) * buckets >> np.uint64(32)
    tags = fingerprints << np.uint64(_VALUE_BITS)
    return at.view(np.int64), np.maximum(tags, _VALUE + np.uint64(1))
