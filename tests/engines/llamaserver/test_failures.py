"""A part that is killed, stopped or full: right answers without hits, or clear errors; never a hang."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.presence_tables import HEARD_S
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.engines.gguf_models import BLOCK, tokens
from tests.engines.llamaserver.serving import GREEDY, ONE_LONG, RUNS_MAIN, Served, proxied, timings
from tests.processes import stop

PROMPT = tokens(5 * BLOCK + 3)
OTHER = tokens(5 * BLOCK + 3, seed=1)
LONG = {"prompt": PROMPT, "n_predict": 3000, **GREEDY}
DEADLINE_S = 1.0
KILLED = 128 + signal.SIGKILL


def test_no_daemon(models: dict[str, Path], tmp_path: Path, direct: Served) -> None:
    with proxied(models["llama"], tmp_path, f"unix://{tmp_path}/none.sock") as proxy:
        for _ in range(2):
            assert proxy.text(PROMPT) == direct.text(PROMPT)
        said = proxy.settled()
        assert (said["stored_blocks"], said["denied_blocks"], said["failures"]) == (0, 5, 0)


def test_a_daemon_that_is_killed_and_starts_again(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    expected = direct.text(PROMPT)
    with proxied(models["llama"], tmp_path, own_daemon.url, "-np", "1") as proxy:
        assert proxy.text(PROMPT) == expected
        proxy.settled()
        assert proxy.text(OTHER) == direct.text(OTHER)
        proxy.settled()
        own_daemon.kill()
        # The only slot has the other prompt.
        said = proxy.complete(PROMPT)
        assert (said["content"], said["timings"]["prompt_n"] >= len(PROMPT) - 1) == (expected, True)
        own_daemon.start()

        def hits() -> bool:
            for prompt in (OTHER, PROMPT):
                said = proxy.complete(prompt)
                assert said["content"] == direct.text(prompt)
                proxy.settled()
            return said["timings"]["prompt_n"] == 3

        eventually(hits, 30)
        assert proxy.status()["failures"] == 0


@pytest.mark.parametrize("phase", ["find", "load", "save"])
def test_a_daemon_that_is_killed_within_a_call(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served, phase: str
) -> None:
    """The proxy kills the daemon as soon as it begins to look up, load or store."""
    kills = (
        "import os, signal\n"
        "from kvstore_llamacpp.proxy.store import SlotStore\n"
        f"real = SlotStore.{phase}\n"
        "def killing(*arguments, **more):\n"
        "    try:\n"
        "        os.kill(int(os.environ['KILLS']), signal.SIGKILL)\n"
        "    except ProcessLookupError:\n"
        "        pass\n"
        "    return real(*arguments, **more)\n"
        f"SlotStore.{phase} = killing\n"
    )
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(PROMPT) == direct.text(PROMPT)
        proxy.settled()
    variables = {"KILLS": str(own_daemon.pid)}
    with proxied(
        models["llama"], tmp_path, own_daemon.url, runs=kills + RUNS_MAIN, variables=variables
    ) as proxy:
        for prompt in (PROMPT, OTHER, PROMPT):
            started_s = time.monotonic()
            assert proxy.text(prompt) == direct.text(prompt)
            assert time.monotonic() - started_s < 15
            proxy.settled()
        assert proxy.status()["failures"] == 0
    own_daemon.kill()


def test_a_stopped_daemon_delays_a_request_up_to_its_deadlines(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    options = ("--deadline", str(DEADLINE_S))
    with proxied(models["llama"], tmp_path, own_daemon.url, "-np", "1", options=options) as proxy:
        for prompt in (PROMPT, OTHER):
            proxy.text(prompt)
            proxy.settled()
        stop(own_daemon.pid)
        try:
            time.sleep(HEARD_S)  # until then its presence tables are believed
            started_s = time.monotonic()
            assert proxy.text(PROMPT) == direct.text(PROMPT)
            assert time.monotonic() - started_s < 2 * DEADLINE_S + 1
        finally:
            os.kill(own_daemon.pid, signal.SIGCONT)


def test_a_killed_server_ends_streams_and_the_proxy(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    options = ("--slot-folder", str(tmp_path))
    with (
        proxied(models["llama"], tmp_path, own_daemon.url, *ONE_LONG, options=options) as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        stream = proxy.events("/completion", LONG)
        next(stream)
        waiting = pool.submit(ask, proxy)
        time.sleep(0.3)
        os.kill(proxy.server_pid, signal.SIGKILL)
        last = list(stream)[-1]
        assert last["error"]["code"] == 502
        assert "llama-server has ended" in last["error"]["message"]
        status, said = waiting.result(30)
        assert status in (0, 502)
        assert not status or said["error"]["code"] == 502
        assert proxy.process is not None
        assert proxy.process.wait(30) == KILLED
        assert f"llama-server has ended with exit code {KILLED}" in proxy.output()
    assert not list(tmp_path.glob("kvstore-llama-proxy-*"))


def ask(proxy: Served) -> tuple[int, Any]:
    try:
        return proxy.ask("POST", "/completion", {"prompt": PROMPT, "n_predict": 4})
    except (OSError, http.client.HTTPException):
        return 0, None


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.1])
def test_a_server_that_is_killed_at_any_time(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served, after_s: float
) -> None:
    """While slots are restored and saved, and between. What was stored is right."""
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, proxy) for _ in range(8)]
        time.sleep(after_s)
        os.kill(proxy.server_pid, signal.SIGKILL)
        for each in answers:
            status, said = each.result(30)
            assert status in (0, 200, 502, 503), said
        assert proxy.process is not None
        assert proxy.process.wait(30) == KILLED
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        for _ in range(2):
            assert proxy.text(PROMPT) == direct.text(PROMPT)
            assert proxy.settled()["failures"] == 0


def test_a_killed_proxy_leaves_no_server_and_no_folder(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """The kernel ends the server. The next proxy removes the folder."""
    folder = tmp_path / "slots"
    folder.mkdir()
    options = ("--slot-folder", str(folder))
    with proxied(models["llama"], tmp_path, own_daemon.url, options=options) as proxy:
        pid = proxy.server_pid
        proxy.stop(signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid))
        assert len(list(folder.iterdir())) == 1
    with proxied(models["llama"], tmp_path, own_daemon.url, options=options) as proxy:
        assert len(list(folder.iterdir())) == 1
        assert proxy.text(PROMPT) == direct.text(PROMPT)
        proxy.settled()
        [slots] = folder.iterdir()
        assert not list(slots.iterdir())
        assert proxy.stop() == 0
    assert not list(folder.iterdir())


def is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_full_folder_costs_only_hits(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """A file system of 96 KiB: neither a slot nor a prefix has room."""
    if why := why_no_mounts():
        pytest.skip(f"no small file system can be mounted: {why}")
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(PROMPT) == direct.text(PROMPT)
        proxy.settled()
    folder = tmp_path / "small"
    folder.mkdir()
    mounts = (
        "import ctypes\n"
        f"assert ctypes.CDLL(None, use_errno=True).unshare(0x20000) == 0\n"
        "import subprocess\n"
        "subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=96k', 'none', {str(folder)!r}], check=True)\n"
    )
    options = ("--slot-folder", str(folder))
    with proxied(
        models["llama"], tmp_path, own_daemon.url, options=options, runs=mounts + RUNS_MAIN
    ) as proxy:
        for prompt in (PROMPT, OTHER):
            said = proxy.complete(prompt)
            assert said["content"] == direct.text(prompt)
            assert said["timings"]["cache_n"] <= 1  # the token that begins a text
            counted = proxy.settled()
        assert counted["unsaved"] == 1
        assert counted["failures"] == 0
        assert "no room for its slot file" in proxy.output()


def why_no_mounts() -> str:
    code = "import ctypes, os; raise SystemExit(ctypes.CDLL(None, use_errno=True).unshare(0x20000) != 0)"
    ran = subprocess.run([sys.executable, "-c", code], check=False)
    return "" if ran.returncode == 0 and os.getuid() == 0 else "it needs root with CAP_SYS_ADMIN"


def test_slot_files_that_are_forged_or_cut_are_not_stored(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    forgeries = [
        "raw[: len(raw) // 2]",
        "raw[:3]",
        "b''",
        "b'x' + raw[1:]",
        "raw[:4] + bytes([9]) + raw[5:]",
        "raw[:24] + bytes([255] * 4) + raw[28:]",
        "raw + raw",
    ]
    forges = (
        "from kvstore_llamacpp.proxy.store import SlotStore\n"
        f"forged = iter([{', '.join(f'lambda raw: {each}' for each in forgeries)}])\n"
        "real = SlotStore.save\n"
        "def save(self, path, slot):\n"
        "    path.write_bytes(next(forged)(path.read_bytes()))\n"
        "    return real(self, path, slot)\n"
        "SlotStore.save = save\n"
    )
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=forges + RUNS_MAIN) as proxy:
        for number, forged in enumerate(forgeries):
            assert proxy.text(PROMPT) == direct.text(PROMPT)
            said = proxy.settled()
            assert (said["failures"], said["stored_blocks"]) == (number + 1, 0), forged


FORGES = (
    "import numpy as np\n"
    "from kvstore_llamacpp.proxy.store import SlotStore\n"
    "real = SlotStore.load\n"
    "def load(self, keys, tokens, path):\n"
    "    n = real(self, keys, tokens, path)\n"
    "    raw = np.fromfile(path, np.uint8)\n"
    "    {}\n"
    "    raw.tofile(path)\n"
    "    return n\n"
    "SlotStore.load = load\n"
)


@pytest.mark.parametrize("forged", ["raw[:4] = 0", "raw[28:32] = 255"])
def test_a_slot_file_that_llama_server_refuses_costs_only_a_hit(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served, forged: str
) -> None:
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(PROMPT) == direct.text(PROMPT)
        proxy.settled()
    runs = FORGES.format(forged) + RUNS_MAIN
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=runs) as proxy:
        said = proxy.complete(PROMPT)
        assert (said["content"], timings(said)) == (direct.text(PROMPT), (0, len(PROMPT)))
        assert proxy.settled()["refused_restores"] == 1


def test_a_slot_file_that_is_cut_before_its_restore_is_a_clear_error(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    """llama-server aborts. Only this user can write to the folder, and the proxy writes whole files."""
    variables = {"GGML_NO_BACKTRACE": "1"}
    with proxied(models["llama"], tmp_path, own_daemon.url, variables=variables) as proxy:
        assert proxy.text(PROMPT)
        proxy.settled()
    runs = FORGES.format("raw = raw[: len(raw) // 2]") + RUNS_MAIN
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=runs, variables=variables) as proxy:
        status, said = proxy.ask("POST", "/completion", {"prompt": PROMPT})
        assert (status, said["error"]["type"]) == (502, "unavailable_error")
        assert proxy.process is not None
        assert proxy.process.wait(30) == 128 + signal.SIGABRT


def test_a_prefix_that_arrives_in_part_is_restored_in_part(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """The last two of five blocks are late."""
    late = (
        "from kvstore_llamacpp.proxy import store\n"
        "real = store.load_blocks\n"
        "store.load_blocks = lambda ns, keys, state, left_s: real(ns, keys[:3], state, left_s)\n"
    )
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(PROMPT) == direct.text(PROMPT)
        proxy.settled()
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=late + RUNS_MAIN) as proxy:
        said = proxy.complete(PROMPT)
        assert timings(said) == (3 * BLOCK, len(PROMPT) - 3 * BLOCK)
        assert said["content"] == direct.text(PROMPT)
        assert proxy.settled()["failures"] == 0


def test_a_signal_ends_the_proxy_in_order(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    for how in (signal.SIGTERM, signal.SIGINT):
        with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
            pid = proxy.server_pid
            assert proxy.text(PROMPT)
            assert proxy.stop(how) == 0
            assert not Path(f"/proc/{pid}").exists()
    # The answer was stored before the end.
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert timings(proxy.complete(PROMPT)) == (5 * BLOCK, 3)


def test_a_server_that_ends_with_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    """The file is no model beyond its header."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models["llama"].read_bytes()[:20000])
    with (
        pytest.raises(AssertionError, match="llama-server ended with exit code 1"),
        proxied(broken, tmp_path, f"unix://{tmp_path}/none.sock"),
    ):
        pass
