"""Exceptions of kvstore. The message of each states its cause, with a hint.

Misses, denials and unavailable daemons are return values. They become exceptions only with `strict=True`.
Any other exception is a bug.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text with control, bidirectional and invisible characters escaped, safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class KVStoreError(Exception):
    """Base class. `message` states the problem, `hint` a remedy (empty if none is known)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


def for_terminal(error: KVStoreError) -> str:
    """Returns what a command prints when an error ends it."""
    return "error: " + "\n".join(map(printable, str(error).splitlines()))


class ConfigError(KVStoreError):
    """The configuration contains an unusable value, or its file cannot be read."""


class MisuseError(KVStoreError, ValueError):
    """The caller passed arguments that can never work: sizes, types, lengths. Always raised."""


class LocalProtocolError(KVStoreError):
    """This side tried to send a message that the protocol forbids."""


class RemoteProtocolError(KVStoreError):
    """The peer sent a message that the protocol forbids. The connection must be closed."""


class UnavailableError(KVStoreError):
    """No daemon answered in time. Raised with `strict=True`, and by leases whose connection is closed."""


class DeniedError(KVStoreError):
    """The daemon refused a request; the message is its reason. Raised only with `strict=True`."""


class TierError(KVStoreError):
    """A tier's memory, folder or device failed as a whole. The failure of single blocks is a return value."""
