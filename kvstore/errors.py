"""Errors that kvstore raises on purpose. Each names the thing at fault and, where one helps, a hint.

A miss, a denial and a daemon that is away are values, not errors: they are raised only under `strict=True`.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without what a terminal obeys, reorders or hides: such characters are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class KVStoreError(Exception):
    """Base of every error here. `hint` says what to do about it, or is empty."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(KVStoreError):
    """The configuration names a value that cannot be used."""


class MisuseError(KVStoreError, ValueError):
    """The caller passed something that can never work: sizes, types, lengths. Always raised at once."""


class LocalProtocolError(KVStoreError):
    """This side tried to send something that the protocol forbids."""


class RemoteProtocolError(KVStoreError):
    """The other side sent something that the protocol forbids; the connection is of no more use."""


class UnavailableError(KVStoreError):
    """No daemon answered in time. Raised only under `strict=True`, and by a lease without connection."""


class DeniedError(KVStoreError):
    """The daemon refused a request, and says why. Raised only under `strict=True`."""


class TierError(KVStoreError):
    """A tier's memory, folder or device failed as a whole (one failed block is a value, not this)."""
