"""Messages and frames: what is sent arrives; else a message comes out, or one kind of error."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LocalProtocolError, RemoteProtocolError
from kvstore.wire import messages as m
from kvstore.wire.frames import DEFAULT_FRAME_BYTES, Frames, pack

U64 = (1 << 64) - 1
WRONG: dict[type, list[Any]] = {
    int: [-1, 1.5, "1", b"1", None, True, [1], {"a": 1}],
    float: ["1.0", b"1", None, True, [1.0], float("nan"), float("inf"), float("-inf"), -1.0, -1],
    str: [b"x", 1, None, ["x"]],
    bytes: ["x", 1, None, [1]],
    bool: [0, 1, None, "true"],
    dict: [[], "x", 1, None],
    tuple: [{}, "x", 1, None],
}

plain = st.recursive(
    st.none() | st.booleans() | st.integers(0, U64) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
values: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(0, U64),
    float: st.floats(0, 1e9),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=60),
    bool: st.booleans(),
    dict: st.dictionaries(st.text(max_size=5), plain, max_size=3),
    tuple: st.lists(plain, max_size=3).map(tuple),
}


def field_types(cls: type) -> dict[str, type]:
    hints = get_type_hints(cls)
    return {
        f.name: getattr(hints[f.name], "__origin__", hints[f.name])
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
    }


def example(cls: type) -> Any:
    """A message with plausible fields."""
    simple: dict[type, Any] = {
        int: 7,
        float: 0.5,
        str: "x",
        bytes: b"12345678",
        bool: True,
        dict: {},
        tuple: (),
    }
    filled = {name: simple[kind] for name, kind in field_types(cls).items()}
    if "key_bytes" in filled:
        filled["key_bytes"] = 4
    if cls is m.Commit:
        filled["written"] = b"\1"
    if cls is m.Hint:
        filled["priority"] = m.HIGH
    return cls(**filled)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    cls = draw(st.sampled_from(m.ALL))
    filled = {name: draw(values[kind]) for name, kind in field_types(cls).items()}
    if "key_bytes" in filled:
        filled["key_bytes"] = draw(st.integers(1, 64))
        filled["keys"] = draw(st.binary(max_size=3)) * filled["key_bytes"]
    if cls is m.Commit:
        filled["checksums"] = draw(st.binary(min_size=8, max_size=8)) * len(filled["written"])
    if cls is m.Hint:
        filled["priority"] = draw(st.integers(m.LOW, m.HIGH))
    if cls is m.LookedUp:
        filled["found"] = draw(st.binary(max_size=16)) * 4
    if cls is m.Publish:
        filled["tenants"] = tuple(draw(st.lists(st.text(max_size=64), max_size=3)))
    return cls(**filled)


def raw(*items: Any) -> bytes:
    body: bytes = msgpack.packb(items)
    return body


def outcome(body: bytes) -> Any:
    """The message, or the one error that may come instead."""
    try:
        return m.decode(body)
    except RemoteProtocolError as error:
        return error


def tag(cls: type) -> int:
    return m.ALL.index(cls)


# -- messages


@given(messages())
def test_every_message_arrives_as_it_was_sent(message: Any) -> None:
    got = m.decode(m.encode(message))
    assert type(got) is type(message)
    assert got == message


@pytest.mark.parametrize("cls", m.ALL, ids=lambda c: c.__name__)
def test_tags_are_the_order_of_the_list(cls: type) -> None:
    assert msgpack.unpackb(m.encode(example(cls)))[0] == tag(cls)
    assert m.decode(m.encode(example(cls))) == example(cls)


@pytest.mark.parametrize("cls", m.ALL, ids=lambda c: c.__name__)
def test_a_field_of_the_wrong_type_is_named(cls: type) -> None:
    for name, kind in field_types(cls).items():
        for bad in WRONG[kind]:
            fields = {n: getattr(example(cls), n) for n in field_types(cls)}
            body = raw(tag(cls), *({**fields, name: bad}).values())
            with pytest.raises(RemoteProtocolError, match=rf"{cls.__name__}\.{name} is .* instead of"):
                m.decode(body)


@pytest.mark.parametrize("cls", m.ALL, ids=lambda c: c.__name__)
def test_too_many_and_too_few_fields_are_counted(cls: type) -> None:
    fields = [getattr(example(cls), name) for name in field_types(cls)]
    with pytest.raises(RemoteProtocolError, match=rf"{cls.__name__} has {len(fields) + 1} fields instead of"):
        m.decode(raw(tag(cls), *fields, 0))
    # As many as the oldest version has are enough.
    fields = fields[: m._BY_CLASS[cls].fields_at(m.OLDEST)]
    with pytest.raises(RemoteProtocolError, match=rf"{cls.__name__} has {len(fields) - 1} fields instead of"):
        m.decode(raw(tag(cls), *fields[:-1]))


@pytest.mark.parametrize("bad", [-1, len(m.ALL), U64])
def test_unknown_tags_are_refused_with_a_hint(bad: int) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"unknown message tag {bad} \(.*newer protocol"):
        m.decode(raw(bad, 1))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\x93\x02", b"\x00", raw(), raw("Ping", 1), raw(None), raw(1.0), raw(True), raw(b"\2"),
        msgpack.packb({0: 1}), msgpack.packb("text"), m.encode(m.Ping(1)) + b"\0", b"\xc7\xff\xff",
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x92\x02\xd9\xff", b"\x92\x02\xa2\xff\xfe",
        b"\x92\x02\x81\x90\x01", b"\x92\x02\xc7\x08\xff\0\0\0\0\0\0\0\0",
    ],
)  # fmt: skip
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(body)


@pytest.mark.parametrize("depth", [10, 200, 511, 512, 900, 1000, 1023, 1024, 5000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
def test_deep_nesting_is_refused(depth: int, opening: bytes) -> None:
    for body in (b"\x92\x02" + opening * depth + b"\x01", opening * depth + b"\x01", opening * depth):
        with pytest.raises(RemoteProtocolError):
            m.decode(body)


@given(st.binary(max_size=200))
@settings(max_examples=400)
def test_any_bytes_give_a_message_or_a_protocol_error(body: bytes) -> None:
    message = outcome(body)
    assert type(message) in (*m.ALL, RemoteProtocolError)
    assert len(str(message)) < 400 or type(message) in m.ALL


@given(st.integers(0, len(m.ALL)), st.lists(plain | st.integers() | st.floats(), max_size=9))
@settings(max_examples=400)
def test_any_fields_give_a_message_or_a_protocol_error(which: int, items: list[Any]) -> None:
    try:
        body = msgpack.packb((which, *items))
    except OverflowError:
        return
    assert type(outcome(body)) in (*m.ALL, RemoteProtocolError)


@given(messages(), st.data())
def test_a_changed_byte_gives_a_message_or_a_protocol_error(message: Any, data: st.DataObject) -> None:
    body = bytearray(m.encode(message))
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert type(outcome(bytes(body))) in (*m.ALL, RemoteProtocolError)


@given(messages(), st.data())
def test_a_message_cut_short_is_refused(message: Any, data: st.DataObject) -> None:
    body = m.encode(message)
    with pytest.raises(RemoteProtocolError):
        m.decode(body[: data.draw(st.integers(0, len(body) - 1))])


@pytest.mark.parametrize(
    ("key_bytes", "keys", "why"),
    [(0, b"", "keys of 0 bytes"), (65, bytes(65), "keys of 65 bytes"), (8, bytes(9), "9 bytes of keys")],
)
@pytest.mark.parametrize("cls", [m.Prefetch, m.Unpin, m.Invalidate, m.Suspect])
def test_keys_that_cannot_be_cut_are_refused(cls: Any, key_bytes: int, keys: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        m.decode(m.encode(cls(1, 1, key_bytes, keys)))
    with pytest.raises(RemoteProtocolError, match=why):
        m.decode(m.encode(m.Explain(1, "", "", key_bytes, keys)))
    with pytest.raises(RemoteProtocolError, match=why):
        m.decode(m.encode(m.Hint(1, 1, key_bytes, keys, False, 0.0, False, m.LOW)))


@pytest.mark.parametrize(
    "message",
    [
        m.Open(1, {}, "x" * 65, 0.0),
        m.Publish(1, 1, ("a", "x" * 65)),
        m.Publish(1, 1, ("a", b"b")),
        m.Publish(1, 1, ("a", ("b",))),
        m.DeleteTenant(1, "x" * 65),
        m.Explain(1, "x" * 65, "", 1, b""),
    ],
)
def test_invalid_tenant_names_are_refused(message: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=r"a tenant's name is no text, or too long \(at most 64"):
        m.decode(m.encode(message))


def test_columns_of_a_commit_have_one_length() -> None:
    with pytest.raises(RemoteProtocolError, match="8 bytes of checksums for 2 blocks"):
        m.decode(m.encode(m.Commit(1, 1, bytes(8), b"\1\1")))


def test_whole_numbers_do_for_seconds() -> None:
    assert m.decode(raw(tag(m.Acquire), 1, 1, 1, b"a", 2, 0, "", 0, 0, 0)).timeout_s == 2


def test_unencodable_messages_raise_a_local_error() -> None:
    for bad in (object(), 1 << 64, "\ud800"):
        with pytest.raises(LocalProtocolError, match="Failure cannot be sent"):
            m.encode(m.Failure(bad, ""))  # type: ignore[arg-type]


# -- frames


def feed_all(frames: Frames, *parts: bytes) -> list[Any]:
    return [message for part in parts for message in frames.feed(part)]


def test_a_frame_is_its_length_and_the_message() -> None:
    frame = pack(m.Ping(5))
    assert frame == struct.pack("<I", len(frame) - 4) + m.encode(m.Ping(5))


@given(st.lists(messages(), max_size=5), st.data())
@settings(max_examples=60)
def test_frames_arrive_however_they_are_cut(sent: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(pack, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = Frames()
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert feed_all(frames, *parts) == sent
    assert not frames.unfinished


def test_a_frame_may_be_split_at_every_byte() -> None:
    sent = [m.Ping(1), m.Lookup(2, 3, 4, b"abcdefgh", 0.5, 0.0), m.Failure("why", "hint")]
    stream = b"".join(map(pack, sent))
    for at in range(len(stream) + 1):
        assert feed_all(Frames(), stream[:at], stream[at:]) == sent
    assert feed_all(Frames(), *(stream[i : i + 1] for i in range(len(stream)))) == sent
    assert feed_all(Frames(), stream) == sent


def test_an_unfinished_frame_is_known_as_such() -> None:
    frames = Frames()
    frame = pack(m.Ping(1))
    for at in range(1, len(frame)):
        frames = Frames()
        assert feed_all(frames, frame[:at]) == []
        assert frames.unfinished
    assert feed_all(frames, frame[-1:]) == [m.Ping(1)]
    assert not frames.unfinished


def test_a_frame_over_the_limit_is_refused_at_its_length() -> None:
    frames = Frames(limit_bytes=100)
    with pytest.raises(RemoteProtocolError, match=r"a frame of 101 bytes, the limit is 100 \(.*client"):
        feed_all(frames, struct.pack("<I", 101))
    whole = struct.pack("<I", 101) + bytes(101)
    with pytest.raises(RemoteProtocolError, match="a frame of 101 bytes, the limit is 100"):
        feed_all(Frames(limit_bytes=100), whole)


def test_a_frame_at_the_limit_passes() -> None:
    body = m.encode(m.Failure("x" * 50, ""))
    frames = Frames(limit_bytes=len(body))
    assert feed_all(frames, struct.pack("<I", len(body)), body) == [m.Failure("x" * 50, "")]
    assert feed_all(frames, struct.pack("<I", len(body)) + body) == [m.Failure("x" * 50, "")]


def test_messages_before_the_bad_one_are_delivered() -> None:
    frames = Frames()
    arriving = frames.feed(pack(m.Ping(1)) + struct.pack("<I", 3) + b"\xc1\xc1\xc1" + pack(m.Ping(2)))
    assert next(arriving) == m.Ping(1)
    with pytest.raises(RemoteProtocolError):
        next(arriving)


def test_an_empty_frame_is_no_message() -> None:
    with pytest.raises(RemoteProtocolError):
        feed_all(Frames(), bytes(4))


def test_too_much_to_send_is_our_own_fault_with_a_hint() -> None:
    with pytest.raises(LocalProtocolError, match=r"Lookup takes .* the limit is 100 \(pass fewer keys"):
        pack(m.Lookup(1, 1, 1, bytes(200), 0.0, 0.0), limit_bytes=100)
    with pytest.raises(LocalProtocolError):
        pack(m.Lookup(1, 1, 1, bytes(DEFAULT_FRAME_BYTES + 1), 0.0, 0.0))


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(0, 60))
@settings(max_examples=200)
def test_any_stream_gives_messages_or_a_protocol_error(parts: list[bytes], limit: int) -> None:
    frames = Frames(limit)
    with contextlib.suppress(RemoteProtocolError):
        for message in feed_all(frames, *parts):
            assert type(message) in m.ALL
        assert len(frames._buffer) <= 4 + limit
