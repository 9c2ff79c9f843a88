"""A queue of batches of block I/O, moved by the threads that wait for their ends: the twin of `io_queue.c`.

Also for an engine that moves pieces by a library in Python: see `move`.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvstore.native import portable_files
from kvstore.native.portable_files import FilePiece

Outcome: TypeAlias = "int | OSError"
"""An errno, `END_OF_FILE`, 0 for success, or an error with a text of its own."""

Move: TypeAlias = Callable[[list[FilePiece]], Sequence[Outcome]]

_MOST_PIECES = 64  # of a task, which delays urgent ones
_FEW_PIECES, _FEW_BYTES = 4, 128 << 10  # of a task: waking another thread takes longer than moving so little


class PortableQueue:
    """Batches of transfers in two lanes, urgent and not. All threads that call `next` move their pieces.

    A transfer is cut into pieces of `task_bytes` at most. A task, pieces of one batch for one thread, has as
    many bytes at most, and such a share of its batch that `threads` have something to do.
    """

    def __init__(
        self,
        threads: int,
        task_bytes: int,
        queue_pieces: int,
        others_every: int,
        move: Move = portable_files.move_files,
    ) -> None:
        """Refuses a batch if more than `queue_pieces` pieces of its lane would wait.

        If both lanes wait, one task of `others_every` is not urgent. `move` returns an outcome for each piece
        of a task. ValueError for numbers below 1.
        """
        if min(threads, task_bytes, queue_pieces, others_every) < 1:
            raise ValueError("a number is too small")
        self._threads = threads
        self._task_bytes = task_bytes
        self._queue_pieces = queue_pieces
        self._others_every = others_every
        self._move = move
        self._changed = threading.Condition()
        self._lanes: tuple[deque[_Batch], deque[_Batch]] = deque(), deque()  # the second one is urgent
        self._waiting = [0, 0]  # pieces in each lane
        self._passed_over = 0
        self._closed = False

    def submit(self, transfers: list[FilePiece], token: Any, urgent: bool) -> bool:
        """Appends a batch. Returns False, and keeps nothing, if the queue is closed.

        If its lane is full, the batch moves nothing, and all its transfers end with EAGAIN.
        """
        batch = _Batch(transfers, token, self._task_bytes, self._threads)
        pieces = len(batch.pieces)
        with self._changed:
            if self._closed:
                return False
            if self._waiting[urgent] + pieces > self._queue_pieces:
                batch.failures = dict.fromkeys(range(len(transfers)), errno.EAGAIN)
                batch.pieces.clear()
            self._waiting[urgent] += len(batch.pieces)
            self._lanes[urgent].append(batch)
            self._changed.notify(
                max(1, -(-pieces // batch.most_pieces), -(-batch.nbytes // batch.most_bytes))
            )
            return True

    def next(self) -> tuple[Any, list[tuple[int, Outcome]]] | None:
        """Moves tasks until one of them ends its batch. Returns None if the queue is closed and empty.

        Otherwise returns the batch's token, and the number and outcome of each failed transfer, in order.
        """
        while True:
            with self._changed:
                while not any(self._lanes):
                    if self._closed:
                        return None
                    self._changed.wait()
                batch, task = self._take_task()
            outcomes = self._outcomes([piece for _, piece in task])
            with self._changed:
                batch.failures.update(
                    (number, outcome) for (number, _), outcome in zip(task, outcomes, strict=True) if outcome
                )
                batch.tasks -= 1
                if not batch.tasks and not batch.pieces:
                    return batch.token, sorted(batch.failures.items())
            del batch, task  # the next wait may be long, and must not keep buffers alive

    def close(self) -> None:
        """Refuses more batches. `next` still moves those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take_task(self) -> tuple[_Batch, list[tuple[int, FilePiece]]]:
        """Cuts the next task off its batch, less what belongs to transfers that have failed."""
        others, urgent = self._lanes
        takes_urgent = bool(urgent)
        if urgent and others:
            self._passed_over = (self._passed_over + 1) % self._others_every
            takes_urgent = bool(self._passed_over)
        lane = self._lanes[takes_urgent]
        batch = lane[0]
        task: list[tuple[int, FilePiece]] = []
        room = batch.most_bytes
        while batch.pieces and len(task) < batch.most_pieces:
            size = len(batch.pieces[0][1][2])
            if size > room and task:
                break
            room -= size
            task.append(batch.pieces.popleft())
        self._waiting[takes_urgent] -= len(task)
        batch.tasks += 1
        if not batch.pieces:
            lane.popleft()
        return batch, [each for each in task if each[0] not in batch.failures]

    def _outcomes(self, pieces: list[FilePiece]) -> Sequence[Outcome]:
        try:
            return self._move(pieces) if pieces else ()
        except Exception as error:
            if len(pieces) > 1:  # the other pieces are moved
                return [outcome for piece in pieces for outcome in self._outcomes([piece])]
            return [OSError(errno.EINVAL, repr(error))]


class _Batch:
    """`pieces` that no thread has taken, each with the number of its transfer, and the `tasks` under way."""

    __slots__ = ("failures", "most_bytes", "most_pieces", "nbytes", "pieces", "tasks", "token")

    def __init__(self, transfers: list[FilePiece], token: Any, task_bytes: int, threads: int) -> None:
        self.token = token
        self.pieces = deque(
            (i, (fd, offset + start, buffer[start : start + task_bytes], write))
            for i, (fd, offset, whole, write) in enumerate(transfers)
            for buffer in (_view(whole),)
            for start in range(0, len(buffer), task_bytes)
        )
        self.nbytes = sum(len(transfer[2]) for transfer in transfers)
        self.most_bytes = min(task_bytes, max(-(-self.nbytes // threads), _FEW_BYTES))
        self.most_pieces = min(_MOST_PIECES, max(-(-len(self.pieces) // threads), _FEW_PIECES))
        self.failures: dict[int, Outcome] = {}
        self.tasks = 0


def _view(buffer: Any) -> Any:
    """Returns what can be cut without a copy: memory of a GPU as it is."""
    try:
        return memoryview(buffer)
    except TypeError:
        return buffer
