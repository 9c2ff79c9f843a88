"""The service manager's protocol: notifications, watchdog, and descriptors that outlive the process.

Source: sd_notify(3), sd_listen_fds(3) and sd_watchdog_enabled(3) of systemd. `supervise.py` is a manager.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

_log = logging.getLogger(__name__)

_FIRST_FD = 3


def notify(*assignments: str, fds: Sequence[int] = (), within_s: float = 5.0) -> None:
    """Sends assignments such as `READY=1`. Waits at most `within_s` for a busy manager. Logs failures."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(within_s)
        try:
            # Connected, because a message with descriptors does not take every form of address.
            sock.connect(address.replace("@", "\0", 1))
            socket.send_fds(sock, ["\n".join(assignments).encode()], fds)
        except OSError as error:
            _log.warning("cannot notify the service manager: %s", error)


def watchdog_s() -> float:
    """Returns the manager's watchdog interval in s, 0 if it has no watchdog for this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isdecimal() else 0.0


def inherited() -> dict[str, int]:
    """Returns the descriptors that the manager passes to this process, by name. Later calls return none."""
    count, owner = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if owner != str(os.getpid()) or not count.isdecimal():
        return {}
    found: dict[str, int] = {}
    for i in range(int(count)):
        fd = _FIRST_FD + i
        os.set_inheritable(fd, False)
        name = names[i] if i < len(names) else "unknown"
        if name in found:
            _log.warning("the service manager hands over two descriptors named %s", name)
            os.close(fd)
        else:
            found[name] = fd
    return found


class FdStore:
    """The manager's store of descriptors, which outlives this process. A `tiers.dram.Keeper`."""

    def keep(self, name: str, fd: int) -> None:
        """Stores a duplicate of `fd` in the manager."""
        notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])

    def forget(self, name: str) -> None:
        """Lets the manager close the stored descriptor of this name."""
        notify("FDSTOREREMOVE=1", f"FDNAME={name}")
