"""Durable answers of several NVMe devices with real records: a power cut at each commit, absent devices."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.core.actions import Answer, Deny
from kvstore.daemon.runtime.durability import Durability
from kvstore.tiers.nvme import store
from kvstore.tiers.nvme.generations import History, resolve
from kvstore.tiers.nvme.journal import Journal, RecordBatch
from kvstore.tiers.nvme.store import RecordStore

MIB = 1 << 20
SLOT = np.zeros(1, np.uint64)
BLOCK = RecordBatch((1,), (b"x",), (b"",), (0,), (0,), (1,), (4096,), (1,), (0.0,))
NEW = b"new name".ljust(16, b".")


@pytest.fixture(autouse=True)
def no_check_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a process for each opening."""
    monkeypatch.setattr(store, "_damage", lambda folder: "")


class Node:
    """A daemon's devices with their real journals, of which each commits only in `step`."""

    def __init__(self, root: Path, names: str) -> None:
        self.root = root
        self.core_waits = False
        self.core_answers: list[Callable[[], None]] = []
        self.answers: list[Any] = []
        self._calls: deque[Callable[[], None]] = deque()
        self.tiers = SimpleNamespace(devices={}, changes=0)
        for name in names:
            self.tiers.devices[name] = SimpleNamespace(journal=self.open(name))
        core: Any = SimpleNamespace(
            ask=self._delete, post=lambda call, *args: self._calls.append(lambda: call(*args))
        )
        self.durability = Durability(core, self.tiers, secrets.randbits)  # type: ignore[arg-type]
        self.current = self._start()

    def open(self, name: str) -> Journal:
        return Journal(self.root / name, RecordStore(self.root / name, MIB, 8 * MIB), lambda: None)

    def _start(self) -> dict[str, bool]:
        """As `Recovery` does it."""
        journals = [device.journal for device in self.tiers.devices.values()]
        resolution = resolve([journal.history for journal in journals], self.durability.new_name())
        self.durability.history = resolution.history
        for journal, current in zip(journals, resolution.current, strict=True):
            if not current:
                journal.delete(SLOT)
                journal.put_generations(resolution.history)
                journal.step()
        return dict(zip(self.tiers.devices, resolution.current, strict=True))

    def _delete(self, requester: Any, request: int, event: object) -> None:
        for device in self.tiers.devices.values():
            device.journal.delete(SLOT)
        self.core_answers.append(lambda: requester.answer(request, Answer(request, 1)))
        if not self.core_waits:
            self.core_answers.pop()()

    def put(self) -> None:
        for device in self.tiers.devices.values():
            device.journal.put(BLOCK, lambda: None, lambda error: None)
            device.journal.step()

    def ask(self) -> None:
        requester: Any = SimpleNamespace(answer=lambda request, action: self.answers.append(action))
        self.durability.ask(requester, 7, None)

    def step(self, name: str) -> None:
        """One commit of one device, and what follows from it in the daemon."""
        self.tiers.devices[name].journal.step()
        while self._calls:
            self._calls.popleft()()

    def steps(self, names: str) -> None:
        for name in names:
            self.step(name)

    def cut(self) -> None:
        """The power fails: what was not committed is lost."""
        for device in self.tiers.devices.values():
            device.journal._store.close()

    @property
    def blocks(self) -> dict[str, int]:
        return {name: len(device.journal.load().blocks) for name, device in self.tiers.devices.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Starts a daemon with these devices; the power of the one before fails."""
    nodes: list[Node] = []

    def started(names: str) -> Node:
        for each in nodes[-1:]:
            each.cut()
        nodes.append(Node(tmp_path, names))
        return nodes[-1]

    yield started
    nodes[-1].cut()


COMMITS = 3  # of each device: prepared, committed, and the answer's


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("commits", range(2 * COMMITS + 1))
@pytest.mark.parametrize("company", ["AC", "BC", "ABC"])
def test_a_power_cut_between_two_commits_makes_no_present_device_an_absent_one(
    node: Callable[[str], Node], order: str, commits: int, company: str
) -> None:
    node("ABC").put()
    before = node("ABC")
    before.ask()
    before.steps("ABC" * COMMITS)
    assert before.answers == [Answer(7, 1)]
    before.put()

    first = node("AB")
    first.ask()
    first.steps((order * COMMITS)[:commits])
    answered = first.answers == [Answer(7, 1)]
    assert answered or not first.answers
    assert answered == (commits == 2 * COMMITS)
    again = node("AB")
    assert again.current == {"A": True, "B": True}, "neither was absent"
    assert not answered or not any(again.blocks.values())
    found = node(company)
    assert found.current.pop("C") is False or not answered, "it was absent, and brings x back"
    assert all(found.current.values())
    assert not answered or not any(found.blocks.values())


def test_devices_that_were_absent_in_turn_forget_all(node: Callable[[str], Node]) -> None:
    node("AB").put()
    for name in "AB":
        alone = node(name)
        assert alone.blocks == {name: 1}
        alone.ask()
        alone.steps(name * COMMITS)
        assert alone.answers
        alone.put()
    both = node("AB")
    assert both.current == {"A": False, "B": False}
    assert both.blocks == {"A": 0, "B": 0}
    assert node("AB").current == {"A": True, "B": True}


def test_the_generation_is_raised_once_for_a_set_of_devices(node: Callable[[str], Node]) -> None:
    two = node("AB")
    two.ask()
    two.ask()
    two.steps("AB" * COMMITS)
    assert len(two.answers) == 2
    history = two.durability.history
    assert len(history.committed) == 1
    two.ask()
    two.steps("AB")
    assert len(two.answers) == 3
    assert two.durability.history == history


@pytest.mark.parametrize("commits", range(COMMITS))
def test_no_answer_comes_in_the_generation_of_a_device_that_has_left(
    node: Callable[[str], Node], commits: int
) -> None:
    two = node("AB")
    two.put()
    two.ask()
    two.steps("AB" * commits)
    left = two.tiers.devices.pop("B")
    two.tiers.changes += 1
    left.journal.close()
    two.steps("A" * 2 * COMMITS)
    assert two.answers == [Answer(7, 1)]
    assert node("AB").current == {"A": True, "B": False}


def test_a_device_that_leaves_before_the_answer_brings_nothing_back(node: Callable[[str], Node]) -> None:
    two = node("AB")
    two.ask()
    two.steps("AB" * COMMITS)
    two.put()
    two.core_waits = True
    two.ask()
    # What B was to delete is lost with it, and the core answers later.
    left = two.tiers.devices.pop("B")
    two.tiers.changes += 1
    left.journal._store.close()
    two.core_answers.pop()()
    two.steps("A" * COMMITS)
    assert two.answers == [Answer(7, 1)] * 2
    both = node("AB")
    assert both.current == {"A": True, "B": False}
    assert not any(both.blocks.values())


def test_a_device_that_is_added_meanwhile_is_in_the_generation_of_the_answer(
    node: Callable[[str], Node],
) -> None:
    two = node("A")
    two.ask()
    two.step("A")
    journal = two.open("B")
    two.tiers.devices["B"] = SimpleNamespace(journal=journal)
    two.tiers.changes += 1
    journal.put_generations(two.durability.history)
    two.steps("A" * 2 * COMMITS)
    assert not two.answers
    two.steps("BA" * COMMITS)
    assert two.answers == [Answer(7, 1)]
    newest = two.durability.history.committed[-1]
    again = node("AB")
    assert again.current == {"A": True, "B": True}
    for device in again.tiers.devices.values():
        assert device.journal.history.committed[-1] == newest


def test_a_device_that_records_nothing_is_told_and_its_name_is_used_again(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = node("AB")
    failing = two.tiers.devices["B"].journal._store
    commit = failing.commit

    def fails(changes: object) -> None:
        raise OSError("no space")

    for _ in range(3):
        monkeypatch.setattr(failing, "commit", fails)
        two.ask()
        two.steps("AB" * COMMITS)
        denied = two.answers.pop()
        assert isinstance(denied, Deny)
        assert "could not be recorded: " in denied.why
        assert len(two.durability.history.prepared) == 1
        assert not two.durability.history.committed
    monkeypatch.setattr(failing, "commit", commit)
    two.ask()
    two.steps("AB" * COMMITS)
    assert two.answers == [Answer(7, 1)]
    assert two.durability.history == History(two.durability.history.names)
    assert len(two.durability.history.committed) == 1
