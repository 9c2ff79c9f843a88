"""How much of a prompt is stored and worth loading: of long prompts, in batches, with older daemons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import Client, Estimate, Layout, StoredPrefix
from kvstore.client.calls.call import Connect, Exchange, Flow, Pipeline
from kvstore.errors import MisuseError
from kvstore.wire import messages as m
from tests.client.test_calls import OPENED, WITHOUT_TABLES, Recorded, protocol_of
from tests.daemons import names

Daemon = Callable[[m.Lookup], m.Found]


class Asked:
    """The lookups of one call, and its answer, where the daemon answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: int, version: int = WITHOUT_TABLES) -> None:
        self.lookups: list[m.Lookup] = []
        self.daemon: Daemon = lambda q: m.Found(q.id, 0, False)
        self._client = Client("unix:///x")
        self._space = self._client.namespace(Layout("m", 4096, block_tokens=16))
        monkeypatch.setattr(Client, "_drive", self._drive)
        self._batch, self._version = batch, version

    def _drive(self, exchange: Exchange, flow: Flow[Any]) -> object:
        reply: object = None
        try:
            while True:
                step = flow.send(reply)
                if isinstance(step, Pipeline):
                    reply = [self._answer(each) for each in step.messages]
                else:
                    assert isinstance(step, Connect)
                    protocol = protocol_of(self._batch)
                    protocol.version = self._version
                    reply = Recorded(protocol)
        except StopIteration as end:
            return end.value

    def _answer(self, message: Any) -> Any:
        if not isinstance(message, m.Lookup):
            return OPENED
        self.lookups.append(message)
        return self.daemon(message)

    def __call__(self, keys: list[bytes], have: int = 0) -> StoredPrefix:
        self.lookups.clear()
        [found], _ = self._client.lookup([(self._space, keys, None, Estimate(0.002, 0.8, have))])
        return found


def daemon_with(keys: list[bytes], stored: int, worth: int, gaps: bool = False) -> Daemon:
    """A daemon that has the first keys, and finds so many of them worth loading if it knows the speed."""
    at = {key: i for i, key in enumerate(keys)}

    def answer(q: m.Lookup) -> m.Found:
        asked = [at[q.keys[i : i + 32]] for i in range(0, len(q.keys), 32)]
        there = sum(i < stored for i in asked)
        return m.Found(q.id, sum(i < worth for i in asked) if q.recompute_s else there, gaps, there)

    return answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch, 4096)


@pytest.mark.parametrize(
    ("stored", "worth"), [(1000, 1000), (1000, 512), (1000, 0), (5, 5), (0, 0), (1200, 7)]
)
def test_of_a_long_prompt_a_sample_is_asked(asked: Asked, stored: int, worth: int) -> None:
    keys = names(1200)
    asked.daemon = daemon_with(keys, stored, worth)
    found = asked(keys)
    assert found.blocks == stored
    assert worth - 34 < found.worth_loading <= worth
    assert found.worth_loading == worth or found.is_cut
    assert len(asked.lookups[0].keys) == 35 * 32
    assert sum(len(q.keys) // 32 for q in asked.lookups) <= 68, "as many as without an estimate"
    assert asked.lookups[0].step == 34


def test_the_daemon_hears_the_speed_the_wait_and_what_the_caller_has(asked: Asked) -> None:
    keys = names(1200)
    asked.daemon = daemon_with(keys, 1100, 1100)
    asked(keys, have=350)
    told = [(q.recompute_s, q.load_s, q.have) for q in asked.lookups]
    assert told == [(0.002, 0.8, 10), (0.002, 0.8, 0)]
    asked(keys[:300], have=350)
    assert [q.have for q in asked.lookups] == [350]


def test_where_parents_may_be_missing_all_keys_are_asked(asked: Asked) -> None:
    keys = names(1200)
    asked.daemon = daemon_with(keys, 700, 650, gaps=True)
    assert asked(keys) == StoredPrefix(700, 650)
    assert [len(q.keys) // 32 for q in asked.lookups] == [35, 1200]


@pytest.mark.parametrize(("stored", "worth"), [(250, 250), (250, 120), (250, 90), (100, 100), (80, 10)])
def test_the_batches_of_a_prompt_are_one_prefix(
    monkeypatch: pytest.MonkeyPatch, stored: int, worth: int
) -> None:
    asked, keys = Asked(monkeypatch, 100), names(300)
    asked.daemon = daemon_with(keys, stored, worth)
    assert asked(keys, have=150) == StoredPrefix(stored, worth)
    cut = worth // 100 + 1
    assert all(q.recompute_s == 0 for q in asked.lookups[cut:]), "behind the end no block is estimated"
    assert [q.have for q in asked.lookups[: min(cut, 2)]] == [150, 50][: min(cut, 2, len(asked.lookups))]


def test_an_older_daemon_hears_no_speed_and_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, keys = Asked(monkeypatch, 4096, version=10), names(40)
    asked.daemon = daemon_with(keys, 30, 3)
    assert asked(keys) == StoredPrefix(30, 30)
    assert [q.recompute_s for q in asked.lookups] == [0.0]


@pytest.mark.parametrize(
    "wrong", [(0, 1.0, 0), (1.0, 0, 0), (-1.0, 1.0, 0), (1.0, float("inf"), 0), (1.0, 1.0, -1)]
)
def test_estimates_out_of_range_are_misuse(wrong: tuple[float, float, int]) -> None:
    with Client("unix:///x") as client, pytest.raises(MisuseError):
        client.lookup([(client.namespace(Layout("m", 4096)), names(1), None, Estimate(*wrong))])
