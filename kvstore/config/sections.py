"""Sections of the configuration, one frozen class each. See `tenants` and `admin` for the other two.

A new key is a field here. A field marked `LIVE` can change while the daemon runs. The docstring below a field
is its documentation: the first paragraph becomes a comment in `example`, the reference has all of it. A field
without a default has a value to show in `examples`. `keys` reads all of this.
"""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from kvstore.config.units import (
    GIB,
    KIB,
    MIB,
    Duration,
    Notation,
    Size,
    at_least,
    format_size,
    parse_write_budget,
)
from kvstore.errors import MisuseError
from kvstore.socket_paths import daemon_socket
from kvstore.types import MAX_KEY_BYTES

FIRST_DEVICE = "nvme"
"""Name of the NVMe device of `nvme.path`. `DeviceName` matches names of the others."""

MOST_DEVICES = 8
"""Maximum number of additional NVMe devices."""

MOST_GPUS = 7
"""Maximum number of GPU pools. The core has a fixed number of tiers, shared with NVMe devices."""

SOCKET_PATH_BYTES = 107
"""Longest Unix socket path that the kernel accepts, in bytes."""

LIVE = object()
"""Marks a field that a running daemon takes over on a reload or a change. Other keys need a restart."""


def _as_path(value: object) -> Path:
    """Returns the path of a string. Raises MisuseError for other types, empty strings and NUL."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise MisuseError(f"{value!r:.80} is not a path", "a string that names a file or folder")
    return Path(value)


def _socket_path(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise MisuseError(
            f"the path is {length} bytes long: {str(path)!r:.160}",
            f"the kernel accepts at most {SOCKET_PATH_BYTES} bytes for a socket: use a shorter path",
        )
    return path


def _write_budget(value: int | str) -> int | str:
    parse_write_budget(value, 1)
    return value


WriteBudget = Annotated[
    int | str, AfterValidator(_write_budget), Notation('size, or multiple of the limit such as "1x"')
]
Admission = Literal["always", "twice", "reuse"]
DeviceName = Annotated[str, Field(pattern=r"^nvme[a-z0-9_-]{1,28}$")]

FilePath = Annotated[Path, BeforeValidator(_as_path), Notation("path")]
SocketPath = Annotated[
    FilePath, AfterValidator(_socket_path), Notation(f"path of at most {SOCKET_PATH_BYTES} bytes")
]
FILE_MODE = "file mode"
FileMode = Annotated[int, Field(ge=0, le=0o777), Notation(FILE_MODE)]


class Section(BaseModel):
    """Base of sections: frozen, with strict types and no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, defer_build=True
    )


def section_in(annotation: Any) -> type[Section] | None:
    """Returns the section that a field holds: directly, in a list or by name; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := section_in(part))), None)


class Daemon(Section):
    """The daemon process: sockets, stop, log."""

    socket: SocketPath = Field(default_factory=daemon_socket, examples=["/run/kvstore/kvstore.sock"])
    """Unix socket for clients

    The default is for root and for users that may write `/run/kvstore`. Others have
    `$XDG_RUNTIME_DIR/kvstore/kvstore.sock`, or `/tmp/kvstore-UID/kvstore.sock` if that variable is not set.
    """
    socket_mode: FileMode = 0o600
    """File mode of the socket: which users may connect"""
    operator_socket: Annotated[SocketPath | None, Field(examples=["/run/kvstore-operators/kvstore.sock"])] = (
        None
    )
    """Socket for operators; absent: they use `socket`

    If it is set, no peer on `socket` is an operator, not even root.
    """
    stop_timeout: Annotated[Duration, Field(gt=0), LIVE] = 10.0
    """How long a stop waits for running transfers

    A stop writes blocks that only memory holds to lower tiers. Copies that take longer are abandoned. The
    process ends at most 5 s later, even if a device hangs.
    """
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = "info"
    """Least severe messages in the log"""
    log_format: Literal["text", "json"] = "text"
    """Lines of the log: text, or one JSON object each

    An object has `time` (UTC), `level`, `logger`, `message`, `pid` and, for errors in the code, `exception`.
    At an interactive terminal the summary at the start is text in any case.
    """
    changes: Annotated[FilePath | None, Field(examples=["/var/lib/kvstore/changes.json"])] = None
    """File for changes made at run time; absent: a restart drops them

    It is a JSON merge patch of this file. Start and reload read both.
    """

    @field_validator("operator_socket")
    @classmethod
    def _apart(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and path == info.data.get("socket"):
            raise MisuseError(
                "it is the same as daemon.socket", "use another path, in a folder for operators"
            )
        return path

    @property
    def for_operators(self) -> Path:
        """The socket that operators connect to."""
        return self.operator_socket or self.socket


class Dram(Section):
    """The DRAM tier in shared memory."""

    limit: Annotated[Size, at_least(2 * MIB), LIVE] = GIB
    """Hard limit of shared memory

    It includes block headers and rounding. The memory is divided into extents when the daemon starts. A
    higher limit adds extents, up to four times the size at start. A lower limit holds as soon as enough
    extents have been emptied.
    """
    huge_pages: bool = True
    """Use transparent huge pages of 2 MiB where the kernel has them"""


class NvmeDevice(Section):
    """An additional NVMe device. Its name begins with `nvme`.

    At most 8. Devices are added and removed without a restart. The path of a device cannot change.
    """

    path: Annotated[FilePath, Field(examples=["/mnt/nvme1/kvstore"])]
    """Folder on the device"""
    limit: Annotated[Size, at_least(2 * MIB), LIVE] = 8 * GIB
    """Hard limit on the device"""
    write_budget: Annotated[WriteBudget, LIVE] = 0
    """Bytes written per day, as for the first device"""


class Nvme(Section):
    """The NVMe tier: the first device, and the rules for all devices."""

    path: Annotated[FilePath | None, Field(examples=["/var/lib/kvstore"])] = None
    """Folder on the first device; absent: no such device

    Without any device, there is no NVMe tier.
    """
    limit: Annotated[Size, at_least(2 * MIB), LIVE] = 8 * GIB
    """Hard limit of block data on the device

    Slab files of this size are allocated when the daemon starts. Records take about 130 bytes per block in
    addition.
    """
    write_policy: Annotated[Literal["write_through", "on_evict"], LIVE] = "write_through"
    """When blocks are written

    `write_through`: after every put. `on_evict`: when DRAM evicts a block.
    """
    admission: Annotated[Admission, LIVE] = "always"
    """Which blocks are written

    `always`: all. `twice`: blocks that are used a second time. `reuse`: blocks with an estimated probability
    of reuse of at least `admission_threshold`, which are worth at least as much as those that they replace.
    """
    admission_threshold: Annotated[float, Field(ge=0, le=1), LIVE] = 0.2
    """For `reuse`: the smallest probability of reuse

    If `write_budget` is set, the threshold adapts to the budget.
    """
    write_budget: Annotated[WriteBudget, LIVE] = 0
    """Bytes written per day, such as "500GiB" or "1x"; 0: no budget

    `1x` is one drive write per day of `limit`. Bytes written earlier on the same day count after a change.
    """
    io_threads: Annotated[int, Field(ge=1, le=256)] = 4
    """Concurrent reads and writes"""
    prefetch_blocks: Annotated[int, Field(ge=0, le=4096), LIVE] = 0
    """Blocks loaded ahead of a chain that is being loaded; 0: none"""
    devices: Annotated[dict[DeviceName, NvmeDevice], Field(max_length=MOST_DEVICES, examples=["nvme1"])] = {}

    @field_validator("devices")
    @classmethod
    def _apart(cls, devices: dict[str, NvmeDevice], info: ValidationInfo) -> dict[str, NvmeDevice]:
        folders: dict[Path | None, str] = {info.data.get("path"): "nvme.path"}
        for name, device in devices.items():
            if device.path in folders:
                why = f"{device.path} is given twice: {folders[device.path]} and nvme.devices.{name}.path"
                raise MisuseError(why, "each device needs its own folder: remove one of the two")
            folders[device.path] = f"nvme.devices.{name}.path"
        return devices

    @property
    def limits(self) -> dict[str, int]:
        """Hard limits in bytes by device name. Without any device, that of the first one."""
        first = {} if self.path is None and self.devices else {FIRST_DEVICE: self.limit}
        return first | {name: device.limit for name, device in self.devices.items()}

    @property
    def paths(self) -> dict[str, Path]:
        """Folders by device name."""
        first = {} if self.path is None else {FIRST_DEVICE: self.path}
        return first | {name: device.path for name, device in self.devices.items()}

    def bytes_a_day(self, name: str) -> int:
        """Returns the write budget of a device in bytes per day; 0: none."""
        device = self.devices.get(name, self)
        return parse_write_budget(device.write_budget, device.limit)


class Hbm(Section):
    """Pools of GPU memory, one per GPU.

    They need `kvstore[cuda]`.
    """

    limit: Annotated[Size, LIVE] = 0
    """Hard limit per GPU, at least 2MiB; 0: no pools"""
    gpus: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MOST_GPUS)] | None,
        Field(examples=[["GPU-0a1b2c3d-..."]]),
    ] = None
    """GPUs with a pool, by UUID or index; absent: all that the daemon sees"""

    @field_validator("limit")
    @classmethod
    def _holds_an_extent(cls, limit: int) -> int:
        if 0 < limit < 2 * MIB:
            raise MisuseError(f"{format_size(limit)} is too little", "at least 2MiB, or 0 for no pools")
        return limit


class Network(Section):
    """The network tier: a storage system that many nodes share."""

    url: Annotated[str | None, Field(examples=["file:///mnt/lustre/kvstore"])] = None
    """Address of the storage system; absent: no network tier

    One of `file://`, `redis://`, `rediss://`, `unix://`, `s3://`, `gs://`, `az://` and `mooncake://`. It
    contains no password.
    """
    limit: Size = 0
    """Bytes in a shared folder, enforced by all of its daemons; 0: no limit

    Other storage systems have limits of their own.
    """
    user: str = ""
    """User name or access key"""
    password_file: Annotated[FilePath | None, Field(examples=["/etc/kvstore/network-password"])] = None
    """File with the password or secret key"""
    credentials: Literal["keys", "anonymous", "instance"] = "keys"
    """Credentials for object stores

    `keys`: from this section or the environment. `anonymous`: requests are not signed. `instance`: from the
    cloud's metadata service, which is asked in this mode only.
    """
    timeout: Annotated[Duration, Field(ge=0.05, le=60), LIVE] = 2.0
    """Time limit of a call"""
    threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Concurrent calls"""
    hedge_after: Annotated[Duration, Field(ge=0, le=60), LIVE] = 0.0
    """A read that takes longer is canceled and repeated once; 0: never

    It helps if one of several servers can be slow.
    """
    admission: Annotated[Admission, LIVE] = "always"
    """Which blocks are written, as for NVMe"""
    admission_threshold: Annotated[float, Field(ge=0, le=1), LIVE] = 0.2
    """For `reuse`: the smallest probability of reuse"""

    @field_validator("url")
    @classmethod
    def _keeps_secrets_out(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).password:
            raise MisuseError("network.url contains a password", "set network.user and network.password_file")
        return url


def _endpoint(value: str) -> str:
    if not re.fullmatch(r"(tcp://[^/]+:(\d+|\*)|ipc:///.+)", value):
        raise MisuseError(f"{value!r:.80} is not an address", 'such as "tcp://127.0.0.1:5557"')
    return value


def _node(value: str) -> str:
    if "@" in value:
        raise MisuseError(f"{value!r:.80} contains an @", "routers use @ to separate node and model")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint), Notation("address: `tcp://HOST:PORT` or `ipc:///PATH`")]


class Events(Section):
    """KV events for routers.

    They need `kvstore[events]`. Dynamo and llm-d read them.
    """

    listen: Annotated[Endpoint | None, Field(examples=["tcp://127.0.0.1:5557"])] = None
    """Address where routers subscribe; absent: no events

    Events contain the token ids of prompts.
    """
    replay: Annotated[Endpoint | None, Field(examples=["tcp://127.0.0.1:5558"])] = None
    """Address where routers request missed events"""
    node: Annotated[Annotated[str, AfterValidator(_node)] | None, Field(examples=["gpu-7"])] = None
    """Name of this node for routers; absent: its host name"""
    tenants: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | None, Field(examples=[["team-a"]])
    ] = None
    """Tenants whose blocks are published; absent: all"""


def _collector(value: str) -> str:
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise MisuseError(
            f"{value!r:.80} is not the address of a collector", 'such as "http://127.0.0.1:4318"'
        )
    if url.password or url.username:
        raise MisuseError("tracing.collector contains a password", "set OTEL_EXPORTER_OTLP_HEADERS")
    return value.rstrip("/")


class Tracing(Section):
    """Traces of requests.

    They need `kvstore[tracing]`.
    """

    collector: Annotated[
        Annotated[str, AfterValidator(_collector), Notation("address: `http://HOST:PORT`")] | None,
        Field(examples=["http://127.0.0.1:4318"]),
    ] = None
    """OpenTelemetry collector (OTLP over HTTP); absent: no traces

    Spans have the names of tenants, and no keys. Clients choose which of their requests are traced.
    """


class Policy(Section):
    """Eviction."""

    eviction: Annotated[str, LIVE] = "hazard"
    """Eviction policy: hazard, lru, arc, s3fifo, lfuda, gdsf or sieve

    `module:Class` names a policy of your own. Importing a module runs its code, so only this file can name
    one. Without a lower tier, `hazard` also refuses blocks that are worth less than every stored block.
    """


class Scrub(Section):
    """The background scrubber, which verifies stored blocks."""

    rate: Annotated[Size, LIVE] = 16 * MIB
    """Bytes verified per second; 0: no scrubbing"""


class Limits(Section):
    """Limits on clients."""

    frame_bytes: Annotated[Size, at_least(64 * KIB), Field(le=GIB)] = 4 * MIB
    """Longest message

    Before Hello, messages have at most 4 KiB. A message that is incomplete after 10 s ends its connection.
    While several tenants are connected, requests of a tenant above 16 KiB are read at 64 MiB/s at most, after
    the first 8 MiB.
    """
    batch_keys: Annotated[int, Field(ge=16)] = 4096
    """Keys per request; clients split longer calls"""
    connections: Annotated[int, Field(ge=1, le=65536), LIVE] = 1024
    """Open connections

    The last 16, or an eighth if that is fewer, are reserved for operators. With configured tenants, a tenant
    has at most twice as many connections as are left. In addition, at most 256 connections wait for Hello,
    each for 5 s. A user opens at most 200 connections per second after the first 256; 256 more may wait, and
    further ones are closed.
    """
    leases_per_connection: Annotated[int, Field(ge=1), LIVE] = 1024
    """Leases and reservations held by a connection"""
    namespaces: Annotated[int, Field(ge=1, le=65535), LIVE] = 4096
    """Namespaces of the node"""
    namespaces_per_tenant: Annotated[int, Field(ge=1, le=65535), LIVE] = 1024
    """Namespaces of a tenant

    One more closes the oldest namespace without blocks. It is refused if all have blocks or users.
    """
    queued_requests: Annotated[int, Field(ge=1), LIVE] = 1024
    """Queued requests of a tenant; further ones are answered Busy

    It also limits the calls of a tenant that wait for a first block (`wait_s`); further ones are refused.
    """

    @field_validator("batch_keys")
    @classmethod
    def _fits_a_frame(cls, batch_keys: int, info: ValidationInfo) -> int:
        # A batch within the limit must fit a frame. Twice the longest key leaves room for the other
        # fields of each key.
        need = 2 * MAX_KEY_BYTES * batch_keys
        frame_bytes = info.data.get("frame_bytes", need)
        if need > frame_bytes:
            raise MisuseError(
                f"{batch_keys} keys do not fit a frame of {format_size(frame_bytes)}",
                f"raise limits.frame_bytes to {need}, or allow {frame_bytes // (2 * MAX_KEY_BYTES)} keys",
            )
        return batch_keys
