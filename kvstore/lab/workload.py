"""A workload: a trace as flat arrays of request times and block numbers.

A workload is built once, saved to a folder and mapped by the processes that replay it. A block's number
stands for its id and the number of the block before it, so equal numbers mean equal prefixes. Requests of one
conversation have the same session number.

Not covered: the schedule of conversations (`closed_loop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import KVStoreError, MisuseError
from kvstore.lab.traces import Trace, TraceSession

Blocks = npt.NDArray[np.int32]
Names = npt.NDArray[np.uint64]
Sessions = npt.NDArray[np.int32]
_COLUMNS = ("times_s", "input_tokens", "starts", "blocks")
_SAVED = (*_COLUMNS, "sessions")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests sorted by time. The blocks of request i are `blocks[starts[i]:starts[i + 1]]`.

    Block numbers are below `unique_blocks`, in the order of first use. `sessions` has the session of each
    request, below `session_count`.
    """

    block_tokens: int
    unique_blocks: int
    times_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    blocks: Blocks
    sessions: Sessions

    def repeated(self, times: int) -> Workload:
        """Returns this workload repeated `times` times in a row; each repetition has its own blocks."""
        if times == 1:
            return self
        each = np.arange(times)
        period_s = self.duration_s * (1 + 1 / max(1, self.requests - 1))
        starts = (each[:, None] * self.accesses + self.starts[:-1]).ravel()
        return Workload(
            self.block_tokens,
            self.unique_blocks * times,
            (each[:, None] * period_s + self.times_s).ravel(),
            np.tile(self.input_tokens, times),
            np.append(starts, self.accesses * times),
            (each[:, None] * self.unique_blocks + self.blocks).ravel().astype(self.blocks.dtype),
            (each[:, None] * self.session_count + self.sessions).ravel().astype(self.sessions.dtype),
        )

    @property
    def requests(self) -> int:
        """The number of requests."""
        return len(self.times_s)

    @property
    def accesses(self) -> int:
        """The number of blocks in all requests."""
        return len(self.blocks)

    @property
    def session_count(self) -> int:
        """The number of sessions."""
        return int(self.sessions.max(initial=-1)) + 1

    @property
    def longest(self) -> int:
        """The number of blocks in the longest prompt."""
        return int(np.diff(self.starts).max(initial=0))

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.times_s[-1] - self.times_s[0]) if len(self.times_s) else 0.0

    def digest(self) -> str:
        """Returns a digest of requests and blocks: 32 hex digits."""
        state = xxhash.xxh3_128(f"{self.block_tokens} {self.unique_blocks}".encode())
        for name in _COLUMNS:
            state.update(np.ascontiguousarray(getattr(self, name)).data)
        return state.hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the arrays into a folder."""
        for name in _SAVED:
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.save(folder / "scalars.npy", np.array([self.block_tokens, self.unique_blocks]))

    @classmethod
    def load(cls, folder: Path) -> Workload:
        """Maps the arrays that `save` wrote, read-only."""
        block_tokens, unique_blocks = np.load(folder / "scalars.npy").tolist()
        columns = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _SAVED]
        return cls(block_tokens, unique_blocks, *columns)


class Numbering:
    """Numbers the blocks of prompts. `block_tokens` is a multiple of the trace's block.

    Ids are global if the sessions use the trace's clock, otherwise local to their session. Two models never
    share a block.
    """

    def __init__(self, block_tokens: int, trace_tokens: int) -> None:
        if block_tokens < 1 or block_tokens % trace_tokens:
            raise MisuseError(
                f"blocks of {block_tokens} tokens cannot be made of the trace's {trace_tokens}",
                f"a multiple, such as {4 * trace_tokens}",
            )
        self.block_tokens = block_tokens
        self.unique = 0
        self._ids_a_block = block_tokens // trace_tokens
        self._roots: dict[str, int] = {}
        self._common: dict[int, list[int]] = {}
        self._known: dict[tuple[int, int, int], int] = {}

    def prompts(self, session: TraceSession, shared: float) -> list[Blocks]:
        """Returns the blocks of each prompt. All sessions share a fraction `shared` of the preamble."""
        if session.own_clock:
            self._known = {}
        common = int(shared * session.preamble_tokens) // self.block_tokens
        latest: dict[tuple[str, bool], tuple[Names, Blocks]] = {}
        out = []
        step = self._ids_a_block
        for call in session.calls:
            end = call.tokens_in // self.block_tokens * step
            names = _joined(np.array(call.hash_ids[:end], np.uint64).reshape(-1, step))
            blocks = np.empty(len(names), np.int32)
            before = latest.get((call.model, call.main))
            start = _shared(before[0], names) if before else 0
            if before:
                blocks[:start] = before[1][:start]
            root = self._roots.setdefault(call.model, -1 - len(self._roots))
            head = self._head(root, min(common, len(names)) if call.main else 0)[start:]
            blocks[start : start + len(head)] = head
            start += len(head)
            parent = int(blocks[start - 1]) if start else root
            blocks[start:] = self._chain(root, parent, names[start:].tolist())
            latest[call.model, call.main] = names, blocks
            out.append(blocks)
        return out

    def _head(self, root: int, n: int) -> list[int]:
        """Returns the numbers of the first n blocks that all main prompts of a model share."""
        common = self._common.setdefault(root, [])
        while len(common) < n:
            common.append(self._next())
        return common[:n]

    def _chain(self, root: int, parent: int, names: list[int]) -> list[int]:
        """Returns the numbers of a chain of blocks with these names after `parent`."""
        out, known = [], self._known
        for name in names:
            key = root, parent, name
            if key not in known:
                known[key] = self._next()
            parent = known[key]
            out.append(parent)
        return out

    def _next(self) -> int:
        self.unique += 1
        return self.unique - 1


def _joined(ids: npt.NDArray[np.uint64]) -> Names:
    """Returns one name for the ids of each row. Equal rows have equal names."""
    names: Names = ids[:, 0].copy()
    for column in ids[:, 1:].T:
        names = mix(names) ^ column
    return names


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns a bijective mix (splitmix64) of numbers, which spreads them like hashes."""
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shared(a: Names, b: Names) -> int:
    """Returns the number of equal leading names."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def of_chats(trace: Trace, block_tokens: int) -> Workload:
    """Returns the workload of a trace of single requests, at the times of the trace."""
    numbering = Numbering(block_tokens, trace.block_tokens)
    prompts, times_s, tokens = [], [], []
    for session in trace.sessions():
        prompts += numbering.prompts(session, 0.0)
        times_s += [call.t for call in session.calls]
        tokens += [call.tokens_in for call in session.calls]
    return assemble(numbering, prompts, times_s, tokens)


def assemble(
    numbering: Numbering,
    prompts: Sequence[Blocks],
    times_s: Sequence[float],
    tokens: Sequence[int],
    sessions: Sequence[int] | None = None,
) -> Workload:
    """Returns the workload of these prompts, sorted by `times_s` (seconds).

    `sessions` None: a prompt continues the session of an earlier prompt that it starts with.
    """
    if not prompts:
        raise KVStoreError("the trace holds no requests", "are all of its lines bad?")
    order = np.argsort(np.array(times_s), kind="stable")
    sorted_prompts = [prompts[i] for i in order.tolist()]
    starts = np.concatenate(([0], np.cumsum([len(blocks) for blocks in sorted_prompts]))).astype(np.int64)
    known = None if sessions is None else np.array(sessions, np.int32)[order]
    return Workload(
        numbering.block_tokens,
        numbering.unique,
        np.array(times_s, np.float64)[order],
        np.array(tokens, np.int64)[order],
        starts,
        np.concatenate(sorted_prompts),
        _sessions(sorted_prompts) if known is None else known,
    )


def _sessions(prompts: Sequence[Blocks]) -> Sessions:
    """Returns a session for each prompt.

    A prompt is continued once. The next one that starts with it may continue an earlier prompt, or begins a
    session.
    """
    out = np.empty(len(prompts), np.int32)
    ends: dict[int, int] = {}
    sessions = 0
    for i, blocks in enumerate(prompts):
        session = None
        for block in reversed(blocks.tolist()):
            session = ends.pop(block, None)
            if session is not None:
                break
        if session is None:
            session = sessions
            sessions += 1
        out[i] = session
        if len(blocks):
            ends[int(blocks[-1])] = session
    return out
