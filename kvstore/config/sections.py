"""Sections of the configuration, one frozen class each; tenants have a file of their own."""

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
from kvstore.types import MAX_KEY_BYTES

FIRST_DEVICE = "nvme"
DEVICE_PATTERN = r"^nvme[a-z0-9_-]{1,28}$"
"""What devices besides the first are called."""

MOST_DEVICES = 8
"""Devices besides the first."""

MOST_GPUS = 7
"""Pools of GPU memory that one daemon may have: with all devices they are tiers that the core tells apart."""

SOCKET_PATH_BYTES = 107
"""The longest Unix socket path that the kernel takes, in bytes."""


def as_path(value: object) -> Path:
    """The path that a string names. Raises MisuseError for what names none."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise MisuseError(f"{value!r:.80} is not a path", "a string that names a file or folder")
    return Path(value)


def _socket_path(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise MisuseError(
            f"the path is {length} bytes long: {str(path)!r:.160}",
            f"the kernel takes at most {SOCKET_PATH_BYTES} bytes for a socket: use a shorter folder",
        )
    return path


def _write_budget(value: int | str) -> int | str:
    parse_write_budget(value, 1)
    return value


WriteBudget = Annotated[int | str, AfterValidator(_write_budget)]
DeviceName = Annotated[str, Field(pattern=DEVICE_PATTERN)]

SocketPath = Annotated[Path, BeforeValidator(as_path), AfterValidator(_socket_path)]


class Section(BaseModel):
    """A table of the configuration: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Daemon(Section):
    """The process: its socket, how long a stop may take (seconds), how much it logs.

    `operator_socket`: where operators connect, and nobody is one on `socket`; None: they are on that one.
    `changes`: the file that keeps what is changed while it runs; None: such changes end with the daemon.
    """

    socket: SocketPath = Path("/run/kvstore/kvstore.sock")
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    operator_socket: SocketPath | None = None
    stop_timeout: Annotated[Duration, Field(gt=0)] = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    changes: Annotated[Path, BeforeValidator(as_path)] | None = None

    @field_validator("operator_socket")
    @classmethod
    def _apart(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and path == info.data.get("socket"):
            raise MisuseError("it is daemon.socket too", "a path of its own, in a folder for operators")
        return path

    @property
    def for_operators(self) -> Path:
        """The socket on which an operator is one."""
        return self.operator_socket or self.socket


class Dram(Section):
    """The shared-memory tier: its hard limit in bytes, headers and rounding included."""

    limit: Annotated[Size, at_least(2 * MIB)] = GIB
    huge_pages: bool = True


class NvmeDevice(Section):
    """A device more in the disk tier: a folder on it, its hard limit in bytes, what may be written a day."""

    path: Annotated[Path, BeforeValidator(as_path)]
    limit: Annotated[Size, at_least(2 * MIB)] = 8 * GIB
    write_budget: WriteBudget = 0


class Nvme(Section):
    """The disk tier: a folder (None = no such tier), its hard limit in bytes, when blocks go there.

    `admission`: which go there: always; twice: what was used again; reuse: P(used again) >= the threshold.
    `write_budget`: bytes a day, or times the limit as in `"1x"`; 0: no bound.
    `prefetch_blocks`: how many blocks come up unasked behind those of a chain that are loaded; 0: none.
    `devices`: more of them, by name; the one at `path` is called nvme.
    """

    path: Annotated[Path, BeforeValidator(as_path)] | None = None
    limit: Annotated[Size, at_least(2 * MIB)] = 8 * GIB
    write_policy: Literal["write_through", "on_evict"] = "write_through"
    admission: Literal["always", "twice", "reuse"] = "always"
    admission_threshold: Annotated[float, Field(ge=0, le=1)] = 0.2
    write_budget: WriteBudget = 0
    io_threads: Annotated[int, Field(ge=1, le=256)] = 4
    prefetch_blocks: Annotated[int, Field(ge=0, le=4096)] = 0
    devices: Annotated[dict[DeviceName, NvmeDevice], Field(max_length=MOST_DEVICES)] = {}

    @field_validator("devices")
    @classmethod
    def _apart(cls, devices: dict[str, NvmeDevice], info: ValidationInfo) -> dict[str, NvmeDevice]:
        first = info.data.get("path")
        if devices and first is None:
            raise MisuseError("there are more devices, and no first one", "set nvme.path")
        folders: dict[Path | None, str] = {first: "nvme.path"}
        for name, device in devices.items():
            if device.path in folders:
                why = f"{device.path} is given twice: {folders[device.path]} and nvme.devices.{name}.path"
                raise MisuseError(why, "a folder is one device: leave one of them out")
            folders[device.path] = f"nvme.devices.{name}.path"
        return devices

    @property
    def limits(self) -> dict[str, int]:
        """The hard limit of every device, by name, in bytes; the first one's whether there is one or not."""
        return {FIRST_DEVICE: self.limit} | {name: device.limit for name, device in self.devices.items()}

    @property
    def paths(self) -> dict[str, Path]:
        """The folder of every device, by name."""
        first = {} if self.path is None else {FIRST_DEVICE: self.path}
        return first | {name: device.path for name, device in self.devices.items()}

    def bytes_a_day(self, name: str) -> int:
        """What may be written to a device a day; 0: no bound."""
        device = self.devices.get(name, self)
        return parse_write_budget(device.write_budget, device.limit)


class Hbm(Section):
    """Pools of GPU memory, one a GPU: the hard limit of each in bytes (0: none), and of which GPUs.

    `gpus`: UUIDs, or numbers as CUDA counts them; None: all that the daemon sees.
    """

    limit: Size = 0
    gpus: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MOST_GPUS)] | None = None

    @field_validator("limit")
    @classmethod
    def _holds_an_extent(cls, limit: int) -> int:
        if 0 < limit < 2 * MIB:
            raise MisuseError(f"{format_size(limit)} is too little", "at least 2MiB, or 0 for no such tier")
        return limit


class Network(Section):
    """The system that many nodes share (None: no such tier), and what goes there.

    `limit`: bytes that it may hold, kept by the daemons together where the system itself keeps to none; 0: no
    limit. `timeout` (s) bounds each call. `password_file` holds the password, or the secret key, of `user`.
    `credentials` of object stores: `keys` are configured or in the environment; `anonymous`: requests are not
    signed; `instance`: the library asks the cloud's metadata service, which has a link-local address.
    `threads`: calls at once. `hedge_after` (s): a read that takes longer is given up and asked once more; 0:
    none is. `admission`: see Nvme.
    """

    url: str | None = None
    limit: Size = 0
    user: str = ""
    password_file: Annotated[Path, BeforeValidator(as_path)] | None = None
    credentials: Literal["keys", "anonymous", "instance"] = "keys"
    timeout: Annotated[Duration, Field(ge=0.05, le=60)] = 2.0
    threads: Annotated[int, Field(ge=1, le=64)] = 8
    hedge_after: Annotated[Duration, Field(ge=0, le=60)] = 0.0
    admission: Literal["always", "twice", "reuse"] = "always"
    admission_threshold: Annotated[float, Field(ge=0, le=1)] = 0.2

    @field_validator("url")
    @classmethod
    def _keeps_secrets_out(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).password:
            raise MisuseError(
                "network.url has a password in it", "set network.user and network.password_file"
            )
        return url


def _endpoint(value: str) -> str:
    if not re.fullmatch(r"(tcp://[^/]+:(\d+|\*)|ipc:///.+)", value):
        raise MisuseError(f"{value!r:.80} is no address", 'such as "tcp://127.0.0.1:5557"')
    return value


def _node(value: str) -> str:
    if "@" in value:
        raise MisuseError(f"{value!r:.80} has an @", "which parts the node from the model")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class Events(Section):
    """KV events for routers: where these connect (None: there are none), where they ask for what they missed.

    `node`: what this one is called, by default its host name; `tenants`: whose blocks, None: everybody's.
    """

    listen: Endpoint | None = None
    replay: Endpoint | None = None
    node: Annotated[str, AfterValidator(_node)] | None = None
    tenants: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class Policy(Section):
    """Who leaves a tier first: the name of an eviction policy, or `module:Class` of one from elsewhere."""

    eviction: str = "hazard"


class Scrub(Section):
    """How many bytes a second are read again to see whether they are still right; 0: none."""

    rate: Size = 16 * MIB


class Limits(Section):
    """What one peer, and all of them together, may ask of the daemon."""

    frame_bytes: Annotated[Size, at_least(64 * KIB), Field(le=GIB)] = 4 * MIB
    batch_keys: Annotated[int, Field(ge=16)] = 4096
    connections: Annotated[int, Field(ge=1, le=65536)] = 1024
    leases_per_connection: Annotated[int, Field(ge=1)] = 1024
    namespaces: Annotated[int, Field(ge=1, le=65535)] = 4096
    namespaces_per_tenant: Annotated[int, Field(ge=1, le=65535)] = 1024
    queued_requests: Annotated[int, Field(ge=1)] = 1024

    @field_validator("batch_keys")
    @classmethod
    def _fits_a_frame(cls, batch_keys: int, info: ValidationInfo) -> int:
        # A batch within the limit must never be refused for the size of its frame. Twice the longest
        # key leaves room for what travels beside each key.
        need = 2 * MAX_KEY_BYTES * batch_keys
        frame_bytes = info.data.get("frame_bytes", need)
        if need > frame_bytes:
            raise MisuseError(
                f"{batch_keys} keys do not fit a frame of {format_size(frame_bytes)}",
                f"raise limits.frame_bytes to {need}, or ask for {frame_bytes // (2 * MAX_KEY_BYTES)} keys",
            )
        return batch_keys
