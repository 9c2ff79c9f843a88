"""A short run that proves, with the model and devices at hand, that a slot built of blocks is enough.

It detects what options do not show: state outside the caches, and bytes that a backend does not give back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.errors import MisuseError, UnavailableError
from kvstore_llamacpp import slot_file
from kvstore_llamacpp.proxy.llama_server.http_client import Headers, NoAnswerError, ask
from kvstore_llamacpp.proxy.llama_server.process import LlamaServer
from kvstore_llamacpp.state import Bytes, NewState, State, StateForm

_TOKENS = 24
_PREFIX = 16
_BLOCK = 8
_NAME = "trial"
_WORDS = 10
_HINT = "only models whose state is their KV can be served"
_OTHER_VERSION = "docs/llama-cpp.md names the version that is tested"

_TOLERANCE = 0.3
"""The largest difference of a probability due to rounding: wide enough for a router of experts."""


class Trial:
    """The run. Uses slot 0, which is empty afterwards."""

    def __init__(self, server: LlamaServer, headers: Headers) -> None:
        self._server = server
        self._headers = [*headers, (b"content-type", b"application/json")]
        self._sampled = 0

    async def run(self) -> StateForm:
        """Returns the form of the server's states.

        Raises MisuseError if a run that continues from a built slot differs from one that has evaluated all
        tokens, StateError if slot files are not served, and UnavailableError if llama-server fails.
        """
        try:
            return await self._run()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MisuseError(f"llama-server answers in another form: {error!r}", _OTHER_VERSION) from error

    async def _run(self) -> StateForm:
        words = (await self._ask("GET", "/v1/models"))["data"][0]["meta"]["n_vocab"]
        self._sampled = (await self._ask("POST", "/tokenize", {"content": "a"}))["tokens"][-1]
        tokens = [(1 + 7 * i) % words for i in range(_TOKENS)]
        expected = await self._complete(tokens, 0)
        state = await self._saved(_TOKENS)
        blocks = state.blocks(_BLOCK, 0, _PREFIX // _BLOCK)
        await self._restore(state.form, blocks, tokens[:_PREFIX])
        if not np.array_equal((await self._saved(_PREFIX)).blocks(_BLOCK, 0, len(blocks)), blocks):
            raise MisuseError("llama-server has not kept a slot as it was given", _HINT)
        _compare(await self._complete(tokens, _PREFIX), expected)
        await self._ask("POST", "/slots/0?action=erase", {})
        return state.form

    async def _complete(self, tokens: Sequence[int], cached: int) -> dict[int, float]:
        """Returns the likeliest next tokens with their probabilities."""
        asked = {"prompt": list(tokens), "n_predict": 1, "temperature": 0, "n_probs": _WORDS, "id_slot": 0}
        # llama-server tells no probabilities beside the end of a text, or a part of a character.
        always = {"cache_prompt": True, "logit_bias": [[self._sampled, 1000.0]]}
        said = await self._ask("POST", "/completion", {**asked, **always})
        if (found := said["timings"]["cache_n"]) != cached:
            raise MisuseError(f"llama-server has used {found} tokens of a slot, not {cached}", _HINT)
        likely = said["completion_probabilities"][0]["top_logprobs"]
        return {each["id"]: float(np.exp(each["logprob"])) for each in likely}

    async def _saved(self, n: int) -> State:
        path = self._server.folder / _NAME
        try:
            await self._ask("POST", "/slots/0?action=save", {"filename": _NAME})
            tokens, state = slot_file.read(await asyncio.to_thread(np.fromfile, path, np.uint8), 0)
        finally:
            path.unlink(missing_ok=True)
        if len(tokens) != n:
            raise MisuseError(f"a slot of {n} tokens has {len(tokens)} in its file", _HINT)
        return state

    async def _restore(self, form: StateForm, blocks: Bytes, tokens: Sequence[int]) -> None:
        built = NewState(form, len(tokens), slot_file.head_of(tokens))
        built.fill(_BLOCK, 0, blocks)
        path = self._server.folder / _NAME
        try:
            await asyncio.to_thread(built.raw.tofile, path)
            await self._ask("POST", "/slots/0?action=restore", {"filename": _NAME})
        finally:
            path.unlink(missing_ok=True)

    async def _ask(self, method: str, target: str, body: dict[str, Any] | None = None) -> Any:
        raw = b"" if body is None else json.dumps(body).encode()
        try:
            status, answer = await ask(
                self._server.port, method.encode(), target.encode(), self._headers, raw
            )
        except NoAnswerError as error:
            raise UnavailableError(str(error), "the output of llama-server has the reason") from error
        if status != 200:
            said = answer.decode(errors="replace")
            raise UnavailableError(f"llama-server answers {target} with {status}: {said:.300}", _HINT)
        return json.loads(answer)


def _compare(ours: dict[int, float], theirs: dict[int, float]) -> None:
    both = ours.keys() | theirs.keys()
    if max(abs(ours.get(word, 0.0) - theirs.get(word, 0.0)) for word in both) > _TOLERANCE:
        raise MisuseError("a run that continues from a stored slot gives other probabilities", _HINT)
