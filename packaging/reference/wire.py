"""The wire protocol: every message with its fields, from `kvstore.wire`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import get_type_hints

from kvstore.types import HBM_EXTENTS
from kvstore.wire import messages as m
from kvstore.wire.frames import DEFAULT_FRAME_BYTES
from reference.formats import offsets
from reference.text import prose

_TYPES = {int: "integer", float: "float", str: "string", bytes: "bytes", bool: "boolean"}

_INTRODUCTION = f"""# Wire protocol

Generated from the code: version {m.VERSION}. A client and a daemon speak the newest version that both
support. The oldest supported version is {m.OLDEST}. New versions add fields at the end of messages; no
field changes its meaning, and no tag is given to another message.

## Connection
A client connects to the Unix socket of the daemon and sends [Hello](#hello). The daemon answers with
[Welcome](#welcome), or with [Failure](#failure) and the end of the connection. Until Hello, a frame has at
most 4 KiB, and Hello must arrive within 5 s. The daemon identifies the peer by the token in Hello, or by
the user and groups of its process. Namespaces, leases and reservations are numbered per connection.

A client may send requests before earlier ones are answered. A request has a number (`id`), and its answer
repeats it. Answers may come in another order than requests. [Denied](#denied) or [Busy](#busy) can answer
any request. Messages without an `id`, such as [Release](#release), have no answer.

## Frames
A frame is a length (u32, little-endian) and a message of that many bytes. A message is a MessagePack array:
the tag, then the fields in order. A frame has at most `frame_bytes` of Welcome, by default
{DEFAULT_FRAME_BYTES:,} bytes. The lists and maps of a request have at most {m.MOST_VALUES:,} values in all,
those of an operator {m.MOST_OF_OPERATORS:,}. A message that breaks these rules ends the connection. Times
are relative, in seconds. The keys of a request are one byte string of keys of equal length.

## Leases
[Acquire](#acquire) and [Reserve](#reserve) lease slots in shared memory. The client reads or writes the
slots itself, and ends the lease with [Release](#release), or with [Commit](#commit) or [Abort](#abort). The
end of a connection ends its leases and reservations; slots of a reservation without a commit are freed.

A slot has this record, in `slots` of [Granted](#granted) and [Reserved](#reserved):
"""

_DESCRIPTORS = f"""
`place` is extent << 32 | index of the slot in the extent. A reader compares the checksum of its copy with
`checksum`, and the slot header's version with `version`. [On-disk and shared formats](formats.md) has both.

## Descriptors
A client maps an extent once. [Map](#map) asks for it, and the daemon passes the file descriptor of a memfd
with [Mapped](#mapped) as ancillary data (`SCM_RIGHTS`). Readers get a read-only descriptor. Extents with
numbers from {HBM_EXTENTS:,} on are GPU memory: [MappedHbm](#mappedhbm) has a handle of CUDA IPC in place of
a descriptor.

## Messages
| tag | message | sent by |
|---|---|---|"""


def page() -> Iterator[str]:
    """Yields the page: an introduction, an index, and a heading for each message."""
    yield _INTRODUCTION
    yield from offsets("slot grant")
    yield _DESCRIPTORS
    messages = list(enumerate(zip(m.ALL, m.SENDERS, strict=True)))
    for tag, (message, sender) in messages:
        yield f"| {tag} | [{message.__name__}](#{message.__name__.lower()}) | {sender} |"
    for tag, (message, sender) in messages:
        yield f"\n### {message.__name__}\n\nTag {tag}, sent by the {sender}. {prose(message.__doc__ or '')}\n"
        types = get_type_hints(message)
        if fields(message):
            yield "| field | type | since |\n|---|---|---|"
        for field in fields(message):
            yield f"| `{field.name}` | {_type(types[field.name])} | {field.metadata.get('since', '')} |"


def missing() -> Iterator[str]:
    """Yields the messages without a docstring."""
    for message in m.ALL:
        if not message.__doc__ or message.__doc__.startswith(f"{message.__name__}("):
            yield f"{message.__name__} has no docstring: add one in kvstore/wire/messages.py"


def _type(kind: type) -> str:
    origin = getattr(kind, "__origin__", kind)
    return {tuple: "array", dict: "map"}.get(origin) or _TYPES[kind]
