"""Prefill in one engine, decode in another: reads and writes a request's `kv_transfer_params`.

The fields are those of vLLM's NixlConnector, so its proxies work unchanged. The prefill engine gets
`do_remote_decode` and answers with `do_remote_prefill` and the number of tokens that it stores. The decode
engine gets this answer and waits for the blocks of these tokens. Other fields are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore_vllm.groups import Found, Group, in_parts
from kvstore_vllm.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The fields of `kv_transfer_params` that count.

    `remote_decode`: another engine decodes. `remote_prefill`: another engine computes, or has computed, the
    prompt. `tokens`: of so many leading tokens that engine stores the blocks; None: of the whole prompt.
    """

    remote_decode: bool = False
    remote_prefill: bool = False
    tokens: int | None = None

    @classmethod
    def of(cls, params: Any) -> TransferParams:
        """Parses a request's parameters. Raises ValueError for a wrong type or a negative number."""
        if params is None:
            return cls()
        if not isinstance(params, dict):
            raise ValueError(f"kv_transfer_params is {params!r:.80}, and no object")
        flags: list[bool] = []
        for name in ("do_remote_decode", "do_remote_prefill"):
            value = params.get(name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"kv_transfer_params: {name} is {value!r:.80}, and no boolean")
            flags.append(bool(value))
        tokens = params.get("remote_num_tokens")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise ValueError(f"kv_transfer_params: remote_num_tokens is {tokens!r:.80}, and no number")
        decode, prefill = flags
        return cls(decode, prefill, tokens)


class Handoffs:
    """Promises between engines: how much of a prompt the prefill engine stores.

    Prefixes end at multiples of `alignment`, in tokens. `waits`: this engine can wait for promised blocks.
    """

    def __init__(self, groups: Sequence[Group], alignment: int, recorder: Recorder, waits: bool) -> None:
        self._groups = list(groups)
        self._alignment = alignment
        self._stored_tokens = math.lcm(alignment, *(group.block_tokens for group in groups))
        self._in_parts = in_parts(groups)
        self._waits = waits
        self._known: dict[str, TransferParams] = {}
        self._recorder = recorder

    def expect(self, request: Request, found: Found) -> Found | None:
        """Returns what another engine has promised to store of a prompt; None: no more than `found`."""
        params = self._params(request)
        if not (self._waits and params.remote_prefill):
            return None
        promised = request.num_prompt_tokens if params.tokens is None else params.tokens
        tokens = min(
            min(promised, request.num_prompt_tokens) // self._stored_tokens * self._stored_tokens,
            (request.num_prompt_tokens - 1) // self._alignment * self._alignment,
        )
        if tokens <= found.tokens:
            return None
        stored = [
            set(range(-(-tokens // group.block_tokens))) if group.full else indices
            for group, indices in zip(self._groups, found.stored, strict=True)
        ]
        return Found(tokens, stored)

    def awaited(self, request_id: str) -> None:
        """Notes that a load waits for a promise. A promise is awaited once, whether or not it is kept."""
        self._known[request_id] = TransferParams()

    def answer(self, request: Request, stored_tokens: int) -> dict[str, Any] | None:
        """Returns the parameters for the decode engine of a finished request; None: it promises nothing.

        The blocks of `stored_tokens` leading tokens are stored, or being saved.
        """
        # The ends of windows and states of a preempted request are not saved.
        whole = self._in_parts or not request.num_preemptions
        if not (stored_tokens and whole and self._params(request).remote_decode):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": stored_tokens,
            "remote_request_id": request.request_id,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def forget(self, request_id: str) -> None:
        """Knows a request no longer."""
        self._known.pop(request_id, None)

    def _params(self, request: Request) -> TransferParams:
        """Returns a request's parameters. Those that cannot be read are counted, logged and ignored."""
        if (known := self._known.get(request.request_id)) is None:
            try:
                known = TransferParams.of(request.kv_transfer_params)
            except ValueError as error:
                known = TransferParams()
                self._recorder.problem("bad_parameters", f"{error}: the request is served without it")
            self._known[request.request_id] = known
        return known
