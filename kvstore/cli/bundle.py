"""The command that collects what a report of a problem needs."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvstore import Client
from kvstore import config as configuration
from kvstore.cli.shared.options import DEFAULT_SOCKET, ConfigOption, JsonOption, SocketOption, url_of
from kvstore.cli.shared.output import pairs, show
from kvstore.errors import KVStoreError, MisuseError, UnavailableError

_ASKED = ("status", "settings", "figures", "devices", "policy", "tenants", "namespaces", "transfers")
"""Operator commands without arguments whose answers are collected: the first page each."""

_SECRET = ("hash", "token", "tokens", "password")
_SECRET_IN_URL = re.compile(
    r"""(?P<user>://)[^/\s@"']+@|(?P<option>[?&][\w-]*(?:key|secret|token|password|sig)[\w-]*=)[^&\s"']*""",
    re.IGNORECASE,
)
_LOG_LINES = 5000
_EVENTS = 5000
_DEADLINE_S = 10.0
_JOURNAL = ("journalctl", "--unit=kvstore*", f"--lines={_LOG_LINES}", "--no-pager", "--output=short-iso")


def bundle(
    file: Annotated[Path | None, Argument(help="The archive. Default: kvstore-bundle-TIME.tar.gz.")] = None,
    *,
    config: ConfigOption = None,
    socket: SocketOption = DEFAULT_SOCKET,
    log: Annotated[Path | None, Option("--log", help="The daemon's log. Default: the journal.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Collect what a report of a problem needs into one archive.

    It has the configuration without hashes of tokens, the daemon's status, settings, figures, devices,
    namespaces, tenants, running transfers and latest events, the findings of doctor, versions, memory, and
    the end of the log. It has no blocks. Instead of a part that cannot be had, it has the error.

    Example: kvstore bundle report.tar.gz -c /etc/kvstore/kvstore.toml
    """
    file = file or Path(time.strftime("kvstore-bundle-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    if file.exists():
        raise MisuseError(f"{file} exists", "name another file")
    parts: dict[str, int] = {}
    errors: dict[str, str] = {}
    # The configuration and the log are the operator's alone.
    with (
        os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as raw,
        tarfile.open(fileobj=raw, mode="w:gz") as archive,
    ):
        for name, get in _parts(config, url_of(socket), log):
            try:
                data = get()
            except (KVStoreError, OSError, subprocess.SubprocessError) as error:
                data, errors[name] = f"{type(error).__name__}: {error}\n", str(error)
            _add(archive, name, data)
            parts[name] = len(data)
    values = {"file": str(file), "bytes": file.stat().st_size, "parts": parts, "errors": errors}
    show(values, as_json, lambda: pairs("bundle", {"file": file, **parts, **errors}))


def _parts(config: Path | None, url: str, log: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each file of the archive, and the function that returns its text."""
    yield "versions.json", _versions
    yield "machine.txt", _machine
    yield "config.json", lambda: _json(without_secrets(configuration.load(config).model_dump(mode="json")))
    yield "doctor.json", lambda: _doctor(config)
    yield "log.txt", lambda: _journal() if log is None else _tail(log)
    daemon = _Daemon(url)
    for call in _ASKED:
        yield f"{call}.json", partial(daemon.ask, partial(_answer, call))
    yield "events.json", partial(daemon.ask, _latest_events)


def without_secrets(values: Any) -> Any:
    """Returns a configuration in which tokens, their hashes and passwords are replaced by their number."""
    if isinstance(values, dict):
        return {
            name: _hidden(value) if name in _SECRET else without_secrets(value)
            for name, value in values.items()
        }
    return [without_secrets(value) for value in values] if isinstance(values, (list, tuple)) else values


def _hidden(value: Any) -> str:
    return f"{len(value)} hidden" if isinstance(value, (list, tuple, dict)) else "hidden"


class _Daemon:
    """Answers operator commands. A daemon that did not answer one is not asked again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._error: UnavailableError | None = None

    def ask(self, get: Callable[[Client], dict[str, Any]]) -> str:
        """Returns what `get` returns as JSON, without secrets. Raises UnavailableError, DeniedError."""
        if self._error is not None:
            raise self._error
        try:
            with Client(self._url, deadline_s=_DEADLINE_S, strict=True) as client:
                return _json(without_secrets(get(client)))
        except UnavailableError as error:
            self._error = error
            raise


def _answer(call: str, client: Client) -> dict[str, Any]:
    return client.control(call)


def _latest_events(client: Client) -> dict[str, Any]:
    """Returns the latest events as one page."""
    events: list[dict[str, Any]] = []
    after, more = -_EVENTS, True
    while more and len(events) < _EVENTS:
        page = client.control("events", after=after)
        events += page["events"]
        after, more = page["next"], page["next"] != after
    return page | {"events": events}


def _versions() -> str:
    installed = {each.name: each.version for each in distributions()}
    return _json({"kvstore": version("kvstore"), "python": platform.python_version(), "packages": installed})


def _machine() -> str:
    texts = [" ".join(platform.uname()), f"{os.cpu_count()} cores"]
    for name in ("meminfo", "loadavg", "mounts"):
        texts.append(Path("/proc", name).read_text(encoding="utf-8"))
    return "\n".join(texts)


def _doctor(config: Path | None) -> str:
    from kvstore.daemon.doctor import examine  # noqa: PLC0415

    return _json([asdict(line) for line in examine(configuration.load(config))])


def _journal() -> str:
    return subprocess.run(_JOURNAL, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout


def _tail(log: Path) -> str:
    return "".join(log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-_LOG_LINES:])


def _json(values: Any) -> str:
    return json.dumps(values, indent=1, sort_keys=True, default=str) + "\n"


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Adds a file, without users, passwords and keys in URLs."""
    data = _SECRET_IN_URL.sub(_without_secret, text).encode()
    entry = tarfile.TarInfo(f"kvstore-bundle/{name}")
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))


def _without_secret(match: re.Match[str]) -> str:
    return f"{match['user']}hidden@" if match["user"] else f"{match['option']}hidden"
