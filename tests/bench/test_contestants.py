"""A contestant of the bench of peers that delivers other bytes, or has no key, ends the bench."""

from __future__ import annotations

from typing import Any

import pytest

from bench.contestants import KEYS, Contestant, Shape
from bench.harness import NotDone

SHAPE = Shape(12 << 10, KEYS, 3, 1)


class Fake(Contestant):
    """Keeps batches in this process. `spoil` changes what a get has delivered."""

    name = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Any = lambda blocks: None
        self.stored: dict[str, Any] = {}

    def _clear(self) -> None:
        self.stored = {}

    def _put(self, number: int, keys: list[str]) -> None:
        self.stored |= {key: block.copy() for key, block in zip(keys, self._blocks, strict=True)}

    def _get(self, number: int, keys: list[str]) -> None:
        for block, key in zip(self._out, keys, strict=True):
            block[:] = self.stored[key]
        self.spoil(self._out)

    def _count(self, keys: list[str]) -> int:
        return len(self.stored.keys() & set(keys))


@pytest.fixture
def fake() -> Fake:
    made = Fake()
    made.fill(SHAPE)
    return made


def test_what_was_put_is_what_is_got(fake: Fake) -> None:
    assert fake.get([0, 2, 1]) > 0
    assert fake.put([3, 4]) > 0
    assert fake.get([4, 3]) > 0
    assert fake.exists() > 0


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_wrong_page_is_found(fake: Fake, page: int) -> None:
    def spoil(blocks: Any) -> None:
        blocks[KEYS - 1, page * 4096] ^= 1

    fake.spoil = spoil
    with pytest.raises(NotDone, match="wrong pages of fake"):
        fake.get([1])


def test_another_batch_and_a_get_that_does_nothing_are_found(fake: Fake) -> None:
    first = fake.stored[f"{SHAPE.block_bytes}-1-0"]
    fake.stored[f"{SHAPE.block_bytes}-1-0"] = fake.stored[f"{SHAPE.block_bytes}-2-0"]
    with pytest.raises(NotDone, match="wrong pages of fake"):
        fake.get([1])
    fake.stored[f"{SHAPE.block_bytes}-1-0"] = first
    fake.get([1])
    fake._get = lambda number, keys: None  # type: ignore[method-assign]
    with pytest.raises(NotDone, match="wrong pages of fake"):
        fake.get([1])


def test_a_missing_key_is_found(fake: Fake) -> None:
    del fake.stored[f"{SHAPE.block_bytes}-0-{KEYS - 1}"]
    with pytest.raises(NotDone, match="keys found by fake: 31, not 32"):
        fake.exists()
