"""An S3 server that hangs, lies, refuses and goes away: calls end in time, and nothing wrong is read."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from bench.s3server import Reply, Request, S3Server, Stored, error
from kvstore.tiers.network.base import Name, NetworkError, Object, Outcome
from kvstore.tiers.network.objects import path
from tests.tiers.network.contract import SPACE, block, ends, payload, wanted
from tests.tiers.network.test_objectstore import PREFIX, opened

pytest.importorskip("obstore")

LATE_S = 0.3
"""What a loaded machine may add to a call's end."""

LARGE = 20 << 20


@pytest.fixture
def server():
    one = S3Server()
    yield one
    one.close()


@pytest.fixture
def backend(server):
    one = opened(server)
    yield one
    one.close()


def always(reply: Reply):
    return lambda _request, _reply: reply


def altered(**changes):
    """Replies that are right but for some fields."""

    def twist(_request: Request, reply: Reply) -> Reply:
        for name, value in changes.items():
            setattr(reply, name, value)
        return reply

    return twist


def in_time(call, within_s: float = 0.4):
    """What a call answers that gets so long; None if it raised a NetworkError that is not fatal."""
    started = time.monotonic()
    try:
        return call(started + within_s)
    except NetworkError as wrong:
        if wrong.fatal:
            raise
        return None
    finally:
        assert time.monotonic() - started < within_s + LATE_S


TROUBLES = {
    "hangs": altered(hang_s=30.0),
    "trickles": altered(pace=100.0, body=b"x" * 100_000),
    "garbage": always(Reply(200, raw=b"\0\xff not HTTP at all\r\n\r\n" * 50)),
    "endless head": always(Reply(200, raw=b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000)),
    "ends at once": always(Reply(200, raw=b"")),
    "busy": always(error(503, "SlowDown")),
    "broken": always(error(500, "InternalError")),
    "says nothing": always(Reply(204)),
    "odd length": always(Reply(200, raw=b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_calls_end_in_time_and_nothing_is_read(server, backend, trouble) -> None:
    put = block(b"k", 100_000)
    backend.write([put], ends())
    server.twist = trouble
    for many in (1, 3):
        answers = in_time(lambda until, many=many: backend.read([wanted(put)] * many, until))
        assert Outcome.OK not in (answers or [])
    in_time(lambda until: backend.write([put], until))
    in_time(lambda until: backend.probe([put.name], until))
    in_time(lambda until: backend.delete([put.name], until))
    in_time(lambda until: list(backend.list(None, until)))
    in_time(backend.health)


def test_hanging_requests_fail(server, backend) -> None:
    put, quick = block(b"k"), block(b"quick")
    backend.write([put, quick], ends())
    server.twist = lambda request, reply: (
        reply if request.key.endswith(path(quick.name)) else altered(hang_s=30.0)(request, reply)
    )
    got = wanted(quick)
    assert backend.read([wanted(put), got], ends(0.4)) == [Outcome.FAILED, Outcome.OK]
    assert payload(got) == payload(quick)
    assert backend.probe([put.name, quick.name], ends(0.4)) == [Outcome.FAILED, Outcome.OK]
    assert backend.write([put, quick], ends(0.4)) == [Outcome.FAILED, Outcome.OK]
    assert backend.delete([put.name], ends(0.4)) == [Outcome.FAILED]
    for asking in (lambda: list(backend.list(None, ends(0.4))), lambda: backend.health(ends(0.4))):
        with pytest.raises(NetworkError):
            asking()


def test_hanging_requests_do_not_delay_others(server, backend) -> None:
    hung, good = [block(bytes([i])) for i in range(7)], [block(bytes([i])) for i in range(7, 30)]
    backend.write([*hung, *good], ends())
    keys = {f"{PREFIX}/{path(one.name)}" for one in hung}
    hangs = altered(hang_s=30.0)
    server.twist = lambda request, reply: hangs(request, reply) if request.key in keys else reply
    got = [wanted(one) for one in [*hung, *good]]
    assert backend.read(got, ends(0.6)) == [Outcome.FAILED] * 7 + [Outcome.OK] * 23


@pytest.mark.parametrize("straight", [True, False])
def test_memory_is_left_alone_afterwards(server, backend, straight) -> None:
    backend._signs = straight
    put = block(b"k", 4 << 20)
    backend.write([put], ends())
    server.twist = altered(pace=4e6)
    got = wanted(put)
    assert backend.read([got], ends(0.3)) == [Outcome.FAILED]
    got.memory[:] = bytes(len(got.memory))
    time.sleep(0.4)
    assert not any(got.memory)


@pytest.mark.parametrize("nbytes", [100_000, LARGE])
@pytest.mark.parametrize("share", [0.4, 0.0001])
def test_a_cut_response_is_resumed_or_fails(server, backend, nbytes, share) -> None:
    put = block(b"k", nbytes)
    backend.write([put], ends())
    server.twist = altered(stop_after=int(nbytes * share))
    got = wanted(put)
    answer = in_time(lambda until: backend.read([got], until), 5.0)
    assert answer == [Outcome.OK if share == 0.4 else Outcome.FAILED]
    assert payload(got) == payload(put) or share != 0.4


def test_a_busy_server_is_asked_again(server, backend) -> None:
    put = block(b"k")
    for call in (backend.write, lambda _, until: backend.read([wanted(put)], until)):
        answers = [error(503, "SlowDown")] * 3
        server.twist = lambda _request, reply, answers=answers: answers.pop() if answers else reply
        assert call([put], ends()) == [Outcome.OK]
        assert not answers


def signed_only(server: S3Server) -> list[bool]:
    """A list that grows with each request: whether its URL is signed, as those are that come straight."""
    asked: list[bool] = []
    server.twist = lambda request, reply: asked.append("X-Amz-Signature" in request.query) or reply
    return asked


def test_blocks_come_straight_by_one_request(server, backend) -> None:
    blocks = [block(bytes([i]), 50_000) for i in range(20)]
    backend.write(blocks, ends())
    asked = signed_only(server)
    assert backend.read([wanted(b) for b in blocks], ends()) == [Outcome.OK] * 20
    assert asked == [True] * 20


def test_connections_are_used_again(server, backend) -> None:
    put = block(b"k")
    backend.write([put], ends())
    before = server.accepted
    for _ in range(20):
        assert backend.read([wanted(put)], ends()) == [Outcome.OK]
        assert backend.read([wanted(block(b"absent"))], ends()) == [Outcome.MISSING]
    assert server.accepted == before + 1


def test_connections_that_the_server_ended_are_no_failure(server, backend) -> None:
    blocks = [block(bytes([i])) for i in range(8)]
    backend.write(blocks, ends())
    asked = signed_only(server)
    for _ in range(3):
        assert backend.read([wanted(b) for b in blocks], ends()) == [Outcome.OK] * 8
        server.drop_connections()
        time.sleep(0.05)
    assert asked == [True] * 24


@pytest.mark.parametrize("length", [60_000, 80_000])
def test_another_length_is_seen_in_the_head(server, backend, length) -> None:
    backend.write([block(b"k", 70_000)], ends())
    asked = signed_only(server)
    thing = wanted(block(b"k", length))
    assert in_time(lambda until: backend.read([thing], until)) == [Outcome.TORN]
    assert asked == [True]


def test_large_blocks_come_in_ranges(server, backend) -> None:
    put = block(b"k", LARGE, parent=b"above")
    backend.write([put], ends())
    ranges: list[str] = []
    server.twist = lambda request, reply: ranges.append(request.headers.get("range", "")) or reply
    got = wanted(put)
    assert backend.read([got], ends()) == [Outcome.OK]
    assert (payload(got), got.parent) == (payload(put), b"above")
    assert len(ranges) == 3
    assert all(ranges)


def test_a_server_without_ranges_is_read_all_the_same(server, backend) -> None:
    put = block(b"k", LARGE)
    backend.write([put], ends())

    def whole(request: Request, reply: Reply) -> Reply:
        return Reply(200, server.objects[request.key].body, {"Last-Modified": reply.headers["Last-Modified"]})

    server.twist = whole
    got = wanted(put)
    assert backend.read([got], ends()) == [Outcome.OK]
    assert payload(got) == payload(put)


def between_ranges(server: S3Server, name: Name, change) -> None:
    """Lets somebody else change an object as soon as its first range has been answered."""

    def twist(_request: Request, reply: Reply) -> Reply:
        change(f"{PREFIX}/{path(name)}")
        return reply

    server.twist = twist


def test_an_object_deleted_between_ranges_is_missing(server, backend) -> None:
    put = block(b"k", LARGE)
    backend.write([put], ends())
    between_ranges(server, put.name, lambda key: server.objects.pop(key, None))
    assert backend.read([wanted(put)], ends()) == [Outcome.MISSING]


def test_an_object_replaced_between_ranges_is_torn(server, backend) -> None:
    put = block(b"k", LARGE)
    backend.write([put], ends())
    key = f"{PREFIX}/{path(put.name)}"
    other = Stored(bytes(len(server.objects[key].body)), time.time())
    between_ranges(server, put.name, lambda key: server.objects.update({key: other}))
    assert backend.read([wanted(put)], ends()) == [Outcome.TORN]


def test_ranges_of_another_size_of_object_are_torn(server, backend) -> None:
    backend.write([block(b"k", LARGE)], ends())
    for other in (LARGE - 1, LARGE + 1, LARGE // 2, LARGE * 2):
        thing = wanted(block(b"k", 1))
        thing = Object(thing.name, other, wanted(block(b"x", other)).memory)
        assert backend.read([thing], ends()) == [Outcome.TORN]


def test_a_bucket_that_is_not_there(server) -> None:
    backend = opened(server, "absent")
    put = block(b"k")
    for call in (
        lambda: backend.write([put], ends()),
        lambda: backend.read([wanted(put)], ends()),
        lambda: backend.health(ends()),
        lambda: list(backend.list(None, ends())),
    ):
        with pytest.raises(NetworkError, match="s3://absent: there is no such bucket") as told:
            call()
        assert told.value.fatal
    backend.close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (error(403, "AccessDenied"), "access is refused"),
        (error(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch"),
        (error(403, "InvalidAccessKeyId"), "credentials"),
        (error(401, "Unauthorized"), "access is refused"),
        (error(400, "ExpiredToken"), "ExpiredToken"),
        (error(403, "RequestTimeTooSkewed"), "clock"),
        (Reply(301), "region"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_are_fatal_and_have_hints(server, backend, reply, words) -> None:
    server.twist = always(reply)
    put = block(b"k")
    for call in (
        lambda: backend.write([put], ends()),
        lambda: backend.read([wanted(put)], ends()),
        lambda: backend.health(ends()),
    ):
        with pytest.raises(NetworkError, match=words) as told:
            call()
        assert told.value.fatal
        assert told.value.hint


@pytest.mark.parametrize(
    "reply",
    [error(507, "Odd"), error(507, "XMinioStorageFull"), error(403, "QuotaExceeded")],
    ids=["507", "minio", "quota"],
)
def test_no_room_is_full(server, backend, reply) -> None:
    server.twist = always(reply)
    assert backend.write([block(b"a"), block(b"b")], ends()) == [Outcome.FULL] * 2
    with pytest.raises(NetworkError, match="no room") as told:
        backend.health(ends())
    assert not told.value.fatal


def test_no_service_listens(server, backend) -> None:
    server.close()
    put = block(b"k")
    for call in (
        lambda: backend.write([put], ends()),
        lambda: backend.read([wanted(put)], ends()),
        lambda: backend.health(ends()),
    ):
        with pytest.raises(NetworkError, match="s3://bucket") as told:
            call()
        assert not told.value.fatal


def test_one_that_breaks_off_has_failed_and_the_rest_counts(server, backend) -> None:
    blocks = [block(bytes([i])) for i in range(9)]
    last = f"{PREFIX}/{path(blocks[8].name)}"
    assert backend.write(blocks, ends()) == [Outcome.OK] * 9
    server.twist = lambda request, reply: Reply(200, raw=b"") if request.key == last else reply
    assert backend.read([wanted(b) for b in blocks], ends()) == [Outcome.OK] * 8 + [Outcome.FAILED]
    assert backend.write(blocks, ends()) == [Outcome.OK] * 8 + [Outcome.FAILED]


def test_one_that_has_come_back_is_used_again(server, backend) -> None:
    put = block(b"k")
    backend.write([put], ends())
    server.twist = always(Reply(200, raw=b""))
    in_time(lambda until: backend.read([wanted(put)], until))
    server.twist = altered()
    assert backend.read([wanted(put)], ends()) == [Outcome.OK]


def test_ages_are_by_the_servers_clock() -> None:
    server = S3Server(clock=lambda: time.time() - 400 * 86400)
    backend = opened(server)
    old = block(b"old")
    backend.write([old, block(b"new")], ends())
    server.objects[f"{PREFIX}/{path(old.name)}"].modified_s -= 3600
    ages = {listed.name.key: listed.age_s for listed in backend.list(SPACE, ends())}
    assert -2 < ages[b"new"] < 30
    assert 3598 < ages[b"old"] < 3630
    backend.close()
    server.close()


def test_long_lists_and_foreign_objects(server, backend) -> None:
    names = [Name(SPACE, i.to_bytes(4, "little")) for i in range(2500)]
    foreign = ("kvstore-1/readme", "kvstore-2/x", "kvstore-1/" + "0" * 32 + "/zz/00", "a b/<c>")
    for key in (*map(path, names), *foreign):
        server.objects[f"{PREFIX}/{key}"] = Stored(b"x" * 300, time.time())
    server.objects[path(Name(SPACE, b"elsewhere"))] = Stored(b"x", time.time())
    listed = list(backend.list(None, ends()))
    assert sorted(one.name.key for one in listed) == sorted(name.key for name in names)
    assert {one.nbytes for one in listed} == {300}
    assert backend.delete(names, ends()) == [Outcome.OK] * 2500
    assert len(server.objects) == 5


def test_one_that_can_not_be_deleted_does_not_keep_the_others(server, backend) -> None:
    blocks = [block(bytes([i])) for i in range(3)]
    backend.write(blocks, ends())
    stays = path(blocks[1].name).encode()
    server.twist = lambda request, reply: error(500, "InternalError") if stays in request.body else reply
    answers = backend.delete([b.name for b in blocks], ends())
    assert answers == [Outcome.OK, Outcome.FAILED, Outcome.OK]


def test_an_interrupted_list_raises(server, backend) -> None:
    for i in range(1500):
        key = path(Name(SPACE, i.to_bytes(4, "little")))
        server.objects[f"{PREFIX}/{key}"] = Stored(b"x", time.time())
    server.twist = lambda request, reply: (
        error(500, "InternalError") if "continuation-token" in request.query else reply
    )
    with pytest.raises(NetworkError, match="listing"):
        list(backend.list(None, ends()))


def test_health_checks_leave_no_objects(server, backend) -> None:
    backend.health(ends())
    assert not server.objects
    assert [method for method, _ in server.requests] == ["PUT", "GET", "POST"]


def test_a_health_check_reads_at_most_its_own_object(server, backend) -> None:
    """A library that takes memory for what a server promises would end the process."""
    promise = {"Content-Length": str(1 << 50)}
    server.twist = lambda request, reply: (
        Reply(200, b"y" * 5000, reply.headers | promise, pace=1e5) if request.key else reply
    )
    with pytest.raises(NetworkError, match="differ from the bytes written"):
        backend.health(ends())


def test_error_bodies_are_cut_and_escaped(server, backend) -> None:
    server.twist = always(error(400, "-", "\x1b[31mred\u202e\r\nERROR all is lost" * 100))
    with pytest.raises(NetworkError) as told:
        backend.health(ends())
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 600


def test_health_sees_a_store_that_answers_with_something_else(server, backend) -> None:
    server.twist = lambda request, reply: (
        Reply(200, b"y" * 64, reply.headers) if request.method == "GET" else reply
    )
    with pytest.raises(NetworkError, match="differ from the bytes written"):
        backend.health(ends())


def test_closing_ends_calls(server, backend) -> None:
    put = block(b"k")
    backend.write([put], ends())
    server.twist = altered(hang_s=30.0)
    answers: list[list[Outcome]] = []
    calls = [
        threading.Thread(target=lambda: answers.append(backend.read([wanted(put)], ends()))),
        threading.Thread(target=lambda: answers.append(backend.probe([put.name], ends()))),
    ]
    for call in calls:
        call.start()
    time.sleep(0.2)
    backend.close()
    for call in calls:
        call.join(2.0)
    assert answers == [[Outcome.FAILED]] * 2


_HUNG = """
import sys, threading, time
from kvstore.tiers.network import BackendSettings, open_backend
from tests.tiers.network.contract import block, ends, wanted
url = f"s3://bucket?endpoint={sys.argv[1]}&region=us-east-1"
backend = open_backend(BackendSettings(url, user="key", password="secret"))
read = lambda: backend.read([wanted(block(b"k"))], ends(60))
write = lambda: backend.write([block(b"k")], ends(60))
for call in (read, write):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.5)
"""


def test_a_process_ends_though_calls_hang(server) -> None:
    server.twist = altered(hang_s=60.0)
    command = [sys.executable, "-c", _HUNG, server.endpoint]
    done = subprocess.run(command, timeout=20, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
