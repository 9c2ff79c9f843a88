"""Reads what a request wants evaluated, and names the slot in it.

Requests with one prompt of text or tokens are served from the store. Others, with several prompts, several
answers or images, are passed on as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_COMPLETIONS = ("/completion", "/completions", "/v1/completions")
_CHATS = ("/chat/completions", "/v1/chat/completions")
_OTHERS = ("/infill", "/responses", "/v1/responses", "/v1/messages")
SLOT_PATHS = frozenset((*_COMPLETIONS, *_CHATS, *_OTHERS))
"""Paths whose requests take a slot of llama-server."""

_MOST_ID = 1 << 31


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request wants evaluated: `tokens`, or `content` to be tokenised, or the messages of a chat.

    `caches`: whether the caller lets llama-server use tokens of the slot. `more`: fields to add to the body.
    """

    tokens: list[int] | None
    content: Any
    caches: bool
    more: bytes

    @property
    def is_chat(self) -> bool:
        """Whether the template of the model must be applied first."""
        return self.tokens is None and self.content is None

    def body(self, raw: bytes, slot: int) -> bytes:
        """Returns the body of the request with a slot. Of fields with one name, the last one counts."""
        return raw.rstrip()[:-1] + b',"id_slot":%d' % slot + self.more + b"}"


def read_prompt(path: str, raw: bytes) -> Prompt | None:
    """Returns the prompt of a request to a path of SLOT_PATHS; None unless it has exactly one."""
    data = _object(raw)
    if data is None or path in _OTHERS or _answers(data) != 1:
        return None
    # Reused chunks are moved KV, which is not that of its prefix.
    more = b',"n_cache_reuse":0' if "n_cache_reuse" in data else b""
    if "cache_prompt" not in data:
        more += b',"cache_prompt":true'
    caches = bool(data.get("cache_prompt", True))
    if path in _CHATS:
        return Prompt(None, None, caches, more) if isinstance(data.get("messages"), list) else None
    return _of_completion(data.get("prompt"), caches, more)


def without_reuse(raw: bytes) -> bytes:
    """Returns the body of a request that is passed on, without the reuse of chunks."""
    data = _object(raw)
    return raw.rstrip()[:-1] + b',"n_cache_reuse":0}' if data and "n_cache_reuse" in data else raw


def _of_completion(prompt: Any, caches: bool, more: bytes) -> Prompt | None:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt(None, prompt, caches, more)
    if not isinstance(prompt, list) or not prompt:
        return None
    ids = [_is_id(each) for each in prompt]
    if all(ids):
        return Prompt(prompt, None, caches, more)
    # Tokens and texts are one prompt; texts alone are several.
    if any(ids) and all(is_id or isinstance(each, str) for is_id, each in zip(ids, prompt, strict=True)):
        return Prompt(None, prompt, caches, more)
    return None


def _object(raw: bytes) -> dict[str, Any] | None:
    """Returns a JSON object; None for other bytes, which llama-server will refuse."""
    try:
        data = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data else None


def _answers(data: dict[str, Any]) -> Any:
    return data.get("n_cmpl", data.get("n", 1))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_ID
