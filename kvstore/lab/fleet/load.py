"""The requests of a fleet: samples and copies of a trace.

A fleet of N nodes plays `copies` copies of the trace at once. A fraction of a copy is a random sample of the
trace's sessions, each with all of its requests at their times. The first copy is the trace itself. In each
further copy, sessions begin up to a minute later, and blocks are the copy's own, except common ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.errors import MisuseError
from kvstore.lab.workload import Workload

MOST_DELAY_S = 60.0
"""Sessions of further copies begin up to this much later, so that copies do not arrive in step."""
_MOST_NUMBERS = 1 << 31
_Int64 = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


def common_blocks(trace: Workload, share: float) -> _Mask:
    """Returns which blocks at least two sessions and a fraction `share` of all sessions use, by block number.

    They are beginnings that an application gives its prompts, such as a system prompt.
    """
    session = np.repeat(trace.sessions.astype(np.int64), np.diff(trace.starts))
    uses = np.unique(trace.blocks.astype(np.int64) * trace.session_count + session)
    sessions = np.bincount(uses // max(1, trace.session_count), minlength=trace.unique_blocks)
    common: _Mask = sessions >= max(2.0, share * trace.session_count)
    return common


def load_of(trace: Workload, copies: float, common_share: float, seed: int) -> Workload:
    """Returns `copies` copies of a trace, sorted by time. Equal arguments give equal loads.

    `common_share`: see `common_blocks`. Raises MisuseError for more blocks than can be numbered.
    """
    if copies == 1:
        return trace
    if trace.unique_blocks * (copies + 1) >= _MOST_NUMBERS:
        raise MisuseError(f"{copies:g} copies of this trace have too many blocks", "fewer nodes or copies")
    common = common_blocks(trace, common_share)
    dice = np.random.default_rng(seed)
    requests: list[_Int64] = []
    numbers: list[_Int64] = []
    times_s: list[npt.NDArray[np.float64]] = []
    for copy in range(int(np.ceil(copies))):
        share = min(1.0, copies - copy)
        some = _sample(trace, share, copy, dice)
        delays_s = np.zeros(trace.session_count)
        if copy:
            delays_s = dice.uniform(0, MOST_DELAY_S, trace.session_count)
        requests.append(some)
        numbers.append(np.full(len(some), copy))
        times_s.append(trace.times_s[some] + delays_s[trace.sessions[some]])
    return _joined(trace, common, np.concatenate(requests), np.concatenate(numbers), np.concatenate(times_s))


def _sample(trace: Workload, share: float, copy: int, dice: np.random.Generator) -> _Int64:
    """Returns the requests of a fraction of the sessions; of at least one session in the first copy."""
    if share >= 1:
        return np.arange(trace.requests)
    n = max(round(share * trace.session_count), 0 if copy else 1)
    kept = np.zeros(trace.session_count, np.bool_)
    kept[dice.choice(trace.session_count, n, replace=False)] = True
    return np.flatnonzero(kept[trace.sessions])


def _joined(
    trace: Workload, common: _Mask, requests: _Int64, copies: _Int64, times_s: npt.NDArray[np.float64]
) -> Workload:
    """Returns the workload of these requests of the trace, each in its copy and at its time."""
    order = np.argsort(times_s, kind="stable")
    requests, copies, times_s = requests[order], copies[order], times_s[order]
    lengths = np.diff(trace.starts)[requests]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    # The places of the requests' blocks in the trace, one range after another.
    places = np.arange(starts[-1]) + np.repeat(trace.starts[:-1][requests] - starts[:-1], lengths)
    blocks = trace.blocks[places].astype(np.int64)
    own = np.repeat(copies, lengths) * trace.unique_blocks
    numbers, unique = _renumbered(np.where(common[blocks], blocks, blocks + own))
    sessions = trace.sessions[requests] + copies * trace.session_count
    tokens = trace.input_tokens[requests]
    return Workload(
        trace.block_tokens, unique, times_s, tokens, starts, numbers, sessions.astype(trace.sessions.dtype)
    )


def _renumbered(blocks: _Int64) -> tuple[npt.NDArray[np.int32], int]:
    """Returns blocks numbered in the order of first use, and their number."""
    unique, first, places = np.unique(blocks, return_index=True, return_inverse=True)
    number = np.empty(len(unique), np.int32)
    number[np.argsort(first)] = np.arange(len(unique))
    return number[places], len(unique)
