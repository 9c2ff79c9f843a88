"""What a daemon says at its start, and a daemon without a configuration."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.config import GIB, Memory, parse
from kvstore.daemon import summary
from kvstore.daemon.server.listener import listen
from kvstore.errors import TierError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, WITH_NVME, eventually, got, idle, log_of, names, new_layout, payloads, tier
from tests.tenants import VICTIM, as_user, needs_root

ROOT = Path(__file__).parents[2]

# The real command, on a machine of 128 MiB whose /run/kvstore is another folder. The file `available` in that
# folder has the available bytes.
_ELSEWHERE = """
import sys
from pathlib import Path
from kvstore import socket_paths
from kvstore.cli import app
from kvstore.config import Memory
from kvstore.daemon import main, supervise

socket_paths.SYSTEM_FOLDER = folder = Path(sys.argv.pop(1))
main.read_memory = lambda: Memory(128 << 20, int((folder / "available").read_text()))
made = supervise.Supervisor.__init__

def make(self, arguments, log_format):
    made(self, arguments, log_format)
    self._command = [*sys.orig_argv[:4], "serve", *arguments]

supervise.Supervisor.__init__ = make
app(prog_name="kvstore")
"""


def elsewhere(folder: Path, *args: str) -> list[str]:
    """Returns the command line of `kvstore` with `folder` instead of /run/kvstore."""
    return [sys.executable, "-c", _ELSEWHERE, str(folder), *args]


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "KVSTORE_SOCKET"}
    return subprocess.run(
        elsewhere(folder, *args), env=env, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def served(folder: Path, command: str = "serve") -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Runs a command without a configuration. Yields the process and its log."""
    log = folder / "log"
    (folder / "available").write_text(str(100 << 20))
    with log.open("wb") as file:
        process = subprocess.Popen(elsewhere(folder, command), stderr=file)
    try:
        eventually(lambda: "serving on" in log.read_text() or process.poll() is not None, 60)
        yield process, log
    finally:
        process.terminate()
        process.wait(30)


def test_a_daemon_without_a_configuration_is_found_without_options(tmp_path: Path) -> None:
    with served(tmp_path) as (process, log):
        said = log.read_text()
        assert (
            "INFO config: none, so DRAM gets a quarter of the memory, at most half of the free part: " in said
        )
        assert "this machine has 128MiB of memory" in said
        assert "kvstore config example > kvstore.toml; edit it; kvstore serve -c kvstore.toml" in said
        assert "INFO dram: limit 32MiB, holds 0 blocks (0B)\n" in said
        assert "INFO nvme: none" in said
        assert f"`kvstore admin` serves REST and the dashboard on {tmp_path}/admin.sock" in said
        assert said.endswith(f"INFO serving on {tmp_path}/kvstore.sock\n")
        asked = run(tmp_path, "status", "--json")
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout)["pid"] == process.pid

        # A reload has no file to read: the limit stays.
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded: nothing has changed" in log.read_text())
        second = run(tmp_path, "serve")
        assert second.returncode == 2
        hint = f"(stop it: `kill {process.pid}`; or set daemon.socket to another path)"
        assert second.stderr == (
            f"error: another process serves {tmp_path}/kvstore.sock: pid {process.pid} {hint}\n"
        )
    assert not (tmp_path / "kvstore.sock").exists()
    asked = run(tmp_path, "status")
    assert asked.returncode == 2
    assert f"no answer from the daemon at {tmp_path}/kvstore.sock: this socket does not exist" in asked.stderr


def test_the_example_of_a_user_names_this_users_sockets(tmp_path: Path) -> None:
    config = parse(run(tmp_path, "config", "example").stdout)
    assert (config.daemon.socket, config.admin.socket) == (tmp_path / "kvstore.sock", tmp_path / "admin.sock")
    assert config.dram.limit == GIB


def test_a_supervised_daemon_without_a_configuration_keeps_its_dram_though_less_memory_is_free(
    tmp_path: Path,
) -> None:
    with served(tmp_path, "supervise") as (_, log), Client(f"unix://{tmp_path}/kvstore.sock") as client:
        ns, keys = client.namespace(new_layout()), names(20)
        assert ns.put(keys, payloads(keys)).stored == 20
        before = client.status()
        eventually(lambda: tier(client.status(), "dram")["capacity_bytes"] == 32 << 20)
        (tmp_path / "available").write_text(str(8 << 20))
        os.kill(before["pid"], signal.SIGKILL)
        eventually(lambda: log.read_text().count("serving on") == 2, 30)
        assert tier(client.status(), "dram")["limit_bytes"] == 32 << 20
        assert got(ns, keys) == 20
        assert "INFO dram: limit 32MiB, holds 20 blocks (320KiB)" in log.read_text()


def test_the_summary_names_tiers_with_their_contents_tenants_and_sockets() -> None:
    settings = {**WITH_NVME, "tenants": {"chat": {"uids": [os.geteuid()], "role": "admin"}}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=10) as client:
        keys = names(20)
        client.namespace(new_layout()).put(keys, payloads(keys))
        eventually(lambda: idle(client.status()))
        daemon.restart()
        [_, last] = re.split("(?<=stopping\n)", log_of(daemon))
        lines = dict(re.findall(r"^INFO (\w+): (.*)$", last, re.MULTILINE))
        assert lines["config"] == f"{daemon.folder}/kvstore.toml"
        assert lines["dram"].startswith("limit 16MiB, holds ")
        assert lines["nvme"] == f"limit 64MiB in {daemon.folder}/nvme, holds 20 blocks (320KiB)"
        assert (lines["eviction"], lines["tenants"]) == ("lru", "chat")
        assert lines["socket"] == f"{daemon.socket}, mode 0600"
        assert "network" not in lines
        assert f"`kvstore admin -c {daemon.folder}/kvstore.toml`" in lines["REST"]
        assert last.endswith(f"INFO serving on {daemon.socket}\n")


def test_the_flag_is_the_one_of_the_page_about_vllm() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    [shown] = re.findall(r"--kv-transfer-config '(\{\n.*?\})'\n", page, re.DOTALL)
    name, flag = shlex.split(summary.vllm_flag(Path("/run/kvstore/kvstore.sock")))
    assert name == "--kv-transfer-config"
    assert json.loads(flag) == json.loads(shown)
    _, odd = shlex.split(summary.vllm_flag(Path("/it's/a b.sock")))
    assert json.loads(odd)["kv_connector_extra_config"] == {"url": "unix:///it's/a b.sock"}


def rows(text: str, **status: object) -> dict[str, str]:
    state = {"tiers": [], "network": None, "policy": "lru", "problems": [], **status}
    return dict(summary.rows(parse(text), state, Path("/a.toml"), Memory(GIB, GIB)))


def test_the_summary_shows_what_is_configured_beyond_the_usual() -> None:
    tenants = "".join(f"[tenants.t{i}]\nuids = [{i}]\n" for i in range(8))
    text = '[daemon]\noperator_socket = "/o.sock"\n[network]\nurl = "file:///lustre"\n'
    text += '[admin]\nlisten = "127.0.0.1:9400"\n'
    found = rows(text + tenants, network={}, problems=["one"])
    assert found["tenants"] == "t0, t1, t2, t3, t4 and 3 more"
    assert (found["operators"], found["network"]) == ("/o.sock", "file:///lustre")
    assert found["REST"].endswith("admin.sock and 127.0.0.1:9400")
    assert found["problems"].startswith("1, ")
    assert {"operators", "network", "problems"}.isdisjoint(rows(""))


def on_a_terminal(command: Sequence[str]) -> str:
    """Returns the output on a terminal of a server, which is ended once it serves."""
    pid, fd = pty.fork()
    if not pid:
        os.execv(command[0], command)
    said, ends = b"", time.monotonic() + 60
    with suppress(OSError):  # the terminal of an ended process
        while b"serving on" not in said and time.monotonic() < ends:
            said += os.read(fd, 4096)
    os.kill(pid, signal.SIGTERM)
    with suppress(OSError):
        while more := os.read(fd, 4096):
            said += more
    os.waitpid(pid, 0)
    os.close(fd)
    return said.decode()


@pytest.mark.parametrize("command", ["serve", "supervise"])
def test_a_terminal_gets_aligned_rows(tmp_path: Path, command: str) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[daemon]\nsocket = "{tmp_path}/k.sock"\n[dram]\nlimit = "2MiB"\nhuge_pages = false\n')
    said = on_a_terminal([sys.executable, "-m", "kvstore", command, "-c", str(config)])
    assert "\ndram      limit 2MiB, holds 0 blocks (0B)\r\n" in said
    assert "INFO dram" not in said
    assert f"INFO serving on {tmp_path}/k.sock" in said


def test_a_higher_log_level_has_no_summary() -> None:
    with LocalDaemon({**SMALL, "daemon": {"log_level": "warning"}}) as daemon:
        assert log_of(daemon) == ""


# -- sockets that cannot be made


@needs_root
def test_a_folder_without_permission_is_named_with_the_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)

        def refusal() -> str:
            with pytest.raises(TierError) as caught:
                listen(folder / "new" / "k.sock", 0o600)
            return str(caught.value)

        said = as_user(VICTIM, refusal)
    denied = f"permission denied, uid {VICTIM} may not write in {folder}"
    assert said.startswith(f"cannot listen on {folder}/new/k.sock: {denied} (set daemon.socket to a path in ")


@needs_root
def test_a_socket_of_another_user_is_named_with_the_owner() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        with listen(folder / "k.sock", 0o600):

            def refusal() -> str:
                with pytest.raises(TierError) as caught:
                    listen(folder / "k.sock", 0o600, "admin.socket")
                return str(caught.value)

            said = as_user(VICTIM, refusal)
    assert f"{folder}/k.sock is a socket of uid 0, and uid {VICTIM} may not connect to it" in said
    assert "set admin.socket to another path" in said


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(TierError) as caught:
        listen(Path("/proc/kvstore/k.sock"), 0o600)
    assert caught.value.message == (
        "cannot listen on /proc/kvstore/k.sock: the folder /proc/kvstore does not exist and cannot be made"
    )
