"""What a service manager is told: one datagram to the socket in NOTIFY_SOCKET, nothing without it.

Source: the sd_notify protocol as systemd documents it.
"""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger(__name__)


def notify(*assignments: str) -> None:
    """Sends assignments such as `READY=1`. A manager that does not listen is no reason to stop."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto("\n".join(assignments).encode(), address.replace("@", "\0", 1))
        except OSError as error:
            _log.warning("cannot notify the service manager: %s", error)
