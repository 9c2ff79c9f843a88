"""The messages of the protocol between client and daemon, and their encoding.

A message is a MessagePack array: the tag, then the fields in order. An answer repeats the `id` of its
request. A message without an id has no answer. Columns of numbers are little-endian bytes. The keys of a
request are one byte string, because a list of 1,024 keys would cost three times as much. Times are relative
(seconds), because client and daemon share no clock. `validate`, where a message has it, raises
RemoteProtocolError for values that have the right types but make no sense.

Not covered: the length before each message. See `frames`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, get_type_hints

import msgpack

from kvstore.errors import LocalProtocolError, RemoteProtocolError
from kvstore.types import MAX_KEY_BYTES, MOST_TIERS

VERSION = 13
"""The newest version of the wire."""
OLDEST = 7
"""The oldest supported version. New fields are added at the end of a message, `_since` a version. No field
changes its meaning."""

MAGIC = "kvstore"
MAX_TENANT_CHARS = 64
NAMESPACES = 1024
"""Namespaces that the daemon remembers for one connection: the last used ones."""
MAX_PROMPT_BLOCKS = 1 << 20
"""The most blocks of one prompt that are counted."""
LOW, NORMAL, HIGH = range(3)
"""Priorities of a hint."""
REQUEST_RECORD = struct.Struct("<dII")
"""Head of a recorded request: seconds since the recording began, tokens per block (0: unknown), hashes."""

LONGEST = 1024
"""The most values in one list or map of a request."""
MOST_VALUES = LONGEST
"""The most values in all lists and maps of a request together."""
MOST_OF_OPERATORS = 16 * LONGEST
"""The same for operators, who send whole configurations."""
_SHORT_BYTES = 4096
"""Shorter messages cannot hold too many values."""
PACKER_BYTES = 4096
"""What a packer begins with. By default msgpack takes 256 KiB, which malloc maps and unmaps in each call."""

_SHOWN = (int, float, str, bytes)  # types whose values are repeated to a peer: nothing nested

CLIENT, DAEMON = "client", "daemon"

_T = TypeVar("_T")
_CLASSES: dict[int, type] = {}
_SENDERS: dict[int, str] = {}


def _since(version: int, default: Any) -> Any:
    """Declares a field that older versions do not have. `default` is its value for older peers."""
    return field(default=default, metadata={"since": version})


@dataclass_transform()
def _message(tag: int, sender: str = CLIENT) -> Callable[[type[_T]], type[_T]]:
    """Makes a class a message with this tag. A tag is never given to another message."""

    def declare(cls: type[_T]) -> type[_T]:
        assert tag not in _CLASSES, f"tag {tag} has two messages"
        _SENDERS[tag] = sender
        _CLASSES[tag] = dataclass(slots=True)(cls)
        return _CLASSES[tag]

    return declare


def span(oldest: int, newest: int) -> str:
    """Returns a range of versions in words."""
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


# -- greeting


@_message(0)
class Hello:
    """A client's first message. `version`: the oldest that it speaks; first in `capabilities`: the newest."""

    magic: str
    version: int
    token: str
    capabilities: tuple[Any, ...] = ()

    @property
    def newest(self) -> int:
        """The newest version that the client speaks."""
        said = self.capabilities[0] if self.capabilities else self.version
        return max(said, self.version) if type(said) is int else self.version


@_message(1, DAEMON)
class Welcome:
    """Answers Hello. Both sides then speak `version`, the newest that both support.

    `instance` is a new random value after every start of the daemon, `release` the version of its software.
    """

    version: int
    instance: bytes
    frame_bytes: int
    batch_keys: int
    reserve_keys: int
    capabilities: tuple[Any, ...] = ()
    release: str = _since(8, "")


@_message(24, DAEMON)
class Failure:
    """Reports that the peer broke the protocol. The connection ends after it."""

    why: str
    hint: str


@dataclass(slots=True)
class _Numbered:
    """A request with its number, or an answer with the number of its request."""

    id: int


# -- answers of several requests


@_message(20, DAEMON)
class Value(_Numbered):
    """Answers with a number."""

    value: int


@_message(19, DAEMON)
class Report(_Numbered):
    """Answers with a map: the state of the daemon, or the result of an operator's command."""

    status: dict[str, Any]


@_message(23, DAEMON)
class Denied(_Numbered):
    """Refuses a request. The connection stays open."""

    why: str
    hint: str


@_message(29, DAEMON)
class Busy(_Numbered):
    """Refuses a request for now. The client may retry after `retry_s`."""

    retry_s: float
    why: str


# -- namespaces and tenants


@_message(3)
class Open(_Numbered):
    """Opens the namespace of a layout on this connection. Answered by Opened.

    `owner` is the tenant of the namespace ("": the peer's own). Blocks are misses `ttl_s` after their storing
    (0: the TTL of the tenant's configuration). `layout`: the fields of `Layout`, since version 10 with `kind`
    unless it is "chain". Older daemons refuse it.
    """

    layout: dict[str, Any]
    owner: str
    ttl_s: float

    def validate(self) -> None:
        _check_tenants((self.owner,))


@_message(4, DAEMON)
class Opened(_Numbered):
    """`namespace` is the layout's number on this connection; `fingerprint` seeds its checksums."""

    namespace: int
    fingerprint: bytes


@_message(26)
class Publish(_Numbered):
    """Lets these tenants, and no others, read a namespace of the peer. Answered by Value when in force."""

    namespace: int
    tenants: tuple[Any, ...]

    def validate(self) -> None:
        _check_tenants(self.tenants)


@_message(27)
class Forget(_Numbered):
    """Deletes one of the peer's namespaces; 0: all of this model and revision, where "" matches any.

    Answered by Value when the deletion is complete: the number of deleted blocks.
    """

    namespace: int
    model: str
    revision: str


@_message(28)
class DeleteTenant(_Numbered):
    """Deletes all blocks of a tenant. Answered by Value: the number of blocks."""

    name: str

    def validate(self) -> None:
        _check_tenants((self.name,))


# -- requests about keys


@dataclass(slots=True)
class _Keyed(_Numbered):
    """A request about keys of one namespace. `keys` is one byte string of keys of `key_bytes` bytes each."""

    namespace: int
    key_bytes: int
    keys: bytes

    def validate(self) -> None:
        _check_keys(self.key_bytes, self.keys)


@dataclass(slots=True)
class _Read(_Keyed):
    """A request for the stored prefix. Blocks that do not load within `timeout_s` are left out.

    `recompute_s`: the time to recompute one block (0: unknown). Blocks that take longer to load are left out.
    `device`: the UUID of a GPU whose memory is preferred. DRAM is used if its pool has too little room.
    """

    timeout_s: float
    recompute_s: float
    device: str = ""


@_message(5)
class Lookup(_Read):
    """Asks for the length of the stored prefix. Answered by Found. `recompute_s` 0: `timeout_s` is ignored.

    For the hit ratio only: this is the first request for a prompt of `asks` blocks (0: it is not the first),
    `known` leading keys were counted as found before. Each key stands for `step` blocks.

    Since version 11, with `recompute_s`: blocks that load within `load_s` count (0: within `timeout_s`), and
    the caller has the blocks of the first `have` keys, which are not loaded.
    """

    asks: int = 0
    known: int = 0
    step: int = 1
    load_s: float = _since(11, 0.0)
    have: int = _since(11, 0)


@_message(6)
class Acquire(_Read):
    """Leases the slots of the stored prefix. Answered by Granted.

    If the first block is not stored, the answer waits for it up to `wait_s`, at most 60 s. See Lookup for
    `asks` and `known`.
    """

    wait_s: float = 0.0
    asks: int = 0
    known: int = 0


@_message(39)
class Contains(_Keyed):
    """Asks which keys are stored, each for itself. Answered by Presence. Since version 9.

    The network is asked for up to `timeout_s`. Keys that it has not answered by then count as absent.
    """

    timeout_s: float


@_message(40, DAEMON)
class Presence(_Numbered):
    """Answers Contains: a byte for each key, 1: stored."""

    mask: bytes


@_message(7)
class Reserve(_Keyed):
    """Reserves slots for the keys that are not stored yet. Answered by Reserved. `device`: see Acquire.

    `tokens`: the tokens of the blocks, the same number of u32 for each key; empty: unknown. Independent
    blocks may belong to the block `chain_key` of the namespace `chain`; empty: to none.
    """

    parent: bytes
    timeout_s: float
    device: str = ""
    tokens: bytes = b""
    chain: int = _since(11, 0)
    chain_key: bytes = _since(11, b"")

    def validate(self) -> None:
        _check_keys(self.key_bytes, self.keys)
        for key in (self.parent, self.chain_key):
            if len(key) > MAX_KEY_BYTES:
                raise RemoteProtocolError(f"a parent key of {len(key)} bytes")


@_message(11)
class Prefetch(_Keyed):
    """Loads the stored prefix into memory. Answered by Value: blocks that are, or will soon be, in memory."""

    device: str = ""


@_message(12)
class Pin(_Keyed):
    """Protects the stored prefix from eviction for `ttl_s`. Answered by Value: the number of blocks."""

    ttl_s: float


@_message(13)
class Unpin(_Keyed):
    """Undoes Pin. Answered by Value: the number of unpinned blocks."""


@_message(14)
class Invalidate(_Keyed):
    """Drops blocks from every tier. Answered by Value: the number of dropped blocks."""


@_message(15)
class Suspect(_Keyed):
    """Reports wrong checksums under these keys, in the memory of `device` ("": DRAM).

    Unless `id` is 0, it is answered by Value after the corrupt blocks were dropped: their number.
    """

    device: str = ""


@_message(38)
class HandOff(_Keyed):
    """Uploads the stored prefix to the network, for another node, within `timeout_s`.

    Answered by Value: the number of leading blocks that the network has.
    """

    timeout_s: float


@_message(30)
class Hint(_Keyed):
    """Announces the next use of the stored prefix: in `next_use_s` if it is `expected`, else unknown.

    `closed`: the session is over. `priority`: LOW, NORMAL or HIGH. Answered by Value: the number of blocks.
    """

    expected: bool
    next_use_s: float
    closed: bool
    priority: int

    def validate(self) -> None:
        _check_keys(self.key_bytes, self.keys)
        if self.priority > HIGH:
            raise RemoteProtocolError(f"a hint of priority {self.priority}", f"{LOW} to {HIGH}")


@_message(31)
class Explain(_Numbered):
    """Asks for the state of keys in the namespaces of a tenant (and model). Answered by Explained.

    `tenant` "": the peer's own; for operators all tenants. `model` "": any.
    """

    tenant: str
    model: str
    key_bytes: int
    keys: bytes

    def validate(self) -> None:
        _check_keys(self.key_bytes, self.keys)
        _check_tenants((self.tenant,))


@_message(32, DAEMON)
class Explained(_Numbered):
    """One map of plain values for each key and namespace with a record of the key."""

    blocks: tuple[Any, ...]


@_message(25, DAEMON)
class Found(_Numbered):
    """Answers Lookup. `gaps`: stored blocks may lie behind missing ones, so all keys must be asked.

    `stored`: the number of leading stored blocks, whether worth loading or not.
    """

    value: int
    gaps: bool
    stored: int = 0


# -- leases and reservations


@dataclass(slots=True)
class _Slots(_Numbered):
    """An answer with slots: one `SLOT_RECORD` each."""

    lease: int
    slot_bytes: int
    slots: bytes


@_message(21, DAEMON)
class Granted(_Slots):
    """Answers Acquire: a lease on leading blocks. `stored`: see Found."""

    stored: int = 0


@_message(22, DAEMON)
class Reserved(_Slots):
    """Answers Reserve: the `status` of each key (u8), slots for granted keys, `why` others were denied."""

    status: bytes
    why: str


@_message(8)
class Commit(_Numbered):
    """Commits a reservation: a u64 checksum and a byte (1: slot filled) for each granted key."""

    lease: int
    checksums: bytes
    written: bytes

    def validate(self) -> None:
        if len(self.checksums) != 8 * len(self.written):
            raise RemoteProtocolError(
                f"{len(self.checksums)} bytes of checksums for {len(self.written)} blocks"
            )


@_message(9)
class Abort:
    """Ends a reservation. Its slots are freed."""

    lease: int


@_message(10)
class Release:
    """Ends a lease. The reader did not use the last `unused` blocks; `corrupt` of them were corrupt."""

    lease: int
    unused: int = 0
    corrupt: int = 0


# -- shared memory


@_message(16)
class Map(_Numbered):
    """Asks for the descriptor of an extent. Answered by Mapped.

    Extents of GPU memory have numbers from `HBM_EXTENTS` on. They are answered by MappedHbm.
    """

    extent: int
    writable: bool


@_message(17, DAEMON)
class Mapped(_Numbered):
    """`extent_bytes` is the length of the extent. Its file descriptor is passed with this frame."""

    extent_bytes: int


@_message(37, DAEMON)
class MappedHbm(_Numbered):
    """`extent_bytes` on the GPU `device`. `handle` (CUDA IPC) opens them for reading and writing."""

    extent_bytes: int
    device: str
    handle: bytes


@_message(41)
class MapPresence(_Numbered):
    """Asks for a namespace's presence table. Answered by MappedPresence. Since version 12."""

    namespace: int


@_message(42, DAEMON)
class MappedPresence(_Numbered):
    """`table_bytes` is the length of the table. Its descriptor is passed with this frame. Since version 12.

    0: there is none now, and no descriptor. `foreign`: the namespace is another tenant's. `network`: keys
    that are not in the table may be on the network. `slot_bytes`: the size of the slots in DRAM.
    """

    table_bytes: int
    foreign: bool
    network: bool
    slot_bytes: int


@_message(43)
class LookedUp:
    """Reports lookups that a presence table has answered, for the hit ratio. Since version 12.

    `asks`: blocks of prompts that were requested for the first time. `found`: a u32 for each tier by number,
    how many stored blocks were found there that were not counted as found before.
    """

    namespace: int
    asks: int
    found: bytes

    def validate(self) -> None:
        if len(self.found) % 4 or len(self.found) > 4 * MOST_TIERS:
            raise RemoteProtocolError(f"{len(self.found)} bytes of blocks found", "a u32 for each tier")


@_message(44)
class BlocksRead:
    """Reports blocks that were read from DRAM without a request, as a use of them. Since version 12.

    `keys`: each key once, the first read first. `blocks`: how many blocks were read, with repetitions.
    """

    namespace: int
    key_bytes: int
    keys: bytes
    blocks: int

    def validate(self) -> None:
        _check_keys(self.key_bytes, self.keys)


# -- traces


@_message(45)
class TraceContext:
    """Names the span that caused the next message, which has the number `request`. Since version 13.

    Sent only for sampled spans. `trace`: 16 bytes, `span`: 8 bytes, `flags`: 1 byte, as in W3C Trace Context.
    A daemon ignores other values, because no request may fail for its trace, and all if it exports no traces.
    """

    request: int
    trace: bytes
    span: bytes
    flags: int


# -- operators


@_message(2)
class Ping(_Numbered):
    """Answered by Value(0)."""


@_message(18)
class Status(_Numbered):
    """Asks for the state of the daemon, as `kvstore status` shows it. Answered by Report."""


@_message(36)
class Control(_Numbered):
    """Runs a command for operators: see `daemon.operator`. Answered by Report or Value."""

    call: str
    arguments: dict[str, Any]


@_message(33)
class RecordStart(_Numbered):
    """Records requests for `seconds`, in at most `max_bytes` of memory. For operators; answered by Value(0).

    The recording ends with the connection at the latest.
    """

    seconds: float
    max_bytes: int


@_message(34)
class RecordRead(_Numbered):
    """Asks for the requests recorded since the last RecordRead. Answered by Recorded."""


@_message(35, DAEMON)
class Recorded(_Numbered):
    """Some recorded requests, each a `REQUEST_RECORD` and the hashes of its keys (u64).

    `dropped`: the number of requests so far that did not fit into memory. `ended`: the recording is complete.
    """

    requests: bytes
    dropped: int
    ended: bool


ALL = tuple(_CLASSES[tag] for tag in range(len(_CLASSES)))
"""All messages, in the order of their tags."""
SENDERS = tuple(_SENDERS[tag] for tag in range(len(_CLASSES)))
"""The side that sends each message: CLIENT or DAEMON."""


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


class _Codec:
    """Packs and checks one message class."""

    def __init__(self, tag: int, cls: type) -> None:
        hints = get_type_hints(cls)
        self.tag = tag
        self.cls = cls
        self.names = tuple(f.name for f in fields(cls))
        self.values = attrgetter("__class__", *self.names)
        # `dict[str, Any]` must be a `dict`.
        plain = (getattr(hints[name], "__origin__", hints[name]) for name in self.names)
        self.types: tuple[type, ...] = (int, *plain)
        self.numbers = tuple(i for i, wanted in enumerate(self.types) if wanted in (int, float))
        self.validate = getattr(cls, "validate", None)
        self.since = tuple(f.metadata.get("since", OLDEST) for f in fields(cls))
        self.newest = max(self.since, default=OLDEST)
        self._defaults = tuple(f.default for f in fields(cls))
        self._older = {self.fields_at(version) for version in range(OLDEST, VERSION)}

    def fields_at(self, version: int) -> int:
        """Returns the number of fields that the message has in a version."""
        return sum(since <= version for since in self.since)

    def complete(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """Adds the defaults of the fields that an older peer does not send."""
        n = len(items) - 1
        return items + self._defaults[n:] if n in self._older else items

    def check(self, items: tuple[Any, ...]) -> None:
        """Raises RemoteProtocolError for a field of the wrong type, or a negative or infinite number."""
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
    """Encodes a message in a version of the wire. Raises LocalProtocolError for bad values."""
    codec = _BY_CLASS[type(message)]
    values = codec.values(message)[1:]
    if version < codec.newest:
        values = values[: codec.fields_at(version)]
    try:
        packed: bytes = msgpack.packb((codec.tag, *values), buf_size=PACKER_BYTES)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{codec.cls.__name__} cannot be sent: {error}") from None
    return packed


class _Counted:
    """Counts the values in all lists and maps of one message. Raises ValueError above `most`."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def __call__(self, container: Any) -> Any:
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {self._most} values in lists and maps")
        return container


def decode(data: bytes | bytearray | memoryview, **bounds: Any) -> Any:
    """Returns the message in one frame. Raises RemoteProtocolError. `bounds`: see `msgpack.unpackb`."""
    try:
        items = msgpack.unpackb(data, use_list=False, **bounds)
    except Exception as error:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes is not MessagePack: {error}"[:200]) from None
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


def decode_request(data: bytes | bytearray | memoryview, most_values: int = MOST_VALUES) -> Any:
    """Decodes a message of an untrusted peer: few values, so that decoding is quick at any size.

    Raises RemoteProtocolError also for a list or map of more than `LONGEST` values, and for more than
    `most_values` in all lists and maps together.
    """
    count = _Counted(most_values) if len(data) > _SHORT_BYTES else None
    return decode(
        data, max_ext_len=0, max_array_len=LONGEST, max_map_len=LONGEST, list_hook=count, object_hook=count
    )
