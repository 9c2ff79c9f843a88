"""What outlives the daemon: its extents of DRAM, kept by a service manager or by `kvstore supervise`."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, Tier
from kvstore.client.sync import Namespace
from kvstore.daemon.systemd import inherited
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.dram import OWNERS
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    check_limits,
    eventually,
    got,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    tier,
)
from tests.processes import stop


class Manager:
    """As much of a service manager as a test needs: hears what the daemon says, keeps its descriptors."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "notify"
        self.said: list[dict[str, str]] = []
        self.kept: dict[str, int] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(self.address))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 4)
            if data == b"enough":
                return
            message = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in message:
                [self.kept[message["FDNAME"]]] = fds
            if "FDSTOREREMOVE" in message:
                os.close(self.kept.pop(message["FDNAME"]))
            self.said.append(message)

    @property
    def extents(self) -> dict[str, int]:
        """Those of the descriptors that are extents."""
        return {name: fd for name, fd in self.kept.items() if name != OWNERS}

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"enough", str(self.address))
        self._thread.join()
        self._sock.close()
        for fd in self.kept.values():
            os.close(fd)

    def start(self, config: Path, log: Path, *, listener: int = -1, **env: str) -> subprocess.Popen[bytes]:
        """The daemon, with everything that is kept, as a service manager starts it."""
        fds = {**self.kept, **({"kvstore.socket": listener} if listener >= 0 else {})}
        # Out of the way of what the daemon has them as; free numbers, whatever this process has open.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds.values()]
        moves = "".join(f" {3 + i}<&{fd} {fd}<&-" for i, fd in enumerate(high))
        # A shell that becomes the daemon knows the process number beforehand.
        line = f'exec env LISTEN_PID=$$ "$0" -m kvstore serve -c "$1"{moves}'
        names_ = ":".join(fds)
        settings = {"NOTIFY_SOCKET": str(self.address), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names_}
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["bash", "-c", line, sys.executable, str(config)],
                env={**os.environ, **settings, **env},
                pass_fds=high,
                stderr=out,
                stdout=out,
            )
        for fd in high:
            os.close(fd)
        return process

    def heard(self, **wanted: str) -> dict[str, str]:
        """The first message that says all this."""
        found: dict[str, str] = eventually(
            lambda: next((m for m in self.said if wanted.items() <= m.items()), None), 20
        )
        return found


class Site:
    """A folder with a configuration, and the manager that runs daemons by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "kvstore.toml"
        self.log = folder / "daemon.log"
        self.socket = folder / "kvstore.sock"
        self.manager = Manager(folder)
        self.configure()

    def configure(self, dram: str = "16MiB", more: str = "") -> None:
        # By order alone: `hazard` refuses what is worth no more than what is there.
        self.config.write_text(
            f'[policy]\neviction = "lru"\n[daemon]\nsocket = "{self.socket}"\n'
            f'[dram]\nlimit = "{dram}"\nhuge_pages = false\n{more}'
        )

    @contextmanager
    def running(self, *, end: int = signal.SIGKILL, listener: int = -1, **env: str) -> Iterator[Client]:
        """A ready daemon and a client of it; ended by a signal."""
        self.manager.said.clear()
        process = self.manager.start(self.config, self.log, listener=listener, **env)
        self._pid = process.pid
        try:
            self.manager.heard(READY="1")
            with Client(f"unix://{self.socket}", deadline_s=10, strict=True) as client:
                yield client
        finally:
            process.send_signal(end)
            assert process.wait(20) == (-end if end == signal.SIGKILL else 0)

    def reload(self) -> str:
        """What the running daemon logs when it is told to reload, until it is ready again."""
        before, said = len(self.log.read_text()), self.manager.said
        said.clear()
        os.kill(self._pid, signal.SIGHUP)
        self.manager.heard(READY="1")
        assert "RELOADING" in next(m for m in said if m.keys() & {"RELOADING", "READY"})
        return self.log.read_text()[before:]


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        made = Site(Path(folder))
        yield made
        made.manager.close()


def filled(client: Client, layout: object, n: int = 40) -> tuple[Namespace, list[bytes]]:
    ns, keys = client.namespace(layout), names(n)  # type: ignore[arg-type]
    assert ns.put(keys, payloads(keys)).stored == n
    return ns, keys


def test_a_reload_works_after_one_that_failed(site: Site) -> None:
    token = new_token(b"t" * 32)
    member = f"[[tenants.chat.tokens]]\nhash = 'sha256:{hash_of(token).hex()}'\n"
    site.configure(more=member)
    good = site.config.read_text()
    (site.folder / "half.py").write_text("def (")
    (site.folder / "ends.py").write_text("raise SystemExit")
    keys = "a" + ".a" * 5000
    wrong = {
        "no eviction policy '.x:y'": good.replace("lru", ".x:y"),
        "invalid syntax": good.replace("lru", "half:Policy"),
        "SystemExit": good.replace("lru", "ends:Policy"),
        "not TOML": good + f"more = {'9' * 5000}",
        "is nested too deeply": good + f"more = {'[' * 5000}",
        "nested too deeply (": good + f"{keys} = 1",
    }
    # A bug, as nobody has found it yet.
    broken = (
        "import tomllib as t\nparse = t.loads\nt.loads = lambda text: 1 / 0 if 'bug' in text else parse(text)"
    )
    (site.folder / "sitecustomize.py").write_text(broken)
    wrong["because of a bug"] = good + "bug"
    with site.running(PYTHONPATH=str(site.folder)):
        for cause, text in wrong.items():
            site.config.write_text(text)
            said = site.reload()
            assert "not reloaded" in said
            assert cause in said
            with Client(f"unix://{site.socket}", token, strict=True) as client:
                client.ping()
        site.config.write_text(good.replace(member, "[tenants.chat]\n"))
        assert "reloaded: tenants.chat.tokens: 0" in site.reload()
        with (
            pytest.raises(UnavailableError, match="known by neither token"),
            Client(f"unix://{site.socket}", token, strict=True) as client,
        ):
            client.ping()
    assert site.log.read_text().count("Traceback") == 1, "only a bug has one"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_in_dram_are_hits_after_a_restart(site: Site, end: signal.Signals) -> None:
    layout = new_layout()
    with site.running(end=end) as client:
        ns, keys = filled(client, layout)
        assert ns.invalidate(keys[30:]) == 10
        eventually(lambda: len(site.manager.extents) == 8)
    assert sorted(site.manager.extents) == [f"dram-{i:06d}" for i in range(8)]
    with site.running() as client:
        ns = client.namespace(layout)
        assert ns.lookup(keys) == 30
        assert got(ns, keys) == 30
        with ns.acquire(keys) as lease:
            assert set(lease.tiers) == {Tier.DRAM}
        status = eventually(lambda: (s := client.status())["tiers"][0]["capacity_bytes"] == 16 << 20 and s)
        assert tier(status, "dram")["used_bytes"] == 30 * BLOCK
        check_limits(status)
        # The chain is whole: what hangs on it can be stored, and everything goes again leaf first.
        tail = names(1, "tail")
        assert ns.put(tail, payloads(tail), parent=keys[29]).stored == 1
        for i in range(12):
            some = names(128, f"flood {i}")
            assert ns.put(some, payloads(some)).denied == 0
            check_limits(client.status())
    assert "Traceback" not in site.log.read_text()
    assert len(site.manager.extents) == 8, "nothing is given to the manager twice"


def test_blocks_only_in_dram_are_written_to_nvme_after_a_restart(site: Site) -> None:
    layout = new_layout()
    site.configure(more=f'[nvme]\npath = "{site.folder}/nvme"\nlimit = "32MiB"\nwrite_policy = "on_evict"\n')
    with site.running() as client:
        _, keys = filled(client, layout)
        assert tier(client.status(), "nvme")["blocks"] == 0
    site.configure(more=f'[nvme]\npath = "{site.folder}/nvme"\nlimit = "32MiB"\n')
    with site.running() as client:
        status = eventually(
            lambda: (s := client.status()) and tier(s, "nvme")["blocks"] == 40 and idle(s) and s
        )
        assert tier(status, "dram")["blocks"] == 40
        assert got(client.namespace(layout), keys) == 40
    for fd in site.manager.kept.values():
        os.close(fd)
    site.manager.kept.clear()
    with site.running() as client:
        assert tier(client.status(), "dram")["blocks"] == 0
        assert got(client.namespace(layout), keys) == 40


def test_a_block_altered_in_dram_while_no_daemon_ran_is_a_miss(site: Site) -> None:
    layout = new_layout()
    with site.running() as client:
        filled(client, layout, 10)
    wanted = payload(names(10)[4])
    for fd in site.manager.extents.values():
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        if (at := data.find(wanted)) >= 0:
            os.pwrite(fd, b"!", at + 100)
    with site.running() as client:
        ns = client.namespace(layout)
        assert got(ns, names(10)) == 4
        assert client.status()["counters"]["quarantined_blocks"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_headers_that_make_no_sense_are_no_blocks(site: Site, seed: int) -> None:
    layout = new_layout()
    with site.running() as client:
        filled(client, layout)
    dice = np.random.default_rng(seed)
    for fd in site.manager.extents.values():
        for at in dice.integers(4096, 16384, 60).tolist():
            os.pwrite(fd, dice.bytes(int(dice.integers(1, 40))), at)
    with site.running() as client:
        ns = client.namespace(layout)
        for key in names(40):
            assert got(ns, [key]) in (0, 1)
        check_limits(client.status())
        assert ns.put(names(40), payloads(names(40))).denied == 0
        assert got(ns, names(40)) >= 39
    assert "Traceback" not in site.log.read_text()


def test_extents_of_another_layout_are_not_used(site: Site) -> None:
    layout = new_layout()
    with site.running() as client:
        filled(client, layout)
    for fd in site.manager.extents.values():
        os.pwrite(fd, b"KVSLOT99", 0)
    with site.running() as client:
        assert client.namespace(layout).lookup(names(40)) == 0
        eventually(lambda: tier(client.status(), "dram")["capacity_bytes"] == 16 << 20)
        eventually(lambda: len(site.manager.extents) == 8)
    assert "another version of kvstore laid it out" in site.log.read_text()


def test_a_smaller_limit_keeps_blocks_that_fit_and_evicts_the_rest(site: Site) -> None:
    layout = new_layout()
    with site.running() as client:
        for i in range(6):
            some = names(128, f"part {i}")
            client.namespace(layout).put(some, payloads(some))
    site.configure(dram="6MiB")
    with site.running() as client:
        status = client.status()
        check_limits(status)
        assert tier(status, "dram")["capacity_bytes"] == 6 << 20
        ns = client.namespace(layout)
        served = sum(got(ns, [k]) for i in range(6) for k in names(128, f"part {i}"))
        assert 200 < served <= 384
        eventually(lambda: len(site.manager.extents) == 3)


def test_a_larger_limit_adds_extents(site: Site) -> None:
    layout = new_layout()
    with site.running() as client:
        filled(client, layout)
    site.configure(dram="64MiB")
    with site.running() as client:
        eventually(lambda: tier(client.status(), "dram")["capacity_bytes"] == 64 << 20)
        assert got(client.namespace(layout), names(40)) == 40


def test_a_listening_socket_may_come_from_the_manager(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(site.socket))
        listener.listen(8)
        for _ in range(2):
            with site.running(end=signal.SIGTERM, listener=listener.fileno()) as client:
                client.ping()
            assert site.socket.exists(), "it is not the daemon's to remove"


@pytest.mark.parametrize(("pid", "count"), [("1", "5"), ("", "5"), ("own", ""), ("x", "x")])
def test_descriptors_for_another_process_are_none_of_ours(
    monkeypatch: pytest.MonkeyPatch, pid: str, count: str
) -> None:
    pid = str(os.getpid()) if pid == "own" else pid
    for name, value in {"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": "dram-000000"}.items():
        monkeypatch.setenv(name, value)
    assert inherited() == {}
    assert not [name for name in os.environ if name.startswith("LISTEN_")], "a child must not think so either"


def test_the_watchdog_is_fed_from_the_event_loop_and_starves_with_it(site: Site) -> None:
    def fed() -> int:
        return sum("WATCHDOG" in message for message in site.manager.said)

    with site.running(WATCHDOG_USEC="300000") as client:
        eventually(lambda: fed() > 3)
        pid = client.status()["pid"]
        stop(pid)
        time.sleep(0.2)
        before = fed()
        time.sleep(0.5)
        assert fed() == before
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: fed() > before)


def test_readiness_and_the_end_are_told(site: Site) -> None:
    with site.running(end=signal.SIGTERM):
        assert site.manager.heard(READY="1")["STATUS"] == f"serving on {site.socket}"
    site.manager.heard(STOPPING="1")


# -- kvstore supervise


def test_a_supervised_daemon_that_is_killed_restarts_with_its_dram() -> None:
    layout = new_layout()
    with LocalDaemon(WITH_NVME, supervised=True) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns, keys = filled(client, layout)
        before = daemon.pid
        for _ in range(2):
            daemon.kill()
            daemon.start()
            assert daemon.pid != before
            with ns.acquire(keys) as lease:
                assert set(lease.tiers) == {Tier.DRAM}
                assert lease.verify() == 40
            assert got(ns, keys) == 40
        assert "started again" in log_of(daemon)
        check_limits(client.status())


def test_a_supervised_daemon_restarts_on_request_and_ends_with_its_supervisor() -> None:
    with LocalDaemon(SMALL, supervised=True) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns, keys = filled(client, new_layout())
        pid = daemon.pid
        daemon.restart()
        assert eventually(lambda: daemon.pid != pid)
        assert got(ns, keys) == 40
        daemon.stop()
        assert not daemon.socket.exists()


def test_a_supervisor_does_not_give_up_a_daemon_that_was_there_before(tmp_path: Path) -> None:
    with LocalDaemon(SMALL, supervised=True) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns, keys = filled(client, new_layout())
        file = daemon.folder / "kvstore.toml"
        good = file.read_text()
        file.write_text("this is no TOML")
        daemon.kill()
        eventually(lambda: log_of(daemon).count("started again") > 2, 20)
        file.write_text(good)
        daemon.start()
        assert got(ns, keys) == 40


def test_nothing_is_imported_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("kvstore", "lmdb", "json"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalDaemon, "popen", staticmethod(subprocess.Popen))
    with LocalDaemon(SMALL, supervised=True) as daemon, Client(daemon.url, deadline_s=10) as client:
        assert filled(client, new_layout())
    assert not (tmp_path / "ran").exists()


def test_a_daemon_that_cannot_start_is_not_started_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvstore.toml"
        config.write_text('[daemon]\nsocket = "/dev/null/kvstore.sock"\n[dram]\nlimit = "2MiB"\n')
        command = [sys.executable, "-m", "kvstore", "supervise", "-c", str(config)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 2
    assert "cannot listen on /dev/null/kvstore.sock" in ran.stderr
    assert "ended with exit code 2 before it was ready" in ran.stderr
