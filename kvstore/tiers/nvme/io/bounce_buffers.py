"""Moves blocks that cannot go straight between slots and slabs: see `transforms.py`.

Wraps an I/O engine and is one. Blocks are packed on threads of its own and unpacked on the inner engine's,
one by one, so that the device stays busy. Its buffers hold the bytes of the file: of encrypted blocks only
ciphertext.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu
from kvstore.errors import TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO, IOEngine
from kvstore.tiers.nvme.io.transforms import TagError, TransformedIO

BUFFER_BYTES = 128 << 20
_THREADS = 2

Outcomes = list[OSError | None]

_Waiting = tuple[TransformedIO, Callable[[Outcomes], None], bool]


class BounceBufferEngine:
    """An `IOEngine` that also takes `TransformedIO`. Other blocks go straight to the inner engine."""

    def __init__(self, inner: IOEngine, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Takes over `inner`. `buffer_bytes` limits the memory of blocks under way."""
        self.name = inner.name
        self.device_memory = inner.device_memory
        self._inner = inner
        self._threads = ThreadPoolExecutor(_THREADS, "kvstore-pack")
        self._changed = threading.Condition()
        self._buffers = _Buffers(buffer_bytes)
        self._others: deque[_Waiting] = deque()
        self._urgent: deque[_Waiting] = deque()
        self._passed_over = 0
        self._moving = 0
        self._closed = False
        self.release = inner.release
        self.register = inner.register
        self.unregister = inner.unregister

    def submit(self, ios: Sequence[BlockIO], done: Callable[[Outcomes], None], urgent: bool = False) -> None:
        """See `IOEngine.submit`. A read that finds another block's bytes ends with a `TagError`."""
        transformed = [(i, io) for i, io in enumerate(ios) if isinstance(io, TransformedIO)]
        if not transformed:
            self._inner.submit(ios, done, urgent)
            return
        for io in ios:
            io.check()
        plain = [i for i, io in enumerate(ios) if not isinstance(io, TransformedIO)]
        batch = _Batch(len(ios), len(transformed) + bool(plain), done)
        with self._changed:
            if self._closed:
                raise TierError("the I/O engine is closed")
            if plain:
                self._inner.submit([ios[i] for i in plain], partial(batch.end, plain), urgent)
            queue = self._urgent if urgent else self._others
            queue.extend((io, partial(batch.end, [i]), urgent) for i, io in transformed)
        self._start()

    def close(self) -> None:
        """See `IOEngine.close`."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not (self._urgent or self._others or self._moving))
            self._buffers.close()
        self._threads.shutdown()
        self._inner.close()

    def _pin(self, io: TransformedIO, buffer: memoryview) -> None:
        """Pins a buffer, so that a GPU reaches it without another copy."""
        if isinstance(io.buffer, DeviceBuffer):
            self._buffers.pin(buffer, io.buffer.gpu)

    def _start(self) -> None:
        """Starts waiting blocks while there are buffers, the oldest of each urgency first."""
        while True:
            with self._changed:
                both = bool(self._urgent and self._others)
                others_turn = both and self._passed_over == OTHERS_EVERY - 1
                queue = self._others if others_turn or not self._urgent else self._urgent
                buffer = self._buffers.take(queue[0][0].slot_bytes) if queue else None
                if buffer is None:
                    return
                if both:
                    self._passed_over = 0 if others_turn else self._passed_over + 1
                io, done, urgent = queue.popleft()
                self._moving += 1
            ended = partial(self._ended, io, buffer, done)
            if io.write:
                self._threads.submit(self._write, io, buffer, ended)
            else:
                self._move(io, buffer, ended, urgent)

    def _write(self, io: TransformedIO, buffer: memoryview, ended: Callable[[Outcomes], None]) -> None:
        try:
            self._pin(io, buffer)
            io.pack(buffer)
        except OSError as error:
            ended([error.with_traceback(None)])  # its frames hold the buffers
        except Exception as error:
            ended([OSError(errno.EINVAL, repr(error))])
        else:
            self._move(io, buffer, ended, False)

    def _move(
        self, io: TransformedIO, buffer: memoryview, ended: Callable[[Outcomes], None], urgent: bool
    ) -> None:
        try:
            self._inner.submit([BlockIO(io.fd, io.offset, buffer, io.write)], ended, urgent)
        except TierError as error:
            ended([OSError(errno.ESHUTDOWN, str(error))])

    def _ended(
        self, io: TransformedIO, buffer: memoryview, done: Callable[[Outcomes], None], errors: Outcomes
    ) -> None:
        [error] = errors
        try:
            if error is None and not io.write:
                self._pin(io, buffer)
                if not io.unpack(buffer):
                    what = f"{io.slot_bytes} bytes at {io.offset} are not this block"
                    error = TagError(errno.EBADMSG, what)
        except OSError as failure:
            error = failure.with_traceback(None)
        except Exception as failure:
            error = OSError(errno.EINVAL, repr(failure))
        try:
            done([error])
        finally:
            with self._changed:
                self._buffers.give(buffer)
                self._moving -= 1
                self._changed.notify_all()
            self._start()


class _Batch:
    """Collects the outcomes of one `submit`, which ends in several parts."""

    def __init__(self, blocks: int, parts: int, done: Callable[[Outcomes], None]) -> None:
        self._outcomes: Outcomes = [None] * blocks
        self._parts = parts
        self._done = done
        self._lock = threading.Lock()

    def end(self, which: list[int], errors: Outcomes) -> None:
        with self._lock:
            for i, error in zip(which, errors, strict=True):
                self._outcomes[i] = error
            self._parts -= 1
            if self._parts:
                return
        self._done(self._outcomes)


class _Buffers:
    """At most `limit_bytes` of page-aligned memory. Returned buffers are reused."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._pinned: dict[int, Gpu | None] = {}

    def take(self, nbytes: int) -> memoryview | None:
        """Returns a buffer with undefined contents, None if the limit is reached."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        for size, buffers in self._free.items():
            while buffers and self._left_bytes < nbytes:
                self._unpin(buffers.pop())
                self._left_bytes += size
        if self._left_bytes < nbytes:
            return None
        self._left_bytes -= nbytes
        return memoryview(mmap.mmap(-1, nbytes))

    def give(self, buffer: memoryview) -> None:
        self._free[len(buffer)].append(buffer)

    def pin(self, buffer: memoryview, gpu: Gpu) -> None:
        """Pins a taken buffer, once, if CUDA allows it. Takes up to a millisecond."""
        if id(buffer) not in self._pinned:
            self._pinned[id(buffer)] = None
            # If the GPU is lost, the copy reports it.
            with contextlib.suppress(CudaError):
                if gpu.register(buffer):
                    self._pinned[id(buffer)] = gpu

    def close(self) -> None:
        """Unpins the free buffers."""
        for buffers in self._free.values():
            for buffer in buffers:
                self._unpin(buffer)

    def _unpin(self, buffer: memoryview) -> None:
        gpu = self._pinned.pop(id(buffer), None)
        if gpu is not None:
            # A lost GPU has nothing pinned.
            with contextlib.suppress(CudaError):
                gpu.unregister(buffer)
