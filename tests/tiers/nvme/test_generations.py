"""Which devices have missed deletions: single cases, and random lives of devices against what happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.tiers.nvme import generations
from kvstore.tiers.nvme.generations import NAME_BYTES, History, from_number, resolve, unpack


def name(text: str) -> bytes:
    return text.encode().ljust(NAME_BYTES, b".")


def history(committed: str = "", prepared: str = "") -> History:
    """One generation a letter."""
    return History(tuple(map(name, committed)), tuple(map(name, prepared)))


NEW = name("new")


@pytest.mark.parametrize(
    ("histories", "current", "together"),
    [
        ([history()], [True], history()),
        ([history(), history()], [True, True], history()),
        ([history("n"), history()], [True, False], history("n")),
        ([history("n"), history("n")], [True, True], history("n")),
        # A power cut: some have the name, as prepared, or as committed.
        ([history("n", "p"), history("n")], [True, True], history("n", "p")),
        ([history("n"), history("n", "p")], [True, True], history("n", "p")),
        ([history("n", "p"), history("np")], [True, True], history("np")),
        ([history("n", "pq"), history("np")], [True, True], history("np", "q")),
        ([history("n", "p"), history("n", "q")], [True, True], history("n", "pq")),
        # Away while deletions were answered.
        ([history("n"), history("np")], [False, True], history("np")),
        ([history("np"), history("n", "p"), history("n")], [True, True, False], history("np")),
        ([history("np"), history("n", "q")], [True, False], history("np", "q")),
        # Away in turn.
        ([history("na"), history("nb")], [False, False], history("nab").prepare(NEW).commit()),
        ([history("a"), history("b")], [False, False], history("ab").prepare(NEW).commit()),
        ([history("na"), history("nb"), history("n")], [False] * 3, history("nab").prepare(NEW).commit()),
        ([history("na"), history("nb"), history("nabf")], [False, False, True], history("nabf")),
    ],
)
def test_devices_that_missed_nothing_keep_their_blocks(
    histories: list[History], current: list[bool], together: History
) -> None:
    resolution = resolve(histories, NEW)
    assert list(resolution.current) == current
    assert resolution.history == together


def test_records_are_read_as_they_were_written() -> None:
    for each in (history(), history("n"), history("", "p"), history("abc", "de")):
        assert unpack(each.pack()) == each
    for damaged in (b"", b"\1", history("n").pack()[:-1], (2).to_bytes(8, "little") + name("n")):
        with pytest.raises(ValueError, match="makes no sense"):
            unpack(damaged)


def test_a_number_of_an_earlier_format_stands_for_all_lower_ones() -> None:
    assert from_number(0) == History()
    assert resolve([from_number(3), from_number(2)], NEW).current == (True, False)
    assert resolve([from_number(3), from_number(3)], NEW).current == (True, True)
    assert resolve([from_number(3).prepare(NEW).commit(), from_number(3)], NEW).current == (True, False)
    assert resolve([from_number(3).prepare(NEW).commit(), from_number(4)], NEW).current == (False, False)
    assert len(from_number(5000).committed) == generations.MOST_COMMITTED
    assert resolve([from_number(5000), from_number(4000)], NEW).current == (True, False)


def test_beyond_the_bound_blocks_are_lost_and_none_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "MOST_COMMITTED", 3)
    long = history("n")
    for letter in "abc":
        long = long.prepare(name(letter)).commit()
    assert long == history("abc")
    assert resolve([long, history("n")], NEW).current == (False, False)
    assert resolve([long, history("na")], NEW).current == (True, False)


@dataclass(eq=False)
class Device:
    """A device, and what happened: deletions that it missed, and those that it can witness.

    `unseen` has names that were committed without it.
    """

    history: History = field(default_factory=History)
    missed: set[bytes] = field(default_factory=set)
    knows: set[bytes] = field(default_factory=set)
    unseen: set[bytes] = field(default_factory=set)

    def forget(self, history: History, knows: set[bytes], committed: set[bytes]) -> None:
        self.history, self.missed, self.knows = history, set(), set(knows)
        self.unseen = committed.difference(history.names)


class Node:
    """Daemons that run one after another on some of these devices, each up to a power cut."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.devices = [Device() for _ in range(self.dice.randint(2, 4))]
        self.committed: set[bytes] = set()
        self.kept = self.forgot = self.answered = 0

    def name(self) -> bytes:
        return self.dice.randbytes(NAME_BYTES)

    def cut(self) -> bool:
        return self.dice.random() < 0.1

    def run(self, bounded: bool) -> None:
        present = self.dice.sample(self.devices, self.dice.randint(1, len(self.devices)))
        resolution = resolve([device.history for device in present], self.name())
        known = {each for device in present for each in device.knows}
        shown = {each for device in present for each in device.history.committed}
        for device, current in zip(present, resolution.current, strict=True):
            assert not (current and device.missed & known), "deleted blocks come back"
            assert current or device.unseen & shown or bounded, "blocks are lost without need"
            self.kept += current
            self.forgot += not current
        if not any(resolution.current):
            self._committed_on(present, resolution.history.committed[-1])
        for device, current in zip(present, resolution.current, strict=True):
            if not current:
                if self.cut():
                    return
                device.forget(resolution.history, known, self.committed)
        history = resolution.history
        while (history := self._raised(history, present)) is not None and self.dice.random() < 0.5:
            absent = [device for device in self.devices if device not in present]
            if absent and self.dice.random() < 0.5:
                present.append(self.dice.choice(absent))
                present[-1].forget(history, present[0].knows, self.committed)
            elif len(present) > 1:
                present.pop()

    def _committed_on(self, present: list[Device], new: bytes) -> None:
        self.committed.add(new)
        for device in self.devices:
            if device not in present:
                device.unseen.add(new)

    def _raised(self, history: History, present: list[Device]) -> History | None:
        """The history once a deletion is answered, None after a cut before."""
        new = self.name()
        history = history.prepare(new)
        for each in (history, history.commit()):
            for device in self.dice.sample(present, len(present)):
                if self.cut():
                    return None
                device.history = each
                if each.committed[-1:] == (new,):
                    self._committed_on(present, new)
        for device in self.devices:
            (device.knows if device in present else device.missed).add(new)
        self.answered += 1
        return history.commit()


@pytest.mark.parametrize("bound", [None, (3, 2), (2, 1)])
def test_no_deleted_block_comes_back_and_no_other_is_lost(
    bound: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound is not None:
        monkeypatch.setattr(generations, "MOST_COMMITTED", bound[0])
        monkeypatch.setattr(generations, "MOST_PREPARED", bound[1])
    kept = forgot = answered = 0
    for seed in range(1000):
        node = Node(seed)
        for _ in range(20):
            node.run(bounded=bound is not None)
        kept, forgot, answered = kept + node.kept, forgot + node.forgot, answered + node.answered
    assert min(kept, forgot, answered) > 5000, (kept, forgot, answered)
