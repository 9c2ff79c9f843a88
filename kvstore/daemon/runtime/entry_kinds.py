"""The kinds of entries that the daemon adds to the event log for operators."""

from __future__ import annotations

from enum import StrEnum


class EntryKind(StrEnum):
    """A kind of entry. `meaning` is its documentation, with the contents of the entry's `detail`."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> EntryKind:
        """Makes a member of its name in the log and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    STARTED = "started", "The daemon started. Detail: its process id."
    RELOADED = "reloaded", "A reload or a change at run time took effect. Detail: the changed settings."
    PUBLISHED = "published", "The readers of a namespace changed. Detail: the tenants that may read it."
    FORGOTTEN = "forgotten", "A namespace was deleted with its blocks."
    DELETED = "deleted", "The blocks of a tenant were deleted. Detail: the number of namespaces."
    RENEWED = "renewed", "An extent was reallocated for another tenant. Detail: its old and new number."
    REMOVED = "removed", "An extent was removed to shrink a tier. Detail: its number."
    LOST = "lost", "Without a key: an extent was given up. Detail: the error."
    FENCED = "fenced", "A device is not used: it does not respond, or an operator fenced it."
    UNFENCED = "unfenced", "A fenced device is used again."
    UNREADABLE = "unreadable", "Reads of a device are suspended after failures. Its blocks are misses."
    READABLE = "readable", "A device is read again."
    UNWRITABLE = "unwritable", "Writes to a device are suspended: after failures, or by an operator."
    WRITABLE = "writable", "A device is written again."
    JOINED = "joined", "A device was added to the NVMe tier."
    LEAVING = "leaving", "The removal of a device began: it is written no more."
    LEFT = "left", "A device was removed: it is empty and closed."
    NETWORK = "network", "The network tier is used, or not used any more. Detail: in use, or the problem."
