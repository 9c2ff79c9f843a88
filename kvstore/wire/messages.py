"""Messages: a MessagePack array each, the tag first, then the fields in order.

Requests carry an `id` that their answer repeats; messages without one are answered by nothing. Arrays of
numbers travel as little-endian bytes, keys as one run of bytes: a list of 1024 keys costs three times more.
Times are relative (s), since the two sides share no clock.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, get_type_hints

import msgpack

from kvstore.errors import LocalProtocolError, RemoteProtocolError
from kvstore.types import MAX_KEY_BYTES

VERSION = 8
OLDEST = 7
"""The oldest that is spoken too. Fields are added at a message's end, `_since` a version. None is
ever used for something else."""

MAGIC = "kvstore"
MAX_TENANT_CHARS = 64
NAMESPACES = 1024
"""How many namespaces the daemon remembers of one connection: those that were used last."""
MAX_PROMPT_BLOCKS = 1 << 20
"""What more is said to be asked for does not count."""
LOW, NORMAL, HIGH = range(3)
"""Priorities of a hint."""
REQUEST_RECORD = struct.Struct("<dII")
"""Head of a recorded request: s since the start of the recording, tokens of a block (0: unknown), hashes."""

LONGEST = 1024
"""The most values that one list or map of a request has."""
MOST_VALUES = LONGEST
"""The most that all lists and maps of a request have together."""
MOST_OF_OPERATORS = 16 * LONGEST
"""The same for operators, who send whole configurations."""
_SHORT_BYTES = 4096
"""What is no longer than this needs no counting."""

_SHOWN = (int, float, str, bytes)  # what may be repeated to a peer: never something nested


def _since(version: int, default: Any) -> Any:
    """A field that peers of older versions neither send nor get: `default` is what it is to them."""
    return field(default=default, metadata={"since": version})


def span(oldest: int, newest: int) -> str:
    """A range of versions, to people."""
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


@dataclass(slots=True)
class Hello:
    """First of a client. `version`: the oldest that it speaks; first in `capabilities`: the newest."""

    magic: str
    version: int
    token: str
    capabilities: tuple[Any, ...] = ()

    @property
    def newest(self) -> int:
        """The newest version that the client speaks."""
        said = self.capabilities[0] if self.capabilities else self.version
        return max(said, self.version) if type(said) is int else self.version


@dataclass(slots=True)
class Welcome:
    """The daemon's answer to Hello: from now on, both speak `version`, the newest that both can.

    `instance` differs after every start of the daemon. `release`: what its software is called.
    """

    version: int
    instance: bytes
    frame_bytes: int
    batch_keys: int
    reserve_keys: int
    capabilities: tuple[Any, ...] = ()
    release: str = _since(8, "")


@dataclass(slots=True)
class Ping:
    """Nothing asked; answered by Value(0)."""

    id: int


@dataclass(slots=True)
class Open:
    """Make the namespace of a layout known on this connection; answered by Opened.

    `owner` is the tenant that it belongs to, "" for the asker's own. Its blocks are misses `ttl_s` after they
    were stored; 0: as the tenant's configuration says.
    """

    id: int
    layout: dict[str, Any]
    owner: str
    ttl_s: float

    def validate(self) -> None:
        """Raises RemoteProtocolError for an owner that can be no tenant."""
        _check_tenants((self.owner,))


@dataclass(slots=True)
class Opened:
    """`namespace` names the layout on this connection; `fingerprint` seeds its checksums."""

    id: int
    namespace: int
    fingerprint: bytes


@dataclass(slots=True)
class _Keyed:
    """A request about keys of one namespace: `keys` holds keys of `key_bytes` bytes one after another."""

    id: int
    namespace: int
    key_bytes: int
    keys: bytes

    def validate(self) -> None:
        """Raises RemoteProtocolError for keys that can't be cut."""
        _check_keys(self.key_bytes, self.keys)


@dataclass(slots=True)
class Lookup(_Keyed):
    """Length of the stored prefix that is worth loading within `timeout_s`; answered by Found.

    `recompute_s` is what computing one block anew takes: blocks that take longer to load are left out. 0:
    nobody knows, and what is stored is counted, whenever it could be loaded.

    For the hit ratio only: this is the first question for a prompt of `asks` blocks (0: for none), of these
    keys `known` leading ones have been counted as found before, and each key stands for `step` blocks.
    """

    timeout_s: float
    recompute_s: float
    device: str = ""
    asks: int = 0
    known: int = 0
    step: int = 1


@dataclass(slots=True)
class Acquire(_Keyed):
    """Slots of the longest stored prefix within `timeout_s`; answered by Granted. See Lookup.

    `device`: the UUID of a GPU; slots are in its memory if it has a pool with room for all, else in DRAM.
    While not even the first block is stored anywhere, the answer waits for it: up to `wait_s`, 60 s at most.
    `asks`, `known`: see Lookup.
    """

    timeout_s: float
    recompute_s: float
    device: str = ""
    wait_s: float = 0.0
    asks: int = 0
    known: int = 0


@dataclass(slots=True)
class Reserve(_Keyed):
    """Slots for those keys that are not stored yet; answered by Reserved. `device`: see Acquire.

    `tokens`: what the blocks were computed from, equally many u32 for each key; empty: not said.
    """

    parent: bytes
    timeout_s: float
    device: str = ""
    tokens: bytes = b""

    def validate(self) -> None:
        """Raises RemoteProtocolError for keys that can't be cut and for a parent that is too long."""
        _check_keys(self.key_bytes, self.keys)
        if len(self.parent) > MAX_KEY_BYTES:
            raise RemoteProtocolError(f"a parent key of {len(self.parent)} bytes")


@dataclass(slots=True)
class Prefetch(_Keyed):
    """Answered by Value: blocks that are, or will soon be, in memory. `device`: see Acquire."""

    device: str = ""


@dataclass(slots=True)
class Pin(_Keyed):
    """Answered by Value: blocks kept for `ttl_s`."""

    ttl_s: float


@dataclass(slots=True)
class Unpin(_Keyed):
    """Answered by Value: blocks no longer kept."""


@dataclass(slots=True)
class Invalidate(_Keyed):
    """Answered by Value: blocks forgotten."""


@dataclass(slots=True)
class Suspect(_Keyed):
    """The reader's checksum did not match under these keys, in the memory of `device` ("": DRAM).

    Unless `id` is 0 a Value answers, when what is bad is out of the way: how many blocks were.
    """

    device: str = ""


@dataclass(slots=True)
class Commit:
    """The slots of a reservation are filled: a u64 checksum and a 0/1 byte for each granted key."""

    id: int
    lease: int
    checksums: bytes
    written: bytes

    def validate(self) -> None:
        """Raises RemoteProtocolError when the two columns differ in length."""
        if len(self.checksums) != 8 * len(self.written):
            raise RemoteProtocolError(
                f"{len(self.checksums)} bytes of checksums for {len(self.written)} blocks"
            )


@dataclass(slots=True)
class Abort:
    """A reservation is given up."""

    lease: int


@dataclass(slots=True)
class Release:
    """A lease is given back. The reader could not use its last `unused` blocks; `corrupt` ones were wrong."""

    lease: int
    unused: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class Map:
    """Pass me the descriptor of an extent; answered by Mapped with one descriptor, writable or read-only.

    For an extent in a GPU's memory, numbered from `HBM_EXTENTS` on, by MappedHbm instead.
    """

    id: int
    extent: int
    writable: bool


@dataclass(slots=True)
class Mapped:
    """`extent_bytes` is the length of the extent whose descriptor comes with this frame."""

    id: int
    extent_bytes: int


@dataclass(slots=True)
class MappedHbm:
    """`extent_bytes` on the GPU `device`, which `handle` (CUDA IPC) opens for reading and writing."""

    id: int
    extent_bytes: int
    device: str
    handle: bytes


@dataclass(slots=True)
class Status:
    """Answered by Report."""

    id: int


@dataclass(slots=True)
class Report:
    """State of the daemon, as `kvstore status` shows it."""

    id: int
    status: dict[str, Any]


@dataclass(slots=True)
class Value:
    """A number for an answer."""

    id: int
    value: int


@dataclass(slots=True)
class Found:
    """Answer to Lookup. With `gaps`, stored blocks may lie beyond missing ones: ask all keys.

    `stored`: leading blocks that are stored, worth loading or not.
    """

    id: int
    value: int
    gaps: bool
    stored: int = 0


@dataclass(slots=True)
class Granted:
    """A lease on leading blocks: a `SLOT_RECORD` each. `stored`: see Found."""

    id: int
    lease: int
    slot_bytes: int
    slots: bytes
    stored: int = 0


@dataclass(slots=True)
class Reserved:
    """What became of each key (a u8), and a `SLOT_RECORD` for each granted one."""

    id: int
    lease: int
    slot_bytes: int
    slots: bytes
    status: bytes
    why: str


@dataclass(slots=True)
class Denied:
    """The request of this id is refused; the connection goes on."""

    id: int
    why: str
    hint: str


@dataclass(slots=True)
class HandOff(_Keyed):
    """Have the stored prefix on the network, for another node, within `timeout_s`.

    Answered by Value: how many leading blocks are.
    """

    timeout_s: float


@dataclass(slots=True)
class Publish:
    """Let these tenants, and no others, read a namespace of one's own; answered by Value when it holds."""

    id: int
    namespace: int
    tenants: tuple[Any, ...]

    def validate(self) -> None:
        """Raises RemoteProtocolError for what can be no tenant."""
        _check_tenants(self.tenants)


@dataclass(slots=True)
class Forget:
    """Delete a namespace of one's own; or with number 0 all of this model and revision, where "" is any.

    Answered by Value when nothing is left: how many blocks were deleted.
    """

    id: int
    namespace: int
    model: str
    revision: str


@dataclass(slots=True)
class DeleteTenant:
    """Delete all that a tenant has stored; answered by Value: how many blocks."""

    id: int
    name: str

    def validate(self) -> None:
        """Raises RemoteProtocolError for what can be no tenant."""
        _check_tenants((self.name,))


@dataclass(slots=True)
class Busy:
    """The request of this id is refused for now: try again in `retry_s`."""

    id: int
    retry_s: float
    why: str


@dataclass(slots=True)
class Hint(_Keyed):
    """Next use of the stored prefix is expected in `next_use_s`, if it is `expected` at all.

    `closed`: its session is over. `priority`: LOW, NORMAL or HIGH. Answered by Value: blocks it is about.
    """

    expected: bool
    next_use_s: float
    closed: bool
    priority: int

    def validate(self) -> None:
        """Raises RemoteProtocolError for keys that can't be cut and for priorities there are not."""
        _check_keys(self.key_bytes, self.keys)
        if self.priority > HIGH:
            raise RemoteProtocolError(f"a hint of priority {self.priority}", f"{LOW} to {HIGH}")


@dataclass(slots=True)
class Explain:
    """What is known of keys in the namespaces of a tenant (of a model); answered by Explained.

    `tenant` "": one's own, or for operators everybody's. `model` "": any.
    """

    id: int
    tenant: str
    model: str
    key_bytes: int
    keys: bytes

    def validate(self) -> None:
        """Raises RemoteProtocolError for keys that can't be cut and for what can be no tenant."""
        _check_keys(self.key_bytes, self.keys)
        _check_tenants((self.tenant,))


@dataclass(slots=True)
class Explained:
    """A map of plain values for each key and namespace that knows something of it."""

    id: int
    blocks: tuple[Any, ...]


@dataclass(slots=True)
class RecordStart:
    """Record what is asked for, for so many seconds, with at most `max_bytes` kept; for operators.

    Answered by Value(0). It ends with the connection at the latest.
    """

    id: int
    seconds: float
    max_bytes: int


@dataclass(slots=True)
class RecordRead:
    """What this connection's recording has kept since the last time; answered by Recorded."""

    id: int


@dataclass(slots=True)
class Recorded:
    """Some requests of a recording, each `REQUEST_RECORD` and then its keys' hashes, u64 each.

    `dropped`: requests for which there was no room, of all so far. `ended`: nothing more comes.
    """

    id: int
    requests: bytes
    dropped: int
    ended: bool


@dataclass(slots=True)
class Control:
    """A request of an operator's, by name and with arguments: see `daemon.control`.

    Answered by Report, or by Value where all there is to say is how many.
    """

    id: int
    call: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Failure:
    """The peer broke the protocol; the connection ends after this."""

    why: str
    hint: str


ALL: tuple[type, ...] = (
    Hello,
    Welcome,
    Ping,
    Open,
    Opened,
    Lookup,
    Acquire,
    Reserve,
    Commit,
    Abort,
    Release,
    Prefetch,
    Pin,
    Unpin,
    Invalidate,
    Suspect,
    Map,
    Mapped,
    Status,
    Report,
    Value,
    Granted,
    Reserved,
    Denied,
    Failure,
    Found,
    Publish,
    Forget,
    DeleteTenant,
    Busy,
    Hint,
    Explain,
    Explained,
    RecordStart,
    RecordRead,
    Recorded,
    Control,
    MappedHbm,
    HandOff,
)
"""The tag of a message is its place here: append only."""


def _check_keys(key_bytes: int, keys: bytes) -> None:
    if not 1 <= key_bytes <= MAX_KEY_BYTES:
        raise RemoteProtocolError(f"keys of {key_bytes} bytes", f"keys have 1 to {MAX_KEY_BYTES} bytes")
    if len(keys) % key_bytes:
        raise RemoteProtocolError(f"{len(keys)} bytes of keys are no multiple of {key_bytes}")


def _check_tenants(names: tuple[Any, ...]) -> None:
    if not all(isinstance(name, str) and len(name) <= MAX_TENANT_CHARS for name in names):
        raise RemoteProtocolError(
            "a tenant's name is no text, or too long", f"at most {MAX_TENANT_CHARS} characters"
        )


def _plain(hint: Any) -> type:
    """The class that a field's value must have."""
    cls: type = getattr(hint, "__origin__", hint)
    return cls


class _Codec:
    """How one message class is packed and checked, worked out once."""

    def __init__(self, tag: int, cls: type) -> None:
        hints = get_type_hints(cls)
        self.tag = tag
        self.cls = cls
        self.names = tuple(f.name for f in fields(cls))
        self.values = attrgetter("__class__", *self.names)
        self.types = (int, *(_plain(hints[name]) for name in self.names))
        self.numbers = tuple(i for i, wanted in enumerate(self.types) if wanted in (int, float))
        self.validate = getattr(cls, "validate", None)
        self.since = tuple(f.metadata.get("since", OLDEST) for f in fields(cls))
        self.newest = max(self.since, default=OLDEST)
        self._defaults = tuple(f.default for f in fields(cls))
        self._older = {self.fields_at(version) for version in range(OLDEST, VERSION)}

    def fields_at(self, version: int) -> int:
        """How many fields the message has in a version."""
        return sum(since <= version for since in self.since)

    def complete(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """What an older peer has sent, with the defaults of what has come since."""
        n = len(items) - 1
        return items + self._defaults[n:] if n in self._older else items

    def check(self, items: tuple[Any, ...]) -> None:
        """Raises RemoteProtocolError for a field of the wrong type, or a number that is negative or none."""
        if len(items) != len(self.types):
            raise RemoteProtocolError(
                f"{self.cls.__name__} has {len(items) - 1} fields instead of {len(self.names)}"
            )
        for value, wanted, name in zip(items[1:], self.types[1:], self.names, strict=True):
            good = type(value) is wanted or (wanted is float and type(value) is int)
            if wanted in (int, float):
                good = good and 0 <= value < math.inf
            if not good:
                shown = f"{value!r:.40}" if isinstance(value, _SHOWN) else type(value).__name__
                raise RemoteProtocolError(
                    f"{self.cls.__name__}.{name} is {shown} instead of {wanted.__name__}"
                )


_BY_TAG = [_Codec(tag, cls) for tag, cls in enumerate(ALL)]
_BY_CLASS = {codec.cls: codec for codec in _BY_TAG}


def encode(message: Any, version: int = VERSION) -> bytes:
    """One message as MessagePack, in a version of the wire. LocalProtocolError for what does not fit."""
    codec = _BY_CLASS[type(message)]
    values = codec.values(message)[1:]
    if version < codec.newest:
        values = values[: codec.fields_at(version)]
    try:
        packed: bytes = msgpack.packb((codec.tag, *values))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{codec.cls.__name__} cannot be sent: {error}") from None
    return packed


class _Counted:
    """Lists and maps of one message as they end, each counted with what it holds."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def __call__(self, container: Any) -> Any:
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {self._most} values in lists and maps")
        return container


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The message in one frame. Raises RemoteProtocolError naming what is wrong with it."""
    try:
        items = msgpack.unpackb(data, use_list=False)
    except Exception as error:
        raise _no_messagepack(data, error) from None
    return _message(items)


def decode_request(data: bytes | bytearray | memoryview, most_values: int = MOST_VALUES) -> Any:
    """`decode` for what anybody may have sent: few values, so that it is quick at any size.

    Raises RemoteProtocolError also for a list or map of more than `LONGEST` values, and for more than
    `most_values` in all lists and maps together.
    """
    count = _Counted(most_values) if len(data) > _SHORT_BYTES else None
    try:
        items = msgpack.unpackb(
            data, use_list=False, max_ext_len=0, max_array_len=LONGEST, max_map_len=LONGEST,
            list_hook=count, object_hook=count,
        )  # fmt: skip
    except Exception as error:
        raise _no_messagepack(data, error) from None
    return _message(items)


def _no_messagepack(data: bytes | bytearray | memoryview, error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"a frame of {len(data)} bytes is not MessagePack: {error}"[:200])


def _message(items: Any) -> Any:
    if not isinstance(items, tuple) or not items or type(items[0]) is not int:
        raise RemoteProtocolError("a frame is not an array that starts with a tag")
    if not 0 <= items[0] < len(_BY_TAG):
        raise RemoteProtocolError(f"unknown message tag {items[0]}", "the peer speaks a newer protocol?")
    codec = _BY_TAG[items[0]]
    if tuple(map(type, items)) != codec.types:
        items = codec.complete(items)
        codec.check(items)
    for i in codec.numbers:
        if not 0 <= items[i] < math.inf:
            codec.check(items)
    message = codec.cls(*items[1:])
    if codec.validate is not None:
        codec.validate(message)
    return message
