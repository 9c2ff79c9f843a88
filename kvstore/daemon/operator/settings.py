"""The configuration of the running daemon: read again, or changed and kept. One change at a time.

Files are read, validated and written on threads, because this would delay the event loop. How a configuration
is applied to the daemon is not covered here: see `reload`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.config import Config, Source, Values, changes, etag, keep_changes, merged, plain, read
from kvstore.core.policy import POLICIES, find
from kvstore.daemon.operator.command import command
from kvstore.daemon.operator.devices import close_all
from kvstore.daemon.operator.reload import Reload
from kvstore.errors import ConfigError, MisuseError

_log = logging.getLogger(__name__)


class LiveConfig:
    """The configuration in use, and its source."""

    applier: Reload
    """Checks and applies changes. Set when the daemon is built."""

    def __init__(self, path: Path | None, chosen: Source | None = None) -> None:
        """Reads the configuration at `path`. Without a path, uses `chosen`. Raises ConfigError."""
        self._path = path
        self._chosen = chosen or Source()
        self._source = self._read()
        self.config = _checked(self._source)
        self._lock = asyncio.Lock()

    def _read(self) -> Source:
        return self._chosen if self._path is None else read(self._path)

    @command
    async def settings(self, part: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the value of a part of the configuration, its ETag, and all changes to the file.

        `part` names nested tables, empty for everything. The value of an absent part is None.
        """
        return await asyncio.to_thread(_shown, self._source, part)

    @command
    async def reload(self) -> dict[str, Any]:
        """Reads the files again. Returns changed keys, and keys that need a restart. Raises ConfigError."""
        async with self._lock:
            source = await asyncio.to_thread(self._read)
            if source.kept_in is None:
                source = replace(source, changes=self._source.changes)
            config = await asyncio.to_thread(_checked, source)
            changed, fixed = changes(self.config, config)
            await self._take(source, config, changed)
        _log.info("reloaded: %s", ", ".join(changed) or "nothing has changed")
        if fixed:
            _log.warning("needs a restart: %s", ", ".join(fixed))
        return {"changed": changed, "needs_restart": fixed}

    @command
    async def change(
        self, patch: Values, part: tuple[str, ...] = (), expected: str = "", dry_run: bool = False
    ) -> dict[str, Any]:
        """Applies a merge patch to a part and keeps it, if `expected` is the part's ETag, "*" or "".

        Returns the changes, the consequences, and the part's new ETag; with another ETag, only `is_now`, the
        part's ETag. Raises ConfigError or MisuseError for an invalid change, and changes nothing. Imports no
        eviction policy that the file does not name, and none on a dry run.
        """
        async with self._lock:
            is_now, source, will_be = await asyncio.to_thread(_patched, self._source, patch, part)
            if expected not in ("", "*", is_now):
                return {"is_now": is_now}
            known = source.file_policy, self.config.policy.eviction
            config = await asyncio.to_thread(_checked, source, known, imports=not dry_run)
            changed, fixed = changes(self.config, config, admin=True)
            if fixed:
                hint = "edit the file, and restart the daemon"
                raise MisuseError(f"this can't change while the daemon runs: {', '.join(fixed)}", hint)
            consequences = self.applier.consequences(config)
            if not dry_run:
                await self._take(source, config, changed, keep=True)
                _log.info("changed: %s", ", ".join(changed) or "nothing")
        kept = source.kept_in is not None
        return {"changed": changed, "etag": will_be, "kept": kept, "consequences": consequences}

    async def _keep(self, source: Source) -> None:
        if source.kept_in is not None:
            await asyncio.to_thread(keep_changes, source.kept_in, source.changes)

    async def _take(self, source: Source, config: Config, changed: list[str], keep: bool = False) -> None:
        """Applies a configuration, all of it or nothing. With `keep`, its changes are written first."""
        self.applier.consequences(config)
        opened = await asyncio.to_thread(self.applier.opener(config))
        kept = False
        try:
            if keep:
                await self._keep(source)
                kept = True
            self.applier.apply(config, changed, opened)
        except BaseException:
            await asyncio.to_thread(close_all, opened)
            if kept:
                await self._keep(self._source)
            raise
        self._source, self.config = source, config


def _checked(source: Source, known: Container[str] | None = None, imports: bool = True) -> Config:
    """Returns the configuration. Raises ConfigError if it is invalid or its eviction policy is unknown.

    A policy that is not built in must be in `known` (None: any), because importing it runs its code.
    """
    config = source.config()
    name = config.policy.eviction
    if ":" in name and known is not None:
        if name not in known:
            hint = f"name it in the configuration file and reload, or set one of {', '.join(POLICIES)}"
            raise ConfigError(f"policy.eviction: {name!r:.120} is not built in", hint)
        if not imports:
            return config
    try:
        find(name)
    except MisuseError as error:
        raise ConfigError(f"{source.name}: policy.eviction: {error.message}", error.hint) from error
    return config


def _patched(source: Source, patch: Values, part: tuple[str, ...]) -> tuple[str, Source, str]:
    """Returns a part's ETag, the source with a merge patch applied, and the part's ETag after that."""
    before = source.effective
    after = merged(before, patch)
    return etag(_part(before, part)), source.changed(after), etag(_part(after, part))


def _shown(source: Source, part: tuple[str, ...]) -> dict[str, Any]:
    value = _part(source.effective, part)
    return {"value": plain(value), "etag": etag(value), "changes": plain(source.changes)}


def _part(values: Values, part: tuple[str, ...]) -> Any:
    found: Any = values
    for name in part:
        found = found.get(name) if isinstance(found, dict) else None
    return found
