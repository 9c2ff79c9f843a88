"""Simulates a fleet: requests arrive, wait at their nodes, load and compute, in order of time.

A node works on one prompt at a time, in the order of arrival. It loads blocks from NVMe and the network, one
after the other, then computes the rest. Blocks of DRAM cost no time. Computed blocks are stored, and can be
found by others, when the prompt is done. The time to the first token ends there, or with the hand-off.

With decode nodes, prefill nodes hand each prompt off over the network. A decode node receives one prompt at a
time, in order, only the blocks that it lacks. The upload takes place while the prompt is computed.

Not covered: the time of decoding, the load of the network as a whole, failures.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, Protocol

import numpy as np

from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy.admission import Rule
from kvstore.errors import MisuseError
from kvstore.lab.capacity import Capacities
from kvstore.lab.fleet.load import load_of
from kvstore.lab.fleet.network_tier import NetworkSize, NetworkTier
from kvstore.lab.fleet.node import FleetNode, Prompt
from kvstore.lab.fleet.report import FleetPoint
from kvstore.lab.fleet.routing import Router, router_of
from kvstore.lab.simulated_node import keys_of
from kvstore.lab.sweep import Progress
from kvstore.lab.workload import Workload
from kvstore.types import Tier

_TELL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of one node. `latency_s`: the time before a download from the network begins."""

    prefill_tokens_per_s: float
    nvme_bytes_per_s: float
    network_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "nvme_bytes_per_s", "network_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise MisuseError(f"{name} is {getattr(self, name):g}", "more than 0")
        if not 0 <= self.latency_s < inf:
            raise MisuseError(f"latency_s is {self.latency_s:g}", "seconds, not negative")

    def compute_s(self, tokens: float) -> float:
        """Returns the seconds that computing tokens takes."""
        return tokens / self.prefill_tokens_per_s

    def download_s(self, nbytes: float) -> float:
        """Returns the seconds that a download takes; 0 for nothing."""
        return nbytes / self.network_bytes_per_s + self.latency_s if nbytes else 0.0

    def least_blocks(self, block_bytes: int, block_tokens: int) -> float:
        """Returns the fewest blocks that are downloaded at least as fast as computed; infinity: never."""
        gain_s = self.compute_s(block_tokens) - block_bytes / self.network_bytes_per_s
        if gain_s <= 0:
            return 1 if gain_s == self.latency_s == 0 else inf
        return max(1, ceil(self.latency_s / gain_s))


@dataclass(frozen=True, slots=True)
class FleetTask:
    """One fleet. `decode_nodes` of the `nodes` decode only; 0: every node does both.

    `capacities`: the tiers of each node. `options`: arguments of SimulatedNode. `uploads`: which blocks are
    written to the network. `copies`, `common_share`: see `load.load_of`.
    """

    nodes: int
    routing: str
    network: NetworkSize
    capacities: Capacities
    block_bytes: int
    rates: Rates
    copies: float = 1.0
    common_share: float = 0.01
    decode_nodes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    uploads: Rule = field(default_factory=Rule)
    seed: int = 1


class _Work(Protocol):
    """What the nodes of a group do with a prompt."""

    def estimate(self, prompt: Prompt, stored: int) -> float:
        """Returns the seconds that a prompt takes on a node that has `stored` of its blocks."""

    def begin(self, node: int, prompt: Prompt, now: float) -> tuple[float, int]:
        """Begins a prompt on an idle node. Returns the seconds that it takes, and a number for `end`."""

    def end(self, node: int, prompt: Prompt, number: int, now: float) -> None:
        """Ends a prompt."""


class _Group:
    """Nodes that do the same work: their router, and the prompts that wait at each node."""

    def __init__(self, nodes: int, router: Router, work: _Work) -> None:
        self.router = router
        self.work = work
        self.busy = np.zeros(nodes, np.bool_)
        self.prompts = np.zeros(nodes, np.int64)
        self.busy_s = 0.0
        self._free_at = np.zeros(nodes)
        self._queued_s = np.zeros(nodes)
        self._queues: list[deque[tuple[Prompt, float]]] = [deque() for _ in range(nodes)]

    def arrive(self, prompt: Prompt, now: float) -> int:
        """Routes a prompt. Returns its node if this can begin it now, otherwise -1."""
        waits = np.maximum(self._free_at - now, 0.0) + self._queued_s
        node = self.router.choose(prompt, waits)
        self.prompts[node] += 1
        if not self.busy[node]:
            return node
        estimate_s = self.work.estimate(prompt, self.router.stored(node, prompt))
        self._queues[node].append((prompt, estimate_s))
        self._queued_s[node] += estimate_s
        return -1

    def begin(self, node: int, prompt: Prompt, now: float) -> tuple[float, int]:
        """Begins a prompt. Returns when it will end, and a number for `end`."""
        seconds, number = self.work.begin(node, prompt, now)
        self.busy[node] = True
        self.busy_s += seconds
        self._free_at[node] = now + seconds
        return now + seconds, number

    def end(self, node: int, prompt: Prompt, number: int, now: float) -> Prompt | None:
        """Ends a prompt. Returns the node's next one, if one waits."""
        self.work.end(node, prompt, number, now)
        self.busy[node] = False
        queue = self._queues[node]
        if not queue:
            return None
        following, estimate_s = queue.popleft()
        # Sums of floats drift: an empty queue is exactly 0.
        self._queued_s[node] = self._queued_s[node] - estimate_s if queue else 0.0
        return following


class _Prefill:
    """Loads what is stored of a prompt and computes the rest."""

    def __init__(self, fleet: Fleet, nodes: list[FleetNode]) -> None:
        self._fleet = fleet
        self.nodes = nodes
        task, self._block_tokens = fleet.task, fleet.load.block_tokens
        self._rates, self._block_bytes = task.rates, task.block_bytes
        self._least = self._rates.least_blocks(task.block_bytes, self._block_tokens)
        self.computed = self.downloaded = 0

    def estimate(self, prompt: Prompt, stored: int) -> float:
        return self._rates.compute_s(prompt.tokens - stored * self._block_tokens)

    def begin(self, node: int, prompt: Prompt, now: float) -> tuple[float, int]:
        served = self.nodes[node].read(prompt, self._least, now)
        self.downloaded += served.downloaded
        seconds = served.nvme * self._block_bytes / self._rates.nvme_bytes_per_s
        seconds += self._rates.download_s(served.downloaded * self._block_bytes)
        seconds += self.estimate(prompt, served.blocks)
        return seconds, served.blocks

    def end(self, node: int, prompt: Prompt, number: int, now: float) -> None:
        self.nodes[node].write(prompt, number, now)
        self.computed += prompt.keys.n - number
        if self._fleet.decode is None:
            self._fleet.first_token(prompt, now)
        else:
            self.nodes[node].hand_off(prompt)
            self._fleet.arrive(self._fleet.decode, prompt, now)


class _Decode:
    """Receives the blocks of a prompt that a prefill node has computed."""

    def __init__(self, fleet: Fleet, nodes: list[FleetNode]) -> None:
        self._fleet = fleet
        self.nodes = nodes
        self._rates, self._block_bytes = fleet.task.rates, fleet.task.block_bytes
        self.downloaded = 0

    def estimate(self, prompt: Prompt, stored: int) -> float:
        return self._rates.download_s((prompt.keys.n - stored) * self._block_bytes)

    def begin(self, node: int, prompt: Prompt, now: float) -> tuple[float, int]:
        missing = prompt.keys.n - self.nodes[node].stored(prompt, now)
        self.downloaded += missing
        return self._rates.download_s(missing * self._block_bytes), missing

    def end(self, node: int, prompt: Prompt, number: int, now: float) -> None:
        self.nodes[node].receive(prompt, now)
        self._fleet.first_token(prompt, now)


class Fleet:
    """A fleet and its requests. Simulates once."""

    def __init__(self, load: Workload, task: FleetTask) -> None:
        self.load = load
        self.task = task
        self.network = NetworkTier(task.network)
        self._keys = keys_of(np.arange(load.unique_blocks))
        self._waited_s = np.zeros(load.requests)
        self._ends: list[tuple[float, int, _Group, int, Prompt, int]] = []
        self._begun = 0
        self._now = 0.0
        self.decode: _Group | None = None
        compute_s = task.rates.compute_s(load.block_tokens)
        download_s = task.block_bytes / task.rates.network_bytes_per_s
        self._prefill_work = _Prefill(self, [])
        self._decode_work = _Decode(self, [])
        self._prefill = self._group(task.nodes - task.decode_nodes, compute_s, self._prefill_work)
        if task.decode_nodes:
            self.decode = self._group(task.decode_nodes, download_s, self._decode_work)

    def _group(self, nodes: int, block_s: float, work: _Prefill | _Decode) -> _Group:
        task = self.task
        router = router_of(task.routing, nodes, block_s, task.seed)
        listener = router if router.listens else None
        work.nodes += [
            FleetNode(
                number,
                task.capacities,
                task.block_bytes,
                self.network,
                options=task.options,
                uploads=task.uploads,
                listener=listener,
            )
            for number in range(nodes)
        ]
        return _Group(nodes, router, work)

    def run(self, progress: Progress | None = None) -> None:
        """Plays all requests. Calls `progress` with the number of accesses of the requests so far."""
        load, told = self.load, 0.0
        starts = load.starts.tolist()
        tokens, sessions = load.input_tokens.tolist(), load.sessions.tolist()
        for number, now in enumerate(load.times_s.tolist()):
            self._end_until(now)
            keys = self._keys[load.blocks[starts[number] : starts[number + 1]]]
            joined = Keys(keys.tobytes(), keys.itemsize)
            prompt = Prompt(number, joined, keys.tolist(), tokens[number], sessions[number])
            self.arrive(self._prefill, prompt, now)
            if progress is not None and (at := time.perf_counter()) - told > _TELL_EVERY_S:
                progress(starts[number + 1])
                told = at
        self._end_until(inf)
        if progress is not None:
            progress(load.accesses)

    def arrive(self, group: _Group, prompt: Prompt, now: float) -> None:
        """Sends a prompt to one of the nodes of a group."""
        node = group.arrive(prompt, now)
        if node >= 0:
            self._begin(group, node, prompt, now)

    def first_token(self, prompt: Prompt, now: float) -> None:
        """Notes that a prompt has its first token."""
        self._waited_s[prompt.number] = now - self.load.times_s[prompt.number]

    def _begin(self, group: _Group, node: int, prompt: Prompt, now: float) -> None:
        end, number = group.begin(node, prompt, now)
        self._begun += 1
        heapq.heappush(self._ends, (end, self._begun, group, node, prompt, number))

    def _end_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, _, group, node, prompt, number = heapq.heappop(self._ends)
            self._now = end
            following = group.end(node, prompt, number, end)
            if following is not None:
                self._begin(group, node, following, end)

    def nodes(self) -> list[FleetNode]:
        """Returns all nodes, those that prefill first."""
        return self._prefill_work.nodes + self._decode_work.nodes

    def point(self, wall_s: float) -> FleetPoint:
        """Returns the figures of the requests so far."""
        load, task, nodes = self.load, self.task, self._prefill_work.nodes
        hits = np.sum([node.hits for node in nodes], axis=0)
        by_tier = {c.tier.name.lower(): int(hits[c.tier]) for c in task.capacities}
        by_tier["network"] = int(hits[Tier.NETWORK])
        ratio = load.block_tokens / max(1, int(load.input_tokens.sum()))
        read = self._prefill_work.downloaded + self._decode_work.downloaded
        written = sum(node.uploaded for node in self.nodes())
        p50, p99 = np.percentile(self._waited_s, (50, 99)).tolist()
        span_s = max(self._now - float(load.times_s[0]), 1e-9)
        return FleetPoint(
            nodes=task.nodes,
            decode_nodes=task.decode_nodes,
            routing=task.routing,
            network=task.network.name,
            copies=task.copies,
            requests=load.requests,
            requests_per_s=load.requests / max(load.duration_s, 1e-9),
            accesses=load.accesses,
            best_hit_ratio=(load.accesses - load.unique_blocks) * ratio,
            hit_ratio=sum(by_tier.values()) * ratio,
            network_hit_ratio=by_tier["network"] * ratio,
            hits_by_tier=by_tier,
            computed_blocks=self._prefill_work.computed,
            denied_blocks=sum(node.denied for node in self.nodes()),
            network_read_bytes=read * task.block_bytes,
            network_written_bytes=written * task.block_bytes,
            network_bytes_per_request=(read + written) * task.block_bytes / load.requests,
            network_stored_bytes=len(self.network) * task.block_bytes,
            ttft_mean_s=float(self._waited_s.mean()),
            ttft_p50_s=p50,
            ttft_p99_s=p99,
            busy_ratio=self._prefill.busy_s / span_s / len(nodes),
            most_requests_ratio=float(self._prefill.prompts.max() / self._prefill.prompts.mean()),
            wall_s=wall_s,
        )


def play(trace: Workload, task: FleetTask, progress: Progress | None = None) -> FleetPoint:
    """Simulates one fleet with the load that the task makes of a trace."""
    gc.collect()  # a fleet refers to itself: the one before is still in memory
    begin = time.perf_counter()
    fleet = Fleet(load_of(trace, task.copies, task.common_share, task.seed), task)
    fleet.run(progress)
    return fleet.point(time.perf_counter() - begin)
