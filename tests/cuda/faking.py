"""Has a test run on the fake of cupy, in a world of its own, and its child processes too."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.cuda.device import Gpu

FAKE = Path(__file__).with_name("fake")
ROOT = FAKE.parents[2]
_worlds = itertools.count()


@contextmanager
def fake_cuda(gpus: int = 1, each_bytes: int = 1 << 30, **more: str) -> Iterator[Any]:
    """The fake is what `import cupy` gives meanwhile; its `control`. `more`: FAKE_CUDA_... in lower case."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(FAKE)
        patch.setenv("PYTHONPATH", f"{FAKE}:{ROOT}")
        settings = {"world": f"{os.getpid()}x{next(_worlds)}", "gpus": gpus, "bytes": each_bytes, **more}
        for name, value in settings.items():
            patch.setenv(f"FAKE_CUDA_{name.upper()}", str(value))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(Gpu, "_opened", {})
        patch.setattr("kvstore.cuda.device._module", None)
        control = importlib.import_module("cupy.control")
        try:
            yield control
        finally:
            control.end_world()
            for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
                del sys.modules[name]
