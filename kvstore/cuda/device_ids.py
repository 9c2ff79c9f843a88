"""The GPUs that this process sees, and their names.

A name is the UUID of nvidia-smi: `GPU-...`, or `MIG-...` for an instance of a partitioned GPU. CUDA does not
tell the two apart; CUDA_VISIBLE_DEVICES does, or NVML if nvidia-ml-py is installed. With neither, the name of
an instance is its UUID after `GPU-`, which nvidia-smi does not show.
"""

from __future__ import annotations

import os
from typing import Any

from kvstore.cuda.errors import NO_DEVICE, OLD_DRIVER, failure
from kvstore.errors import MisuseError


def why_not() -> str:
    """Returns why CUDA cannot be used here, empty if it can."""
    try:
        import cupy  # noqa: PLC0415
    except ModuleNotFoundError as error:
        return f"there is no package {error.name}: install kvstore[cuda]"
    except Exception as error:
        # A package for another CUDA, or an incomplete one, raises errors of many types.
        return f"cupy cannot be used: {error}"[:300]
    runtime = cupy.cuda.runtime
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return _why(runtime, error)
    return ""


def _why(runtime: Any, error: Any) -> str:
    try:
        driver, wanted = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except runtime.CUDARuntimeError:
        driver, wanted = 0, 0
    if error.status == OLD_DRIVER and not driver:
        return "there is no NVIDIA driver (libcuda.so.1)"
    if error.status == OLD_DRIVER:
        return f"the NVIDIA driver is too old: it is for CUDA {_version(driver)}, cupy for {_version(wanted)}"
    if error.status == NO_DEVICE:
        return "no GPU is visible (CUDA_VISIBLE_DEVICES, or a container without one)"
    return f"CUDA cannot be used: {error}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def uuids() -> list[str]:
    """Returns the names of visible GPUs, in CUDA's order. CudaError without CUDA."""
    import cupy  # noqa: PLC0415

    runtime = cupy.cuda.runtime
    try:
        raw = [bytes(runtime.getDeviceProperties(i)["uuid"]) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        raise failure("cannot list the GPUs", error.status, str(error)) from None
    # CUDA shows a process only one instance.
    instance = _instance(raw[0]) if len(raw) == 1 else ""
    return [instance] if instance else [f"GPU-{_dashed(one)}" for one in raw]


def resolve(device: int | str) -> str:
    """Returns the UUID of a device: 0, "0", "cuda:0", a UUID or a unique prefix of one. MisuseError."""
    there = uuids()
    text = str(device).strip()
    number = text.removeprefix("cuda:")
    if number.isdecimal():
        found = there[int(number) : int(number) + 1]
    else:
        found = [uuid for uuid in there if text and uuid.lower().startswith(text.lower())]
    if len(found) != 1:
        problem = "is more than one GPU" if found else "is no GPU here"
        raise MisuseError(f"device {device!r} {problem}", f"there are: {', '.join(there) or 'none'}")
    return found[0]


def _dashed(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _instance(raw: bytes) -> str:
    """Returns the name of the only visible device if it is a MIG instance, else empty."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    known = _nvml_instances()
    if first.startswith("MIG-"):
        full = [uuid for uuid in known if uuid.startswith(first)]
        return full[0] if len(full) == 1 else first
    named = f"MIG-{_dashed(raw)}"
    return named if named in known else ""


def _nvml_instances() -> list[str]:
    """Returns the names of all MIG instances, none without NVML."""
    try:
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
    except Exception:
        return []
    found = []
    try:
        for i in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(i)
            for j in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
                try:
                    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, j))
                except pynvml.NVMLError:  # no instance has this number
                    continue
                found.append(uuid.decode() if isinstance(uuid, bytes) else str(uuid))
    except pynvml.NVMLError:  # not partitioned, or no access
        pass
    finally:
        pynvml.nvmlShutdown()
    return found
