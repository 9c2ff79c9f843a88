"""What a server's error replies mean for single blocks and for the backend as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvstore.tiers.network.base import NetworkError, Outcome
from kvstore.tiers.network.valkey.resp import Refusal, Reply

Judge: TypeAlias = Callable[[Reply], Outcome]

_HINTS = {"WRONGPASS": "check network.user and network.password", "NOAUTH": "set network.password"}


def judge_hello(reply: Reply) -> Outcome:
    """Judges a reply to the first commands of a connection. Raises NetworkError if the server refuses."""
    if isinstance(reply, Refusal):
        if reply.code == "NOPERM" and "'ping'" in reply.text:
            return Outcome.OK
        passing = reply.code in ("LOADING", "BUSY") or "max number of clients" in reply.text
        raise NetworkError(reply.text, _HINTS.get(reply.code, ""), fatal=not passing)
    if reply not in (b"OK", b"PONG"):
        raise NetworkError(f"unexpected first reply {reply!r:.40}", "is it a Valkey or Redis server?")
    return Outcome.OK


def with_refusals(judge: Judge) -> Judge:
    """Returns a judge that handles error replies, alike for all commands, and leaves others to `judge`.

    It raises a fatal NetworkError if the server denies access.
    """

    def judge_reply(reply: Reply) -> Outcome:
        return _refused(reply) if isinstance(reply, Refusal) else judge(reply)

    return judge_reply


def _refused(refusal: Refusal) -> Outcome:
    match refusal.code:
        case "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED":
            raise NetworkError(refusal.text, _HINTS.get(refusal.code, ""), fatal=True)
        case "OOM" | "MISCONF" | "READONLY" | "NOREPLICAS":
            return Outcome.FULL
        case "WRONGTYPE":
            return Outcome.TORN
    return Outcome.FAILED
