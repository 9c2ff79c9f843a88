"""The trace readers: both formats, plain and compressed, and invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvstore.errors import KVStoreError
from kvstore.lab.traces import CHAT_BLOCK_TOKENS, READ_BYTES, Request, Trace


def chat(timestamp: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 9, "hash_ids": ids, **more}


def call(t: float, tokens: int, ids: list[int], model: str = "m") -> dict[str, Any]:
    return {"t": t, "type": "n", "model": model, "in": tokens, "out": 3, "hash_ids": ids}


def agent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "requests": list(requests)}


def conversation(*requests: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": "c", "block_size": block_size, "requests": list(requests)}


CHATS = [
    chat(2000, 2 * CHAT_BLOCK_TOKENS + 5, [7, 8, 9]),
    chat(3500, 3 * CHAT_BLOCK_TOKENS, [7, 8, 10]),
    chat(3500, 10, [11]),
]
CONVERSATIONS = [
    conversation(
        call(0, 130, [1, 2]),
        agent(5.0, call(0.0, 64, [50]), agent(1.0, call(0.5, 64, [60])), call(20.0, 128, [50, 51])),
        call(6.0, 192, [1, 2, 3]),
        call(6.2, 192, [1, 2, 3], model="other"),
    ),
    conversation(call(1.0, 128, [1, 2])),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compress(path: Path) -> Path:
    target = path.with_suffix(path.suffix + ".zst")
    target.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))
    return target


def test_chats(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "chats.jsonl", CHATS))
    assert (trace.kind, trace.block_tokens, trace.count_sessions()) == ("requests", 512, 3)
    a, b, c = trace
    assert [r.time_s for r in (a, b, c)] == [0.0, 1.5, 1.5]
    assert [r.session for r in (a, b, c)] == [0, 1, 2]
    assert [len(r.keys) for r in (a, b, c)] == [2, 3, 0], "partial blocks get no key"
    assert (b.input_tokens, b.output_tokens, b.block_tokens) == (1536, 9, 512)
    assert a.keys == b.keys[:2]
    assert {len(key) for key in b.keys} == {32}
    assert not any(session.own_clock for session in trace.sessions())


def test_chats_may_set_block_tokens(tmp_path: Path) -> None:
    small = [{**chat(i, 40, [1, 2, 3]), "block_tokens": 16} for i in range(2)]
    trace = Trace(write(tmp_path / "small.jsonl", small))
    assert trace.block_tokens == 16
    assert [(r.block_tokens, len(r.keys)) for r in trace] == [(16, 2), (16, 2)]
    mixed = Trace(write(tmp_path / "mixed.jsonl", [small[0], chat(1, 512, [1])]))
    with pytest.raises(KVStoreError, match=r"line 2: block_tokens is 512, the first line has 16"):
        list(mixed)
    with pytest.raises(KVStoreError, match=r"line 1: block_tokens: "):
        Trace(write(tmp_path / "none.jsonl", [{**small[0], "block_tokens": 0}]))


# Two chats and a second turn in the published form of the Qwen-Bailian usage traces; all values are invented.
BAILIAN = """
{"chat_id": 4, "parent_chat_id": -1, "timestamp": 12.5, "input_length": 40, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}
{"chat_id": 5, "parent_chat_id": -1, "timestamp": 13.061, "input_length": 16, "output_length": 1, "type": "search", "turn": 1, "hash_ids": [9]}
{"chat_id": 6, "parent_chat_id": 4, "timestamp": 19.0, "input_length": 64, "output_length": 30, "type": "text", "turn": 2, "hash_ids": [7, 8, 10, 11]}
"""  # noqa: E501


def test_bailian_chats_have_seconds_and_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "qwen.jsonl"
    path.write_text(BAILIAN)
    trace = Trace(path)
    assert (trace.kind, trace.block_tokens, trace.count_sessions()) == ("requests", 16, 3)
    first, other, second = trace
    assert [r.time_s for r in (first, other, second)] == pytest.approx([0.0, 0.561, 6.5])
    assert [len(r.keys) for r in (first, other, second)] == [2, 1, 4]
    assert second.keys[:2] == first.keys
    assert not set(other.keys) & set(second.keys)
    path.write_text(BAILIAN + json.dumps(chat(20_000, 512, [1])))
    with pytest.raises(KVStoreError, match=r"line 5 has no field chat_id"):
        list(Trace(path))


def test_a_key_depends_on_its_whole_prefix(tmp_path: Path) -> None:
    rows = [chat(0, 1024, [1, 2]), chat(0, 1024, [3, 2])]
    a, b = Trace(write(tmp_path / "chats.jsonl", rows))
    assert not set(a.keys) & set(b.keys)


def test_conversations(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "agents.jsonl", CONVERSATIONS))
    assert (trace.kind, trace.block_tokens, trace.count_sessions()) == ("conversations", 64, 2)
    requests = list(trace)
    first = [r for r in requests if r.session == 0]
    assert [r.time_s for r in first] == [0.0, 5.0, 6.0, 6.2, 6.5, 25.0], (
        "nested times are added up and merged"
    )
    main, sub, longer, other_model, nested, sub_again = first
    assert [len(r.keys) for r in first] == [2, 1, 3, 3, 1, 2]
    assert longer.keys[:2] == main.keys
    assert sub_again.keys[:1] == sub.keys
    assert not set(nested.keys) & set(main.keys + sub.keys)
    assert not set(other_model.keys) & set(longer.keys), "two models never share KV"
    (second,) = [r for r in requests if r.session == 1]
    assert not set(second.keys) & set(main.keys), "ids are local to their conversation"
    assert all(session.own_clock for session in trace.sessions())


def test_keys_do_not_depend_on_reading_order(tmp_path: Path) -> None:
    # Requests of a session reuse the keys of their common prefix. The result must not depend on it.
    rows = [
        conversation(*(call(i, 64 * len(ids), ids) for i, ids in enumerate(orders)))
        for orders in (ORDERS, ORDERS[::-1])
    ]
    together = [list(session) for session in Trace(write(tmp_path / "a.jsonl", rows)).sessions()]
    alone = [
        next(iter(Trace(write(tmp_path / "b.jsonl", [conversation(call(0, 64 * len(ids), ids))])))).keys
        for ids in ORDERS
    ]
    assert [r.keys for r in together[0]] == alone


ORDERS = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4], [9, 2, 3, 4], [1, 2]]


@pytest.mark.parametrize("rows", [CHATS, CONVERSATIONS], ids=["chats", "conversations"])
def test_compressed_traces_equal_plain_ones(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    plain = write(tmp_path / "trace.jsonl", rows)
    packed = compress(plain)
    expected = list(Trace(plain))
    assert list(Trace(packed)) == expected
    unnamed = packed.rename(tmp_path / "trace")
    assert list(Trace(unnamed)) == expected, "known by its first bytes, whatever its name"


def test_several_frames_long_windows_and_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.zst"
    lines = [json.dumps(chat(i, 512, [i], padding="x" * 3 * READ_BYTES)).encode() + b"\n" for i in range(4)]
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide)
    path.write_bytes(packer.compress(lines[0] + lines[1]) + packer.compress(lines[2] + lines[3]))
    assert [r.time_s for r in Trace(path)] == [0.0, 0.001, 0.002, 0.003]


def test_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + "\n\n".join(map(json.dumps, CHATS)))
    assert len(list(Trace(path))) == 3


@pytest.mark.parametrize(("limit", "sizes"), [(None, [6, 1]), (1, [1]), (6, [6]), (7, [6, 1]), (99, [6, 1])])
def test_only_the_first_requests(tmp_path: Path, limit: int | None, sizes: list[int]) -> None:
    trace = Trace(write(tmp_path / "agents.jsonl", CONVERSATIONS))
    sessions = list(trace.sessions(limit))
    assert [len(session) for session in sessions] == sizes
    flat = [request for session in sessions for request in session]
    assert flat == list(trace)[: sum(sizes)]


def test_a_request_is_a_value() -> None:
    a, b = (Request(0.0, [b"k"], 1, 2, 3, 4) for _ in range(2))
    assert a == b


def _no_such_file(path: Path) -> None: ...


def _empty(path: Path) -> None:
    path.write_bytes(b"\n\n")


def _folder(path: Path) -> None:
    path.mkdir()


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def _unknown(path: Path) -> None:
    path.write_text('{"a": 1}\n')


def _a_list(path: Path) -> None:
    path.write_text("[1, 2]\n")


@pytest.mark.parametrize(
    ("make", "says", "hint"),
    [
        (_no_such_file, "cannot read .*: No such file", "path"),
        (_folder, "cannot read .*: Is a directory", ""),
        (_empty, "holds no requests", "hash_ids"),
        (_binary, "line 1 is not JSON", "hash_ids"),
        (_unknown, "line 1 has no known trace format", "conversations"),
        (_a_list, "line 1 has no known trace format", "input_length"),
    ],
)
def test_invalid_traces_are_refused(
    tmp_path: Path, make: Callable[[Path], None], says: str, hint: str
) -> None:
    make(tmp_path / "trace.jsonl")
    with pytest.raises(KVStoreError, match=says) as caught:
        Trace(tmp_path / "trace.jsonl")
    assert "trace.jsonl" in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", r"line 3 is not JSON"),
        ('{"timestamp": 1}', r"line 3 has no field input_length"),
        (json.dumps(chat(1, -5, [])), r"line 3: input_length: .*greater than or equal to 0"),
        (json.dumps(chat(1, 5, [-1])), r"line 3: hash_ids\.0: "),
        (json.dumps(chat(1, 5, [2**64])), r"line 3: hash_ids\.0: "),
        ('{"timestamp": "1"}', r"line 3: timestamp: .*number"),
        ('{"timestamp": NaN}', r"line 3: timestamp: .*finite"),
        ("[]", r"line 3: "),
    ],
)
def test_a_bad_line_among_chats(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "trace.jsonl", CHATS[:1])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(KVStoreError, match=rf"trace\.jsonl {says}"):
        list(Trace(path))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (conversation({"t": 0, "in": 1, "hash_ids": []}), r"line 2 has no field requests\.0\.call\.out"),
        (
            conversation(agent(0, {"in": 1, "out": 1, "hash_ids": []})),
            r"line 2 has no field .*requests\.0.*\.t",
        ),
        (conversation(call(0, 1, []), block_size=0), r"line 2: block_size: "),
        (conversation(call(0, 1, []), block_size=32), r"line 2: block_size is 32, the first line has 64"),
        ({"block_size": 64, "requests": 5}, r"line 2: requests: "),
    ],
)
def test_a_bad_conversation(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "trace.jsonl", [CONVERSATIONS[1], row])
    with pytest.raises(KVStoreError, match=rf"trace\.jsonl {says}"):
        list(Trace(path))


def test_invalid_truncated_and_damaged_zstd_is_refused(tmp_path: Path) -> None:
    rows = [chat(i, 512, [i * 977 % 1000]) for i in range(5000)]
    path = compress(write(tmp_path / "trace.jsonl", rows))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(KVStoreError, match=r"trace\.jsonl\.zst ends within"):
        list(Trace(path))
    path.write_bytes(whole[:-1])
    with pytest.raises(KVStoreError, match="ends within"):
        list(Trace(path))
    path.write_bytes(json.dumps(CHATS[0]).encode())
    with pytest.raises(KVStoreError, match=r"trace\.jsonl\.zst is not readable as zstd"):
        Trace(path)
    path.write_bytes(b"")
    with pytest.raises(KVStoreError, match=r"ends within"):
        Trace(path)
