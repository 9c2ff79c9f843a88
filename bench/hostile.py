"""hostile: effect on a tenant of attacks by strangers and by another tenant, one by one and then all at once.

The victim puts, looks up and gets chains, verified, at a modest rate with the default deadline of the client.
Each load has three rows: the p99 of the most affected kind of call (put, lookup, get), compared with the same
calls without the load; the share of calls that returned everything in time; and the peak memory of the daemon
above its memory before the first load. The calls without load are measured again before every load.

Each load is one process with 64 connections that uses at most its part of `CORES` (see `hostile_load`). All
loads together use no more than `CORES`. `hostile/control`: processes that use as much CPU as the attackers
and the daemon under all loads at once, without requests. It is the cost of busy cores; `ratio_control`
compares the calls under a load with those beside the control. `hostile/admin`: the victim is a probe that
requests /readyz from `kvstore admin` over TCP, with one connection per probe.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import hostile_load
from bench.harness import KIB, MIB, Bench, Neighbours, NotDone, Result, Target, Unable, cpu_seconds, quantile
from bench.hostile_load import Call, Post, Tally
from bench.served import complete, wait_until
from bench.tenant_load import Cue, Site, running
from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon

VICTIM, HOSTILE, READER = "victim", "hostile", "reader"
ROLES = {VICTIM: "admin", HOSTILE: "write", READER: "read"}
CORES = 0.5
"""CPU of all attackers together, in cores."""
IDLE = 140
_ATTACKER_UIDS = range(61010, 61100)
"""The users of the attackers, one per attack: the rate of new connections is limited per user."""
_TIMES = 3.0
_MEMORY_MIB = 256.0
_LEAST = {"sent_bytes": 16 * MIB}
"""Least counts that show that a load took effect, if not 1: socket buffers alone hold 13 MiB."""
_ASK_EVERY_S = 0.02
_READY_WITHIN_S = 30.0
KINDS = "put", "lookup", "get"
_COUNTS = "sent", "answered", "refused", "cut"

Attack = Callable[[Cue, Post], Tally]

ATTACKS: dict[str, tuple[Attack, str, str]] = {
    "long-frames": (hostile_load.long_frames, "", "cut"),
    "many-values": (hostile_load.many_values, HOSTILE, "cut"),
    "waits": (hostile_load.waits, READER, "sent"),
    "unread": (hostile_load.unread, HOSTILE, "sent"),
    "leases": (hostile_load.leases, READER, "answered"),
    "namespaces": (hostile_load.namespaces, READER, "answered"),
    "unfinished": (hostile_load.unfinished, HOSTILE, "sent_bytes"),
    # The last load: it takes all remaining connections.
    "connections": (hostile_load.connections, READER, "cut"),
}
"""Loads by name: function, tenant ("": none), and the count that shows that it took effect."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of blocks and tiers. DRAM cannot hold all chains. `warm_up_s`: before each measurement."""

    block_bytes: int = 64 * KIB
    dram_bytes: int = 256 * MIB
    chains: int = 192
    blocks: int = 32
    pace_s: float = 0.01
    warm_up_s: float = 0.5
    least_s: float = 0.0

    @property
    def layout(self) -> Layout:
        """Returns the layout of the victim."""
        return Layout(model="bench-hostile", block_bytes=self.block_bytes)


SMOKE = Sizes(4 * KIB, 16 * MIB, 8, 8, 0.01, 0.05, 0.5)


@dataclass(slots=True)
class Measured:
    """One load: its time span and the span without load before it (s, monotonic clock), the tallies of the
    attackers, memory (MiB above idle) and CPU of the daemon (cores).
    """

    alone: tuple[float, float]
    during: tuple[float, float]
    tallies: dict[str, Tally]
    memory_mib: float
    daemon_cores: float
    noisy: bool

    @property
    def attack_cores(self) -> float:
        """CPU of all attackers while they worked, in cores."""
        return sum(tally.cpu_s / max(tally.wall_s, 1e-9) for tally in self.tallies.values())


def run(bench: Bench) -> Iterator[Result]:
    """Yields the rows of every load, then those of the REST interface. Raises Unable without root."""
    if os.getuid():
        raise Unable("only root can act as several users")
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder, _served(z, folder) as daemon:
        yield from _loads(bench, z, daemon)
    yield from _admin(bench, z)


def _loads(bench: Bench, z: Sizes, daemon: LocalDaemon) -> Iterator[Result]:
    victim = Site(daemon.url, _token(VICTIM), z.layout)
    with Client(victim.url, victim.token, deadline_s=30.0, strict=True) as client:
        client.namespace(z.layout).publish([READER])
    bench.doing("the victim stores its blocks")
    with running(hostile_load.work, victim, z.chains, z.blocks, z.pace_s) as end:
        attacked = _Attacked(bench, z, daemon)
        loads = {name: attacked.by((name,)) for name in ATTACKS}
        loads["all"] = attacked.by(tuple(ATTACKS))
        loads["control"] = attacked.by_burners(loads["all"].attack_cores, loads["all"].daemon_cores)
        calls: list[Call] = end()
    alone = [call for each in loads.values() for call in _within(calls, each.alone)]
    if any(call.lost for call in alone) or not alone:
        raise NotDone(f"of {len(alone)} calls alone, these failed: {[c for c in alone if c.lost][:3]}")
    control = _within(calls, loads["control"].during)
    for name, load in loads.items():
        yield from _rows(name, load, _within(calls, load.during), alone, control, attacked.idle_mib)


def _within(calls: list[Call], time_s: tuple[float, float]) -> list[Call]:
    """Returns the calls that began in a time span."""
    return [call for call in calls if time_s[0] <= call.began < time_s[1]]


@contextmanager
def _served(z: Sizes, folder: Path) -> Iterator[LocalDaemon]:
    """Runs a daemon that other users can reach. Its disk stores records of namespaces, not blocks."""
    settings: dict[str, dict[str, object]] = {
        "daemon": {"socket_mode": 0o666},
        "dram": {"limit": z.dram_bytes},
        "nvme": {"path": folder, "limit": 64 * MIB, "write_budget": 1},
        "scrub": {"rate": 0},
        "policy": {"eviction": "lru"},
    }
    for tenant, role in ROLES.items():
        settings[f"tenants.{tenant}"] = {"share": 1.0}
        digest = hashlib.sha256(_token(tenant).encode()).hexdigest()
        # A list of tables is an array of tables in TOML.
        settings[f"[tenants.{tenant}.tokens]"] = {"hash": f"sha256:{digest}", "role": role}
    settings[f"tenants.{VICTIM}.dram"] = {"floor": z.dram_bytes // 2}
    with LocalDaemon(settings) as daemon:
        daemon.folder.chmod(0o755)
        with Client(daemon.url, "", deadline_s=30.0) as client:  # an operator
            wait_until(client, complete)
        yield daemon


def _token(tenant: str) -> str:
    return f"token-of-{tenant}" if tenant else ""


class _Attacked:
    """One daemon with a working victim, and its memory before the first attack."""

    def __init__(self, bench: Bench, z: Sizes, daemon: LocalDaemon) -> None:
        self._bench, self._z, self._daemon = bench, z, daemon
        self._seconds = max(bench.seconds, z.least_s)
        self.idle_mib = _memory_mib(daemon.pid, "VmRSS")

    def by(self, names: tuple[str, ...]) -> Measured:
        """Measures under these attacks, and before that for half the time without them.

        The measurement begins once each attack has had its effect. Raises NotDone if one has none.
        """
        z, posts = self._z, []
        for name in names:
            attack, tenant, shows = ATTACKS[name]
            site = Site(self._daemon.url, _token(tenant), z.layout)
            uid, cores = _ATTACKER_UIDS[list(ATTACKS).index(name)], CORES / len(names)
            post = Post(site, uid, cores, victim=VICTIM, chains=z.chains, blocks=z.blocks)
            posts.append((attack, replace(post, shows=shows, least=_LEAST.get(shows, 1))))
        return self._beside(" and ".join(names), names, posts)

    def by_burners(self, attack_cores: float, daemon_cores: float) -> Measured:
        """Measures beside processes that use this CPU: one per attack, and one for the daemon."""
        n = len(ATTACKS)
        site = Site(self._daemon.url, "", self._z.layout)
        posts = [(hostile_load.burn, Post(site, 0, attack_cores / n))] * n
        posts.append((hostile_load.burn, Post(site, 0, daemon_cores)))
        return self._beside("burners", tuple(f"burner-{i}" for i in range(n + 1)), posts)

    def _beside(self, what: str, names: tuple[str, ...], posts: list[tuple[Attack, Post]]) -> Measured:
        self._bench.doing(f"alone, before {what}")
        neighbours = Neighbours()
        time.sleep(self._z.warm_up_s)  # the daemon cleans up after the last load
        alone, _ = self._pass(self._seconds / 2)
        self._bench.doing(what)
        pid = self._daemon.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        with ExitStack() as stack:
            ends = [stack.enter_context(running(attack, post)) for attack, post in posts]
            time.sleep(self._z.warm_up_s)
            during, cores = self._pass(self._seconds)
            tallies = dict(zip(names, (end() for end in ends), strict=True))
        memory_mib = _memory_mib(pid, "VmHWM") - self.idle_mib
        return Measured(alone, during, tallies, memory_mib, cores, neighbours.disturbed())

    def _pass(self, seconds: float) -> tuple[tuple[float, float], float]:
        """Waits. Returns the time span and the CPU of the daemon in cores."""
        cpu_s, began = cpu_seconds(self._daemon.pid), time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        return (began, ended), (cpu_seconds(self._daemon.pid) - cpu_s) / (ended - began)


def _rows(
    name: str, load: Measured, calls: list[Call], alone: list[Call], control: list[Call], idle_mib: float
) -> Iterator[Result]:
    """Yields the rows of one load."""
    p99 = {kind: (_p99_us(calls, kind), _p99_us(alone, kind)) for kind in KINDS}
    ratios = {kind: mine / theirs for kind, (mine, theirs) in p99.items()}
    worst = max(ratios, key=ratios.__getitem__)
    extra: dict[str, object] = {f"ratio_{kind}": ratio for kind, ratio in ratios.items()}
    if name != "control":
        extra["ratio_control"] = p99[worst][0] / _p99_us(control, worst)
    extra |= {"of": worst, "attackers_cores": load.attack_cores, "daemon_cores": load.daemon_cores}
    target = None if name == "control" else Target("<=", _TIMES)
    n, noisy = len(calls), load.noisy
    yield Result(
        f"hostile/{name}/p99", p99[worst][0], "µs", p99[worst][1], ratios[worst], n, 0, noisy, target, extra
    )
    if name == "control":
        return
    lost = Counter(call.lost for call in calls if call.lost)
    why = Counter(call.why for call in calls if call.why).most_common(1)
    yield Result(
        f"hostile/{name}/served", 1.0 - lost.total() / n, "of the calls", None, None, n, 0, noisy,
        Target(">=", 1.0, "value"), {**lost, **({"why": why[0][0]} if why else {})},
    )  # fmt: skip
    did = {key: sum(getattr(t, key) for t in load.tallies.values()) for key in _COUNTS}
    did["sent_mib"] = sum(tally.sent_bytes for tally in load.tallies.values()) // MIB
    yield Result(
        f"hostile/{name}/memory", load.memory_mib, "MiB", idle_mib, None, n, 0, noisy,
        Target("<=", _MEMORY_MIB, "value"), did,
    )  # fmt: skip


def _p99_us(calls: list[Call], kind: str) -> float:
    """Returns the p99 of all calls, failed ones included, in µs. Raises NotDone without calls."""
    took = [call.took for call in calls if call.kind == kind]
    if not took:
        raise NotDone(f"the victim made no {kind}")
    return 1e6 * quantile(took, 0.99)


def _memory_mib(pid: int, what: str) -> float:
    """Returns a field of /proc/PID/status in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / KIB
    raise NotDone(f"/proc/{pid}/status has no {what}")


# -- the interface


def _admin(bench: Bench, z: Sizes) -> Iterator[Result]:
    """Yields the rows of probes beside idle connections to the same port."""
    seconds = max(bench.seconds, z.least_s)
    with _interface(z) as port:
        bench.doing("probes alone")
        alone = _probe(port, seconds)
        bench.doing("probes beside idle connections")
        neighbours = Neighbours()
        with running(hostile_load.idle_tcp, port, IDLE, CORES) as end:
            beside = _probe(port, seconds)
            tally: Tally = end()
    if not all(ok for _, ok in alone) or tally.sent < IDLE:
        raise NotDone(f"{alone} were probes alone; {tally.sent} idle connections")
    noisy, n, refused = neighbours.disturbed(), len(beside), sum(not ok for _, ok in beside)
    mine, theirs = (1e6 * quantile([took for took, _ in each], 0.99) for each in (beside, alone))
    extra = {"idle_connections": IDLE, "cut": tally.cut}
    yield Result(
        "hostile/admin/p99", mine, "µs", theirs, mine / theirs, n, 0, noisy, Target("<=", _TIMES), extra
    )
    yield Result(
        "hostile/admin/served", 1.0 - refused / n, "of the probes", None, None, n, 0, noisy,
        Target(">=", 1.0, "value"), {"refused": refused},
    )  # fmt: skip


@contextmanager
def _interface(z: Sizes) -> Iterator[int]:
    """Runs a REST interface. Yields its port once it answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    settings = {
        "dram": {"limit": z.dram_bytes},
        "admin": {"listen": f"127.0.0.1:{port}", "requests_per_s": 1000},
    }
    with LocalDaemon(settings) as daemon:
        command = [sys.executable, "-P", "-m", "kvstore", "admin", "-c", str(daemon.folder / "kvstore.toml")]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            ends = time.monotonic() + _READY_WITHIN_S
            while not _ready(port):
                if time.monotonic() > ends:
                    raise NotDone("the interface did not start")
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


def _probe(port: int, seconds: float) -> list[tuple[float, bool]]:
    """Sends probes. Returns for each its seconds and whether the answer was 200."""
    probes: list[tuple[float, bool]] = []
    due = time.perf_counter()
    ends = due + seconds
    while due < ends:
        began = time.perf_counter()
        ready = _ready(port)
        probes.append((time.perf_counter() - began, ready))
        due = max(due + _ASK_EVERY_S, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
    return probes


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
