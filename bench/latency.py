"""Compares latencies of calls with an empty request on the same connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.harness import Bench, Result, Target, quantile
from kvstore import Client

CALLS = 100
"""Calls per sample: a few milliseconds, so that drift affects both sides of a round equally."""


@dataclass(slots=True)
class Timed:
    """Times `call(n)` for n = 0, 1, ... in µs. `after` runs untimed after each call."""

    call: Callable[[int], object]
    after: Callable[[], object] | None = None
    all_us: list[float] = field(default_factory=list)
    _n: int = 0

    def sample(self, _: int) -> float:
        """Returns the median of a sample of calls."""
        clock, call, after = time.perf_counter, self.call, self.after
        took = []
        for n in range(self._n, self._n + CALLS):
            start = clock()
            call(n)
            took.append((clock() - start) * 1e6)
            if after is not None:
                after()
        self._n += CALLS
        self.all_us += took
        return quantile(took, 0.5)


def compare(
    bench: Bench, name: str, client: Client, timed: Timed, share: float, target: Target | None
) -> Result:
    """Returns the row of one kind of call, compared with `Client.ping`."""
    ping = Timed(lambda _: client.ping())
    rounds = bench.interleave(name, (timed.sample, ping.sample), share)
    return rounds.result(
        name, "µs", target, p99=quantile(timed.all_us, 0.99), reference_p99=quantile(ping.all_us, 0.99)
    )
