"""What a server's refusals mean for blocks, and for the backend as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvstore.tiers.network.base import NetworkError, Outcome
from kvstore.tiers.network.valkey.resp import Refusal, Reply

Judge: TypeAlias = Callable[[Reply], Outcome]

_HINTS = {"WRONGPASS": "see network.user and network.password", "NOAUTH": "set network.password"}


def greeted(reply: Reply) -> Outcome:
    """Judges an answer to what is said first."""
    if isinstance(reply, Refusal):
        if reply.code == "NOPERM" and "'ping'" in reply.text:
            return Outcome.OK
        passing = reply.code in ("LOADING", "BUSY") or "max number of clients" in reply.text
        raise NetworkError(reply.text, _HINTS.get(reply.code, ""), fatal=not passing)
    if reply not in (b"OK", b"PONG"):
        raise NetworkError(f"a greeting was answered with {reply!r:.40}", "is it a Valkey or Redis server?")
    return Outcome.OK


def judged(judge: Judge) -> Judge:
    """`judge` for what is no refusal; refusals are the same for all commands. Raises NetworkError (fatal)
    where we are not let in.
    """

    def of(reply: Reply) -> Outcome:
        return _refused(reply) if isinstance(reply, Refusal) else judge(reply)

    return of


def _refused(refusal: Refusal) -> Outcome:
    match refusal.code:
        case "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED":
            raise NetworkError(refusal.text, _HINTS.get(refusal.code, ""), fatal=True)
        case "OOM" | "MISCONF" | "READONLY" | "NOREPLICAS":
            return Outcome.FULL
        case "WRONGTYPE":
            return Outcome.TORN
    return Outcome.FAILED
