"""Small functions of vLLM, such as the count of larger logprobs, run uncompiled. Each process would compile
them, for seconds. Models are compiled as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_compile = torch.compile


def leave_functions_uncompiled() -> None:
    """Call before vLLM is imported."""
    torch.compile = _compile_for_own_backends


def _compile_for_own_backends(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
    if backend != "inductor":
        return _compile(model, backend=backend, **options)
    return _same if model is None else model


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
