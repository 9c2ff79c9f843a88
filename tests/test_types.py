"""The words of the domain: layouts, keys, tiers, geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import MisuseError
from kvstore.types import (
    ALIGN,
    HEADER_BYTES,
    LABEL_BYTES,
    MAX_BLOCK_BYTES,
    MAX_KEY_BYTES,
    Geometry,
    Layout,
    chain_keys,
    check_keys,
    slot_bytes,
)

LAYOUT = Layout(
    model="m", block_bytes=4096, revision="r", dtype="d", block_tokens=16, shard="0/1", kv_layout="k"
)


def test_every_field_of_a_layout_and_the_tenant_make_another_namespace() -> None:
    others = [
        replace(LAYOUT, **{name: value * 2 if isinstance(value, int) else value + "x"})
        for name, value in LAYOUT.to_map().items()
    ]
    prints = {layout.fingerprint() for layout in [LAYOUT, *others]} | {LAYOUT.fingerprint("other tenant")}
    assert len(prints) == 1 + len(LAYOUT.to_map()) + 1
    assert {len(p) for p in prints} == {16}


def test_a_fingerprint_is_the_same_in_every_process_and_release() -> None:
    # Records on disk carry it: another value would orphan every block that is stored.
    assert Layout(model="m", block_bytes=1).fingerprint().hex() == "670a38f763f3db9e5c045a306ef9a2cc"
    full = Layout("m", 4096, "r", "bfloat16", 16, "0/2", "nhd")
    assert full.fingerprint("t").hex() == "a3218e9b17e8cfb76b29c33c9dd3ce07"


def test_the_kind_of_a_layout_is_written_only_where_it_is_no_chain() -> None:
    independent = replace(LAYOUT, kind="independent")
    assert (LAYOUT.independent, independent.independent) == (False, True)
    assert replace(LAYOUT, kind="chain") == LAYOUT
    assert "kind" not in LAYOUT.to_map()
    assert independent.to_map() == LAYOUT.to_map() | {"kind": "independent"}
    assert independent.fingerprint() != LAYOUT.fingerprint()
    for layout in (LAYOUT, independent):
        assert Layout(**layout.to_map()) == layout


@pytest.mark.parametrize("kind", ["", "Chain", "recurrent", None, 1, ["chain"]])
def test_an_unknown_kind_is_refused_with_the_kinds_there_are(kind: object) -> None:
    with pytest.raises(MisuseError, match="kind is") as told:
        replace(LAYOUT, kind=kind)
    assert told.value.hint == '"chain" or "independent"'


def test_fields_do_not_run_into_each_other() -> None:
    a, b = replace(LAYOUT, revision="ab", dtype="c"), replace(LAYOUT, revision="a", dtype="bc")
    assert a.fingerprint() != b.fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", 5),
        ("model", "x" * 1025),
        ("dtype", None),
        ("block_bytes", 0),
        ("block_bytes", -1),
        ("block_bytes", True),
        ("block_bytes", 4096.0),
        ("block_bytes", MAX_BLOCK_BYTES + 1),
        ("block_tokens", -1),
    ],
)
def test_a_bad_layout_names_its_field(field: str, value: object) -> None:
    with pytest.raises(MisuseError, match=rf"layout\.{field}"):
        Layout(**{**LAYOUT.to_map(), field: value})  # type: ignore[arg-type]


def test_slots_are_aligned() -> None:
    assert [slot_bytes(n) for n in (1, ALIGN - 1, ALIGN, ALIGN + 1)] == [ALIGN, ALIGN, ALIGN, 2 * ALIGN]


def test_keys_are_joined() -> None:
    assert check_keys([b"ab", b"cd"]) == (b"abcd", 2)
    assert check_keys((b"k" * MAX_KEY_BYTES,)) == (b"k" * MAX_KEY_BYTES, MAX_KEY_BYTES)
    assert check_keys([])[0] == b""


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([b""], "a key of 0 bytes"),
        ([b"x" * 65], "a key of 65 bytes"),
        ([b"ab", b"c"], "differ in length"),
        ([b"ab", b"c", b"def"], "differ in length"),
        ([b"ab", "cd"], "a key is a str"),
        ([b"ab", None], "a key is a NoneType"),
    ],
)
def test_bad_keys(keys: list[bytes], says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        check_keys(keys)


def test_a_chain_key_names_all_tokens_before_it() -> None:
    tokens = list(range(100))
    keys = chain_keys(tokens, 16)
    assert len(keys) == 6, "the last, partial block gets no key"
    assert {len(key) for key in keys} == {32}
    assert chain_keys(tokens[:40], 16) == keys[:2]
    changed = chain_keys([*tokens[:20], 999, *tokens[21:]], 16)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)
    assert not set(chain_keys(tokens, 16, salt=b"lora")) & set(keys)


def test_equal_blocks_at_other_places_have_other_keys() -> None:
    assert len(set(chain_keys([7] * 64, 16))) == 4


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: np.array(t, np.uint16), None])
def test_the_kind_of_sequence_does_not_matter(kind: Callable[[list[int]], object] | None) -> None:
    tokens = list(range(48))
    assert chain_keys(kind(tokens) if kind else range(48), 16) == chain_keys(tokens, 16)


def test_token_ids_use_all_32_bits() -> None:
    assert chain_keys([2**32 - 1], 1) != chain_keys([2**16 - 1], 1)
    assert chain_keys([], 16) == []


@pytest.mark.parametrize(
    ("tokens", "block_tokens"),
    [([1, 2], 0), ([1, -1], 1), ([2**32], 1), ([1.5], 1), ([[1], [2]], 1), (["a"], 1), (5, 1)],
)
def test_tokens_that_cannot_be(tokens: object, block_tokens: int) -> None:
    with pytest.raises(MisuseError):
        chain_keys(tokens, block_tokens)


@example(extent=3 * ALIGN + 200, slot_pages=1, table=True)
@given(st.integers(1, 1 << 26), st.integers(1, 64), st.booleans())
def test_an_extent_is_used_to_its_end_and_not_beyond(extent: int, slot_pages: int, table: bool) -> None:
    slot = slot_pages * ALIGN
    cut = Geometry(extent, slot, table)
    assert cut.payload_offset % ALIGN == 0
    assert cut.payload_offset >= (cut.slots * HEADER_BYTES if table else 0)
    assert not cut.slots or cut.payload_offset + cut.slots * slot <= extent
    head = LABEL_BYTES + slot_bytes((cut.slots + 1) * HEADER_BYTES) if table else 0
    one_more = (cut.slots + 1) * slot + head
    assert one_more > extent, "another slot would have fitted"
