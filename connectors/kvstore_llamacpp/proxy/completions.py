"""Restores the slot of a completion before it, and stores it afterwards."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore import Key
from kvstore_llamacpp.blocks import common_prefix
from kvstore_llamacpp.proxy.figures import Figures
from kvstore_llamacpp.proxy.llama_server.http_client import Headers, NoAnswerError, ask
from kvstore_llamacpp.proxy.prompts import Prompt
from kvstore_llamacpp.proxy.rates import Rates
from kvstore_llamacpp.proxy.slots import NO_TOKENS, Slot, SlotPool, Tokens
from kvstore_llamacpp.proxy.store import SlotStore

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_JSON = (b"content-type", b"application/json")
_TIMINGS = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')
_ACTION_S = 60.0
_TOKENS_S = 10.0
_CLOSE_S = 5.0
_MOST_THREADS = 16


class Completions:
    """The slots of one llama-server and the blocks of its namespace.

    `cells`: the tokens that all slots may have together. No method raises for a failure of the store.
    """

    def __init__(
        self, port: int, folder: Path, pool: SlotPool, store: SlotStore, rates: Rates, cells: int
    ) -> None:
        self.figures = Figures()
        self._port = port
        self._folder = folder
        self._pool = pool
        self._store = store
        self._rates = rates
        self._cells = cells
        self._threads = ThreadPoolExecutor(min(len(pool.slots) + 1, _MOST_THREADS), "kvstore-slots")
        self._keeping: set[asyncio.Task[None]] = set()

    def status(self) -> dict[str, Any]:
        """Returns the figures, rates and state, as plain values."""
        return self.figures.to_map(
            slots=len(self._pool.slots),
            free_slots=sum(not slot.busy for slot in self._pool.slots),
            waiting=self._pool.waiting,
            failures=self._store.failures,
            evaluated_tokens_per_s=round(self._rates.tokens_per_s, 1),
            loaded_bytes_per_s=round(self._rates.bytes_per_s),
        )

    # -- before

    async def tokens(self, prompt: Prompt, raw: bytes, credentials: Headers) -> Tokens | None:
        """Returns the tokens that llama-server will evaluate; None if it does not tell, or they don't fit."""
        found: list[int] | None = prompt.tokens
        if found is None:
            content = prompt.content
            if prompt.is_chat:
                content = (await self._asked(b"/apply-template", credentials, raw)).get("prompt")
            if content is None:
                return None
            body = {"content": content, "add_special": True, "parse_special": True}
            said = await self._asked(b"/tokenize", credentials, json.dumps(body).encode())
            found = said.get("tokens")
        return np.array(found, np.int32) if found and len(found) < self._cells else None

    async def take(self, tokens: Tokens | None) -> Slot:
        """Returns a slot, see `SlotPool.take`."""
        try:
            slot = await self._pool.take(NO_TOKENS if tokens is None else tokens)
        except Exception:
            self.figures.turned_away += 1
            raise
        self.figures.requests += 1
        self.figures.read_requests += tokens is not None
        return slot

    async def restore(self, slot: Slot, tokens: Tokens, credentials: Headers) -> int:
        """Gives a slot the longest stored prefix, if it is longer than what it has, and worth loading.

        Returns the number of tokens from the store; 0 if the slot is as before, or empty.
        """
        size, held = self._store.block_tokens, common_prefix(slot.tokens, tokens)
        if len(tokens) - held < size or self._store.away:
            return 0
        keys, found = await self._run(self._find, tokens)
        if found * size - held < size:
            return 0
        if not self._rates.is_worth(found * self._store.block_bytes, found * size - held):
            self.figures.slow_loads += 1
            return 0
        return await self._load(slot, keys[:found], tokens, held, credentials)

    def _find(self, tokens: Tokens) -> tuple[list[Key], int]:
        keys = self._store.keys(tokens)
        return keys, self._store.find(keys, prompt=len(keys))

    async def _load(
        self, slot: Slot, keys: list[Key], tokens: Tokens, held: int, credentials: Headers
    ) -> int:
        path, started_s = self._folder / f"load-{slot.number}", time.monotonic()
        try:
            n = await self._run(self._store.load, keys, tokens.tolist(), path)
            if n <= held:
                return 0
            await self._make_room(slot, n, credentials)
            # Unless llama-server tells that it has the tokens, the slot is empty or unknown.
            slot.tokens = NO_TOKENS
            said = await self._act(slot, "restore", path.name, credentials)
            if said.get("n_restored") != n:
                self.figures.refused_restores += 1
                return 0
        finally:
            path.unlink(missing_ok=True)
        slot.tokens = tokens[:n]
        self._rates.note_loaded(
            n // self._store.block_tokens * self._store.block_bytes, time.monotonic() - started_s
        )
        self.figures.restored_requests += 1
        self.figures.restored_tokens += n
        return n

    async def _make_room(self, slot: Slot, n: int, credentials: Headers) -> None:
        """Empties idle slots: llama-server does so for evaluated tokens, but not for restored ones."""
        while sum(len(each.tokens) for each in self._pool.slots if each is not slot) + n > self._cells:
            idle = self._pool.take_idle()
            if idle is None:
                return
            try:
                idle.tokens = NO_TOKENS
                await self._act(idle, "erase", "", credentials)
            finally:
                self._pool.give_back(idle)

    # -- afterwards

    def keep(self, slot: Slot, tokens: Tokens, tail: bytes, credentials: Headers) -> None:
        """Stores what is new in a slot after an answer, and gives it back. Does not wait.

        `tail` is the end of the answer.
        """
        slot.tokens = tokens
        task = asyncio.ensure_future(self._keep(slot, tokens, _timings(tail), credentials))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(
        self, slot: Slot, tokens: Tokens, timings: dict[str, Any] | None, credentials: Headers
    ) -> None:
        try:
            total = None
            if timings is not None:
                self._rates.note_evaluated(timings["prompt_n"], timings["prompt_ms"] / 1000)
                # The last sampled token was not evaluated.
                total = timings["cache_n"] + timings["prompt_n"] + max(0, timings["predicted_n"] - 1)
            if not self._store.paused and not await self._run(self._is_stored, tokens, total):
                await self._save(slot, credentials)
        except Exception:
            _logger.exception("a slot was not stored")
        finally:
            self._pool.give_back(slot)

    def _is_stored(self, tokens: Tokens, total: int | None) -> bool:
        """Returns whether all blocks of a slot of `total` tokens, which begin with these, are stored."""
        size = self._store.block_tokens
        if total is None or total // size > len(tokens) // size:
            return False
        keys = self._store.keys(tokens[: total // size * size])
        return not keys or self._store.find(keys) == len(keys)

    async def _save(self, slot: Slot, credentials: Headers) -> None:
        path = self._folder / f"save-{slot.number}"
        slot.tokens = NO_TOKENS
        try:
            said = await self._act(slot, "save", path.name, credentials)
            if not said.get("n_saved"):
                self.figures.unsaved += 1
                return
            stored = await self._run(self._store.save, path, slot.number)
        finally:
            path.unlink(missing_ok=True)
        slot.tokens = stored.tokens
        self.figures.saved += 1
        self.figures.stored_blocks += stored.stored
        self.figures.present_blocks += stored.present
        self.figures.denied_blocks += stored.denied

    def give_back(self, slot: Slot) -> None:
        """Ends the use of a slot without a store."""
        self._pool.give_back(slot)

    def forget(self) -> None:
        """Notes that any slot may have other tokens."""
        self._pool.forget()

    async def close(self) -> None:
        """Waits for the stores that have begun, up to 5 s."""
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=_CLOSE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- llama-server

    async def _act(self, slot: Slot, action: str, name: str, credentials: Headers) -> dict[str, Any]:
        """Returns llama-server's answer to an action on a slot; nothing if it refuses."""
        target = f"/slots/{slot.number}?action={action}".encode()
        return await self._asked(target, credentials, json.dumps({"filename": name}).encode(), _ACTION_S)

    async def _asked(
        self, target: bytes, credentials: Headers, body: bytes, timeout_s: float = _TOKENS_S
    ) -> dict[str, Any]:
        with suppress(NoAnswerError, ValueError):
            status, answer = await ask(self._port, b"POST", target, [*credentials, _JSON], body, timeout_s)
            said = json.loads(answer)
            if status == 200 and isinstance(said, dict):
                return said
            _logger.debug("llama-server answers %s with %d: %.300r", target.decode(), status, answer)
        return {}

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Runs a call in a thread. Waits for its end even if cancelled: its file must be removed after it."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _timings(tail: bytes) -> dict[str, Any] | None:
    """Returns the last timings in an answer. In a text of the model, their quotes would be escaped."""
    found: Sequence[bytes] = _TIMINGS.findall(tail)
    if not found:
        return None
    try:
        said = json.loads(found[-1])
    except ValueError:
        return None
    names = ("cache_n", "prompt_n", "prompt_ms", "predicted_n")
    return said if all(isinstance(said.get(name), int | float) for name in names) else None
