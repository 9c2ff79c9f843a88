"""A served daemon that can be started under the shim, on a folder that stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from kvstore.errors import UnavailableError
from kvstore.lab.local_daemon import LocalDaemon, Settings


class ShimmedDaemon(LocalDaemon):
    """Starts under the shim while there are `options` for it. A start that fails there is no error."""

    def __init__(self, settings: Settings, options: Sequence[str] = ()) -> None:
        super().__init__(settings)
        self.options = list(options)

    def start(self) -> None:
        if not self.options:
            super().start()
            return
        assert not self._pid, "the daemon already runs"
        command = [sys.executable, "-m", "tests.crash.shim", *self.options]
        command += ["serve", "-c", str(self.folder / "kvstore.toml")]
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        with suppress(UnavailableError):
            self._pid = self._wait_for_answer(self._process)
