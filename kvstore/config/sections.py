"""Sections of the configuration, one frozen class each. See `tenants` and `admin` for the other two.

A new key is a field here and a line in `example`. A field marked `LIVE` can change while the daemon runs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal
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

from kvstore.config.units import GIB, KIB, MIB, Duration, Size, at_least, format_size, parse_write_budget
from kvstore.errors import MisuseError
from kvstore.socket_paths import daemon_socket
from kvstore.types import MAX_KEY_BYTES

FIRST_DEVICE = "nvme"
"""Name of the first NVMe device. `DeviceName` matches names of additional ones."""

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


WriteBudget = Annotated[int | str, AfterValidator(_write_budget)]
Admission = Literal["always", "twice", "reuse"]
DeviceName = Annotated[str, Field(pattern=r"^nvme[a-z0-9_-]{1,28}$")]

FilePath = Annotated[Path, BeforeValidator(_as_path)]
SocketPath = Annotated[FilePath, AfterValidator(_socket_path)]


class Section(BaseModel):
    """Base of sections: frozen, with strict types and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Daemon(Section):
    """The daemon process: its sockets, the time limit of a stop (seconds), its log level.

    `operator_socket`: if set, operators connect there, and peers on `socket` are never operators.
    `changes`: the file that persists changes made while the daemon runs; None: a restart drops them.
    """

    socket: SocketPath = Field(default_factory=daemon_socket)
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    operator_socket: SocketPath | None = None
    stop_timeout: Annotated[Duration, Field(gt=0), LIVE] = 10.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = "info"
    changes: FilePath | None = None

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
    """The DRAM tier in shared memory: its hard limit in bytes, including block headers and rounding."""

    limit: Annotated[Size, at_least(2 * MIB), LIVE] = GIB
    huge_pages: bool = True


class NvmeDevice(Section):
    """An additional NVMe device: its folder, its hard limit in bytes, its write budget per day."""

    path: FilePath
    limit: Annotated[Size, at_least(2 * MIB), LIVE] = 8 * GIB
    write_budget: Annotated[WriteBudget, LIVE] = 0


class Nvme(Section):
    """The NVMe tier: its folder (None: no NVMe tier), its hard limit in bytes, when blocks are written.

    `write_policy`: `write_through` writes blocks on put, `on_evict` when DRAM evicts them.
    `admission`: which blocks are written: `always`; `twice`: on their second use; `reuse`: if the estimated
    probability of reuse is at least `admission_threshold`.
    `write_budget`: bytes per day, or a multiple of the limit such as `"1x"`; 0: no budget.
    `prefetch_blocks`: blocks loaded ahead of a chain that is being loaded; 0: none.
    `devices`: additional devices by name. The device at `path` is called nvme.
    """

    path: FilePath | None = None
    limit: Annotated[Size, at_least(2 * MIB), LIVE] = 8 * GIB
    write_policy: Annotated[Literal["write_through", "on_evict"], LIVE] = "write_through"
    admission: Annotated[Admission, LIVE] = "always"
    admission_threshold: Annotated[float, Field(ge=0, le=1), LIVE] = 0.2
    write_budget: Annotated[WriteBudget, LIVE] = 0
    io_threads: Annotated[int, Field(ge=1, le=256)] = 4
    prefetch_blocks: Annotated[int, Field(ge=0, le=4096), LIVE] = 0
    devices: Annotated[dict[DeviceName, NvmeDevice], Field(max_length=MOST_DEVICES)] = {}

    @field_validator("devices")
    @classmethod
    def _apart(cls, devices: dict[str, NvmeDevice], info: ValidationInfo) -> dict[str, NvmeDevice]:
        first = info.data.get("path")
        if devices and first is None:
            raise MisuseError("there are additional devices but no first one", "set nvme.path")
        folders: dict[Path | None, str] = {first: "nvme.path"}
        for name, device in devices.items():
            if device.path in folders:
                why = f"{device.path} is given twice: {folders[device.path]} and nvme.devices.{name}.path"
                raise MisuseError(why, "each device needs its own folder: remove one of the two")
            folders[device.path] = f"nvme.devices.{name}.path"
        return devices

    @property
    def limits(self) -> dict[str, int]:
        """Hard limits in bytes by device name. The first device is included even without a path."""
        return {FIRST_DEVICE: self.limit} | {name: device.limit for name, device in self.devices.items()}

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
    """Pools of GPU memory, one per GPU: the hard limit of each in bytes (0: no pools), and the GPUs.

    `gpus`: UUIDs, or indices in CUDA's order; None: all GPUs that the daemon sees.
    """

    limit: Annotated[Size, LIVE] = 0
    gpus: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MOST_GPUS)] | None = None

    @field_validator("limit")
    @classmethod
    def _holds_an_extent(cls, limit: int) -> int:
        if 0 < limit < 2 * MIB:
            raise MisuseError(f"{format_size(limit)} is too little", "at least 2MiB, or 0 for no pools")
        return limit


class Network(Section):
    """The network tier: a storage system that many nodes share (`url`; None: no network tier).

    `limit`: bytes that it may hold, enforced by the daemons where the system has no limit itself; 0: none.
    `timeout` (s) bounds each call. `password_file` holds the password or secret key of `user`.
    `credentials` of object stores: `keys` are configured or in the environment; `anonymous`: requests are not
    signed; `instance`: the library asks the cloud's metadata service at a link-local address.
    `threads`: concurrent calls. `hedge_after` (s): a read that takes longer is canceled and repeated once; 0:
    never. `admission`: see Nvme.
    """

    url: str | None = None
    limit: Size = 0
    user: str = ""
    password_file: FilePath | None = None
    credentials: Literal["keys", "anonymous", "instance"] = "keys"
    timeout: Annotated[Duration, Field(ge=0.05, le=60), LIVE] = 2.0
    threads: Annotated[int, Field(ge=1, le=64)] = 8
    hedge_after: Annotated[Duration, Field(ge=0, le=60), LIVE] = 0.0
    admission: Annotated[Admission, LIVE] = "always"
    admission_threshold: Annotated[float, Field(ge=0, le=1), LIVE] = 0.2

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


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class Events(Section):
    """KV events for routers. `listen` publishes events (None: no events), `replay` resends missed ones.

    `node`: name of this node, by default its host name. `tenants`: publishes only blocks of these tenants;
    None: of all.
    """

    listen: Endpoint | None = None
    replay: Endpoint | None = None
    node: Annotated[str, AfterValidator(_node)] | None = None
    tenants: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class Policy(Section):
    """The eviction policy: the name of a built-in one, or `module:Class`."""

    eviction: Annotated[str, LIVE] = "hazard"


class Scrub(Section):
    """The background scrubber: verifies stored blocks at `rate` bytes per second; 0: no scrubbing."""

    rate: Annotated[Size, LIVE] = 16 * MIB


class Limits(Section):
    """Limits on clients: message and batch sizes, connections, leases, namespaces, queued requests."""

    frame_bytes: Annotated[Size, at_least(64 * KIB), Field(le=GIB)] = 4 * MIB
    batch_keys: Annotated[int, Field(ge=16)] = 4096
    connections: Annotated[int, Field(ge=1, le=65536), LIVE] = 1024
    leases_per_connection: Annotated[int, Field(ge=1), LIVE] = 1024
    namespaces: Annotated[int, Field(ge=1, le=65535), LIVE] = 4096
    namespaces_per_tenant: Annotated[int, Field(ge=1, le=65535), LIVE] = 1024
    queued_requests: Annotated[int, Field(ge=1), LIVE] = 1024

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
