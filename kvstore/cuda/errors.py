"""CUDA's error numbers: which are permanent, and hints for the others."""

from __future__ import annotations

from kvstore.errors import TierError

OUT_OF_MEMORY = 2
OLD_DRIVER = 35
NO_DEVICE = 100
ALREADY_REGISTERED = 712

LOST = frozenset(
    {
        4,  # the driver is shutting down
        46,  # devices unavailable
        NO_DEVICE,
        201,  # the context is not valid any more
        214,  # ECC, uncorrectable
        220,  # NVLink, uncorrectable
        700,  # illegal address
        702,  # launch timeout
        709,  # the context is destroyed
        710,  # assert in a kernel
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # an error contained to this process
        802,  # system not ready
        999,  # unknown: what a GPU that fell off the bus gives
    }
)
"""After one of these errors every later call of this process fails."""

NO_IPC = frozenset({1, 101, 201, 205, 304, 400, 801})
"""Errors of IPC calls where IPC does not work: separate containers, MIG, other platforms."""

_CONTAINER = "run the container with --ipc=host and --pid=host, or share both with the other one"


class CudaError(TierError):
    """A call to CUDA failed. `code` is CUDA's own number, 0 if it has none.

    `lost`: the device, or this process's context on it, is lost permanently.
    """

    def __init__(self, message: str, hint: str = "", lost: bool = False, code: int = 0) -> None:
        super().__init__(message, hint)
        self.lost = lost
        self.code = code


def failure(what: str, code: int, said: str) -> CudaError:
    """Returns the error of a call that failed with CUDA's number `code`. `what` begins the message."""
    lost = code in LOST or "is lost" in said
    hint = "the GPU is of no more use to this process: see the kernel's log for Xid" if lost else ""
    return CudaError(f"{what}: {said}", hint, lost, code)


def no_ipc(error: CudaError, what: str) -> CudaError:
    """Returns the error of an IPC call, with a hint if IPC does not work here."""
    if error.code not in NO_IPC:
        return error
    return CudaError(f"CUDA IPC does not work here: {what}: {error.message}", _CONTAINER, code=error.code)
