"""Async scheduling on a CPU: vLLM schedules a step before it has the output of the last one, as on a GPU.

On a GPU that is vLLM's default, and its CPU build never does it. Here a step has ended when it is scheduled,
so the streams and events of a GPU, which vLLM waits for, are fakes.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.platforms.cpu import CpuPlatform

_check = CpuPlatform.check_and_update_config


def _keep_async_scheduling(config: Any) -> None:
    wanted = config.scheduler_config.async_scheduling
    _check(config)
    config.scheduler_config.async_scheduling = wanted


def overlap_steps() -> None:
    """All later engines of this process schedule so, but for those that are told not to."""
    CpuPlatform.check_and_update_config = staticmethod(_keep_async_scheduling)
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.cuda.current_stream = MagicMock()
    torch.cuda.stream = contextlib.nullcontext
