"""A recommendation: the tiers and the policy of a node, the GPU time they save, and the wear of its drive."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvstore.errors import MisuseError
from kvstore.lab.experiment import Experiment
from kvstore.lab.sizing import Sizing, loads_bytes_per_s

OF_BEST = 0.9
"""The hit ratio to reach without another one, as a share of what a cache with room for everything serves."""
_HOUR_S, _DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens that the engine computes per second, and bytes that a drive loads per second."""

    prefill_tokens_per_s: float
    nvme_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "nvme_bytes_per_s"):
            if not 0 < getattr(self, name) < inf:
                raise MisuseError(f"{name} is {getattr(self, name)}", "a rate above 0")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer of `sizing`, and what it is worth.

    `token_bytes`: KV of one token. `gpu_s_per_hour`: seconds of prefill that hits save in an hour of the
    trace. `nvme_tokens_per_s`: the speed of a load. Rates are averages; None: the trace has no duration.
    """

    sizing: Sizing
    speeds: Speeds
    token_bytes: float
    gpu_s_per_hour: float | None
    nvme_tokens_per_s: float
    nvme_loads_bytes_per_s: float | None
    nvme_writes_bytes_per_day: float | None


def nvme_tokens_per_s(experiment: Experiment, speeds: Speeds) -> float:
    """Returns how fast NVMe loads tokens. An engine that computes them faster does not load them."""
    return speeds.nvme_bytes_per_s / experiment.block_bytes * experiment.workload.block_tokens


def recommend(experiment: Experiment, sizing: Sizing, speeds: Speeds) -> Recommendation:
    """Returns what the answer of a sizing saves."""
    work, answer = experiment.workload, sizing.answer
    seconds = work.duration_s or None
    served_tokens = answer.hit_ratio * int(work.input_tokens.sum())
    written = answer.written_bytes_by_tier.get("nvme", 0)
    return Recommendation(
        sizing,
        speeds,
        experiment.block_bytes / work.block_tokens,
        seconds and served_tokens / speeds.prefill_tokens_per_s * _HOUR_S / seconds,
        nvme_tokens_per_s(experiment, speeds),
        seconds and loads_bytes_per_s(experiment, answer),
        seconds and written * _DAY_S / seconds,
    )
