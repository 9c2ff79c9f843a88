"""Finds the commands in documents and runs them on a site: a daemon, its REST interface and one block."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from kvstore import Client, Layout
from kvstore.errors import UnavailableError
from tests.daemons import BLOCK, eventually, names, payloads
from tests.docs.blocks import SHELL, blocks
from tests.lab.small import chats
from tests.programs import need
from tests.spawner import spawn

ROOT = Path(__file__).parents[2]
SHOWN = ("kvstore", "curl", "make")
KEY = names(1)[0]

_FAKE_SYSTEMCTL = """#!/bin/sh
# A fake: does with the one daemon of the test what is asked for; anything else it only notes.
case "$1" in
    stop)
        kill -TERM "$(cat {folder}/pid)"
        # Its parent is the test, which has not waited for it yet.
        while grep -q "^State:.[^Z]" "/proc/$(cat {folder}/pid)/status" 2>/dev/null; do sleep 0.05; done ;;
    reload) kill -HUP "$(cat {folder}/pid)" ;;
esac
"""
_FAKE_RUNUSER = """#!/bin/sh
# A fake: the user of the test is the daemon's.
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def fenced(text: str) -> list[str]:
    """Returns the lines of shell blocks and of blocks without a language, joined and without comments."""
    lines = []
    for block in blocks(text):
        if block.language in SHELL and not block.reason and "│" not in block.text:
            whole = re.sub(r"\\\n\s*", " ", block.text)
            lines += [
                re.sub(r"(^|\s+)#.*$", "", line.removeprefix("$ ")).strip() for line in whole.splitlines()
            ]
    return [line for line in lines if line]


def inline(text: str) -> list[str]:
    """Returns the commands within sentences and tables."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`((?:kvstore|curl) [^`\n]+)`", outside)


def handbook(text: str) -> list[str]:
    """Returns the commands in the third column of the tables of symptoms."""
    tables = text.split("| symptom | cause | command | remedy |\n")[1:]
    rows = [row for table in tables for row in table.partition("\n\n")[0].splitlines()[1:]]
    return [row.split(" | ")[2].strip("` ") for row in rows]


def is_ours(line: str) -> bool:
    """Returns whether the line contains a command of `SHOWN`."""
    return any(part.split()[:1] and part.split()[0] in SHOWN for part in re.split(r"&&|\|\||;|\||--\s", line))


class Site:
    """A daemon and its REST interface. Paths of an installation are replaced by paths in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("etc", "run", "nvme", "bin", "work"):
            (folder / name).mkdir()
        self._make("kvstore", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvstore "$@"\n')
        self._make("systemctl", _FAKE_SYSTEMCTL.replace("{folder}", str(folder)))
        self._make("runuser", _FAKE_RUNUSER)
        (folder / "etc/kvstore.toml").write_text(self.placed(_CONFIG))
        (folder / "work/kvstore.toml").write_text(self.placed(_OWN))  # pages run in no order
        chats(folder / "work/trace.jsonl", 50)
        self.env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "COLUMNS": "100"}
        self.env["KVSTORE_SOCKET"] = f"unix://{folder}/run/kvstore.sock"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def _make(self, name: str, text: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(text)
        file.chmod(0o755)

    def placed(self, text: str) -> str:
        """Returns text with the folders of this site, short times, and real names instead of placeholders."""
        for place, here in {"/etc/kvstore": "etc", "/run/kvstore": "run", "/var/lib/kvstore": "nvme"}.items():
            text = text.replace(place, str(self.folder / here))
        text = re.sub(r"\S*_trace\.jsonl(\.zst)?", "trace.jsonl", text)
        text = re.sub(r"(kvstore lab record .*--out )\S+", r"\1recorded.jsonl", text)
        text = re.sub(r"--for \S+", "--for 1s", text)
        text = re.sub(r"(kvstore lab (?:fleet|replay|size) )", r"\1--processes 1 ", text)
        text = re.sub(r"(kvstore top)(?!.*--count)", r"\1 --count 1", text)
        text = re.sub(r"\bNAME\b", "chat", text)
        return re.sub(r"\bKEY\b", KEY.hex(), text)

    def ready(self) -> None:
        """Starts the daemon and the interface if necessary, and stores a block."""
        config = str(self.folder / "etc/kvstore.toml")
        for name, command in {"daemon": "serve", "admin": "admin"}.items():
            if name not in self._running or self._running[name].poll() is not None:
                line = [sys.executable, "-m", "kvstore", command, "-c", config]
                with (self.folder / f"{name}.log").open("ab") as log:
                    self._running[name] = spawn(line, stdout=log, stderr=log)
        (self.folder / "pid").write_text(str(self._running["daemon"].pid))
        eventually(self._stored, 30)
        eventually((self.folder / "run/admin.sock").exists, 30)
        (self.folder / "work/recorded.jsonl").unlink(missing_ok=True)

    def _stored(self) -> bool:
        try:
            with Client(self.env["KVSTORE_SOCKET"], strict=True) as client:
                client.namespace(Layout("m", BLOCK)).put([KEY], payloads([KEY]))
            return True
        except UnavailableError:
            return False

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a line like a shell. Ends a server once it serves."""
        for program in ("curl", "journalctl"):
            if program in line:
                need(program)
        self.ready()
        line = self.placed(line)
        if line == "kvstore serve":  # without a configuration it would take this machine's socket
            line = "kvstore serve -c kvstore.toml"
        if re.match(r"kvstore (serve|supervise|admin)\b", line):
            return self._serves(line)
        if "kvstore fsck" in line and "systemctl" not in line:
            line = f"systemctl stop kvstore && {line}"
        ran = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True, text=True, timeout=120, check=False, env=self.env, cwd=self.folder / "work",
            start_new_session=True,
        )  # fmt: skip
        for file in (self.folder / "work").glob("*.toml"):
            text = self.placed(file.read_text()).replace('limit = "1GiB"', 'limit = "16MiB"')
            file.write_text(
                text.replace("/kvstore.sock", "/own.sock").replace("/admin.sock", "/own-admin.sock")
            )
        return ran

    def run_python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Runs a block of Python in an environment where `Client()` finds the daemon."""
        self.ready()
        return subprocess.run(
            [sys.executable, "-c", self.placed(code)],
            capture_output=True, text=True, timeout=120, check=False, env=self.env, cwd=self.folder / "work",
        )  # fmt: skip

    def _serves(self, line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", f"exec {line}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env,
            cwd=self.folder / "work",
        )  # fmt: skip
        said = ""
        assert process.stdout
        with process.stdout:
            for said_line in process.stdout:
                said += said_line
                if "serving on" in said_line:
                    process.send_signal(signal.SIGTERM)
        return subprocess.CompletedProcess(command, process.wait(30), said, "")

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()
            process.wait(30)


_OWN = """
[daemon]
socket = "/run/kvstore/own.sock"
[dram]
limit = "16MiB"
[admin]
socket = "/run/kvstore/own-admin.sock"
"""
_CONFIG = """
[daemon]
socket = "/run/kvstore/kvstore.sock"
socket_mode = 0o660
[dram]
limit = "16MiB"
huge_pages = false
[nvme]
path = "/var/lib/kvstore"
limit = "64MiB"
[admin]
socket = "/run/kvstore/admin.sock"
requests_per_s = 10000
[tenants.chat]
uids = [0]
role = "admin"
"""
