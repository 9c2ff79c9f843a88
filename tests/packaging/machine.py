"""This machine once more, to install on and remove from: what changes stays in a folder of the test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_FAKE_SYSTEMCTL = """#!/bin/sh
# A fake: notes what it is told, and restarts a supervised daemon where systemd would.
echo "$*" >> /systemctl.log
if [ "$1" = try-restart ] && [ -e /supervisor.pid ]; then kill -USR1 "$(cat /supervisor.pid)"; fi
"""


class Machine:
    """An overlay over the root folder in a mount namespace of its own. Needs root; dpkg is the real one."""

    def __init__(self, folder: Path) -> None:
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)
        script = (
            'mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root" && '
            'mount --rbind /proc "$1/root/proc" && mount --rbind /dev "$1/root/dev" && '
            'exec chroot "$1/root" sh -c "echo mounted; exec sleep 3600"'
        )
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(folder)]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._keeper.stdout
        assert self._keeper.stderr
        with self._keeper.stdout, self._keeper.stderr:
            if not self._keeper.stdout.readline():
                self._keeper.wait()
                pytest.skip(f"no overlay can be mounted here: {self._keeper.stderr.read().strip()}")
        assert not self.path("/").samefile("/"), "nothing may be written to the machine itself"
        self.path("/run/systemd/system").mkdir(parents=True, exist_ok=True)
        self.path("/usr/local/bin/systemctl").write_text(_FAKE_SYSTEMCTL)
        self.path("/usr/local/bin/systemctl").chmod(0o755)

    def path(self, inside: str) -> Path:
        """The same file as seen from here."""
        return Path(f"/proc/{self._keeper.pid}/root{inside}")

    def command(self, *command: str) -> list[str]:
        """What runs a command there, with an environment of nothing but a PATH."""
        enter = ["nsenter", f"--target={self._keeper.pid}", "--mount", "--root", "--wd"]
        return [*enter, "env", "-i", f"PATH={PATH}", "DEBIAN_FRONTEND=noninteractive", *command]

    def run(self, *command: str, code: int = 0) -> str:
        """Runs a command there to its end; what it says. Fails unless it ends with `code`."""
        ran = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=180, check=False, cwd="/"
        )
        assert ran.returncode == code, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def asked_of_systemd(self) -> list[str]:
        """What systemctl has been told since the last call."""
        log = self.path("/systemctl.log")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def close(self) -> None:
        """Everything that was mounted goes with its last process."""
        self._keeper.kill()
        self._keeper.wait()


def can_be_made() -> str:
    """Why there can be no such machine; empty if there can."""
    return "only root can install packages" if os.geteuid() else ""
