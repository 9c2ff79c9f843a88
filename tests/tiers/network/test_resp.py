"""The codec: whatever pieces a reply comes in, it is the same one; and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import RemoteProtocolError
from kvstore.tiers.network.valkey.resp import BUFFER_BYTES, Reader, Refusal, Reply, command, command_around

replies = st.recursive(
    st.none()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.binary(max_size=3 * BUFFER_BYTES)
    | st.text("abcXYZ ", max_size=20).map(Refusal),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def encoded(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case Refusal():
            return b"-%b\r\n" % reply.text.encode()
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))


def read(reader: Reader, raw: bytes, steps, into=()) -> tuple[Reply, bytes]:
    """A reply, and what was not asked for of the bytes, which come in steps of these sizes."""
    filling = reader.reply(into)
    try:
        room = next(filling)
        while True:
            assert raw, "it asks for more than there is"
            came = min(len(room), len(raw), next(steps))
            room[:came] = raw[:came]
            raw = raw[came:]
            room = filling.send(came)
    except StopIteration as done:
        return done.value, raw


def cycle(sizes: list[int]):
    while True:
        yield from sizes


sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=5)


@given(st.lists(replies, min_size=1, max_size=5), sizes)
def test_replies_come_in_any_pieces(wanted: list[Reply], sizes: list[int]) -> None:
    reader, steps, left = Reader(), cycle(sizes), b"".join(map(encoded, wanted))
    got = []
    for _ in wanted:
        reply, left = read(reader, left, steps)
        got.append(reply)
    assert got == wanted
    assert reader.empty
    assert not left


@given(st.binary(max_size=2 * BUFFER_BYTES), st.integers(0, 300), st.integers(1, BUFFER_BYTES * 2), sizes)
def test_a_bulk_is_received_into_memory(bulk: bytes, first: int, second: int, sizes: list[int]) -> None:
    """Behind other replies, shorter or longer than there is room."""
    room = [bytearray(b"\xee" * first), bytearray(b"\xee" * second)]
    reader, steps = Reader(), cycle(sizes)
    raw = encoded(7) + encoded(bulk) + encoded(b"behind")
    reply, raw = read(reader, raw, steps)
    assert reply == 7
    reply, raw = read(reader, raw, steps, [memoryview(part) for part in room])
    assert reply == len(bulk)
    assert b"".join(room) == bulk[: first + second].ljust(first + second, b"\xee")
    assert read(reader, raw, steps) == (b"behind", b"")


@pytest.mark.parametrize("raw", [b"$-1\r\n", b"-ERR no\r\n", b":12\r\n", b"*1\r\n:1\r\n"])
def test_other_replies_are_not_received_into_memory(raw: bytes) -> None:
    room = bytearray(10)
    reply, _ = read(Reader(), raw, cycle([1]), [memoryview(room)])
    assert reply in (None, Refusal("ERR no"), 12, [1])
    assert room == bytes(10)


def test_simple_strings_are_bytes() -> None:
    assert read(Reader(), b"+OK\r\n", cycle([1]))[0] == b"OK"
    assert read(Reader(), b"*-1\r\n", cycle([1]))[0] is None


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$99999999999999999999\r\n",
        b"*99999999999\r\n",
        b"*1\r\n" * 20,
        b":\r\n",
        b"$3\r\nabcd\r\n",
        b"+" + b"x" * BUFFER_BYTES,
        b"*1000\r\n" + b"$1000000\r\n" + bytes(1_000_000) + b"\r\n" + b"$16000000\r\n",
        b"%1\r\n+a\r\n+b\r\n",
    ],
)
def test_a_malformed_reply_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(Reader(), raw, cycle([5000]))


@pytest.mark.parametrize("raw", [b"$99999999999999999\r\n", b"$3\r\nabcd\r\n", b"$-7\r\n"])
def test_a_malformed_bulk_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(Reader(), raw, cycle([5000]), [memoryview(bytearray(3))])


def test_commands() -> None:
    assert command("SET", b"k\xff", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\nk\xff\r\n$2\r\n12\r\n"
    before, behind = command_around((b"SET", b"k"), 3, (b"EX", b"9"))
    assert before + b"abc" + behind == command("SET", "k", "abc", "EX", "9")
    before, behind = command_around((b"SET", b"k"), 3, ())
    assert before + b"abc" + behind == command("SET", "k", "abc")
